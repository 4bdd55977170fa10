//! `--wait`: waits until the cluster and its nodes have completed a change that the curator has
//! accepted.

use std::time::Duration;

use hearth_api::client::{Channel, within};
use hearth_api::names;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    GetConsensusStatusRequest, GetConsensusStatusResponse, GetNodesRequest, Node, NodeCondition,
    NodeState,
};
use tonic::Status;

use super::{or_interrupted, passing, tell};
use crate::args::{Global, RoleName};
use crate::failure::{Failure, Kind};
use crate::output::{self, safe};

/// Polling interval. It polls because curators do not offer a watch on membership changes.
const LOOK: Duration = Duration::from_secs(1);

/// After this many polls in a row in which the change is neither complete nor pending, it counts as
/// reverted by someone.
const TAKEN_BACK_AFTER: u32 = 10;

/// The state to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal<'a> {
    /// The node has these roles, and they are ready.
    Has(&'a [RoleName]),
    /// The node has none of these roles, and has stopped them.
    HasNot(&'a [RoleName]),
    /// The node is decommissioned.
    Decommissioned,
}

/// The result of one poll; the text says what the change is waiting for. Of several roles, the
/// greatest in this order counts.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum WaitStatus {
    Reached,
    /// The goal is not reached, and no change is pending.
    Idle(String),
    Pending(String),
    /// Waiting cannot help.
    Never(String),
}

impl Goal<'_> {
    fn look(self, node: &Node, consensus: &GetConsensusStatusResponse) -> WaitStatus {
        let (roles, held) = match self {
            Self::Has(roles) => (roles, true),
            Self::HasNot(roles) => (roles, false),
            Self::Decommissioned if node.state() == NodeState::Decommissioned => {
                return WaitStatus::Reached;
            }
            Self::Decommissioned => return follows(node, consensus),
        };
        let has = node.roles.unwrap_or_default();
        let looks = roles.iter().map(|role| match role {
            RoleName::ConsensusMember => member(node, consensus, held),
            RoleName::KubernetesController => {
                let changed = has.kubernetes_controller.is_some() == held;
                kubernetes(node, names::CONDITION_KUBERNETES_CONTROLLER, changed, held)
            }
            RoleName::KubernetesWorker => {
                let changed = has.kubernetes_worker.is_some() == held;
                kubernetes(node, names::CONDITION_KUBERNETES_WORKER, changed, held)
            }
        });
        looks.max().unwrap_or(WaitStatus::Reached)
    }
}

fn is_changing(node: &Node, consensus: &GetConsensusStatusResponse) -> bool {
    consensus.changes.iter().any(|one| one.node_id == node.id)
}

/// Whether the node is a voter, or has left consensus.
fn member(node: &Node, consensus: &GetConsensusStatusResponse, held: bool) -> WaitStatus {
    let mut members = consensus.members.iter();
    let member = members.find(|member| member.node_id == node.id);
    let roles = node.roles.unwrap_or_default();
    let has = roles.consensus_member.is_some();
    let reached = match held {
        true => has && member.is_some_and(|member| !member.learner),
        false => !has && member.is_none(),
    };
    match reached && !is_changing(node, consensus) {
        true => WaitStatus::Reached,
        false => follows(node, consensus),
    }
}

/// The state of a membership change that is not complete.
fn follows(node: &Node, consensus: &GetConsensusStatusResponse) -> WaitStatus {
    let progress = progress(node, consensus);
    match is_changing(node, consensus) {
        true => WaitStatus::Pending(progress),
        false => WaitStatus::Idle(progress),
    }
}

/// Whether a Kubernetes role is ready, or has stopped, according to the node's condition.
/// `changed`: the node's record has the change.
fn kubernetes(node: &Node, name: &str, changed: bool, held: bool) -> WaitStatus {
    let mut conditions = node.status.iter().flat_map(|status| &status.conditions);
    let condition = conditions.find(|condition| condition.r#type == name);
    let is_final = |condition: &NodeCondition| {
        [names::REASON_NOT_INSTALLED, names::REASON_EXTENSION_REFUSED]
            .contains(&condition.reason.as_str())
    };
    match (held, condition) {
        _ if !changed => WaitStatus::Idle("waiting for the node record to be updated".to_owned()),
        (true, None) => WaitStatus::Pending(format!("{name}: waiting for the node to report it")),
        (true, Some(condition)) if condition.met => WaitStatus::Reached,
        (true, Some(condition)) => {
            let text = safe(&output::Condition::from(condition).text());
            match is_final(condition) {
                true => WaitStatus::Never(text),
                false => WaitStatus::Pending(text),
            }
        }
        (false, None) => WaitStatus::Reached,
        (false, Some(_)) => WaitStatus::Pending(format!("{name}: waiting for the node to stop it")),
    }
}

/// Waits until the goal is reached. Connection losses are tolerated. There is no timeout while the
/// change is pending: it may have to wait until a learner is in sync, or until the machine is
/// powered on.
pub(super) async fn until(
    global: &Global,
    channel: &Channel,
    id: &str,
    goal: Goal<'_>,
) -> Result<Node, Failure> {
    let advice = "the change continues; repeat the command to wait again";
    or_interrupted(
        "complete the wait",
        advice,
        follow(global, channel, id, goal),
    )
    .await
}

async fn follow(
    global: &Global,
    channel: &Channel,
    id: &str,
    goal: Goal<'_>,
) -> Result<Node, Failure> {
    let what = format!("wait for {}", safe(id));
    let failure = |why: &str| Failure::new(Kind::Cluster, &*what).because(why);
    let mut told = String::new();
    let mut looks = tokio::time::interval(LOOK);
    let mut idle = 0;
    loop {
        looks.tick().await;
        let (node, consensus) = match look(global, channel, id).await {
            Ok((Some(node), consensus)) => (node, consensus),
            Ok((None, _)) => {
                return Err(failure("the node has been deleted"));
            }
            Err(status) if passing(&status) => {
                tell(
                    &mut told,
                    "lost the connection to the cluster; retrying".into(),
                );
                continue;
            }
            Err(status) => return Err(Failure::call(what, status)),
        };
        let look = goal.look(&node, &consensus);
        if is_taken_back(&mut idle, &look) {
            let why =
                "the change is not complete and no longer pending: it has been reverted by someone";
            return Err(failure(why).advise(
                "`hearthctl node describe` and `hearthctl etcd members` show the current state",
            ));
        }
        match look {
            WaitStatus::Reached => return Ok(node),
            WaitStatus::Idle(progress) | WaitStatus::Pending(progress) => tell(&mut told, progress),
            WaitStatus::Never(why) => {
                return Err(failure(&why).advise(
                    "install an image that has the extension (docs/kubernetes.md), or remove the \
                     role",
                ));
            }
        }
    }
}

/// Whether nothing has been pending for [`TAKEN_BACK_AFTER`] polls. One poll is not conclusive,
/// because records and membership are not read at the same moment.
fn is_taken_back(idle: &mut u32, look: &WaitStatus) -> bool {
    *idle = match look {
        WaitStatus::Idle(_) => *idle + 1,
        WaitStatus::Reached | WaitStatus::Pending(_) | WaitStatus::Never(_) => 0,
    };
    *idle >= TAKEN_BACK_AFTER
}

async fn look(
    global: &Global,
    channel: &Channel,
    id: &str,
) -> Result<(Option<Node>, GetConsensusStatusResponse), Status> {
    within(global.timeout, async {
        let request = GetNodesRequest {
            node_ids: vec![id.to_owned()],
            ..GetNodesRequest::default()
        };
        let nodes = hearth_operator::nodes(ManagementClient::new(channel.clone()), request).await?;
        let found = nodes.into_iter().find(|node| node.id == id);
        let mut curator = CuratorClient::new(channel.clone());
        let consensus = curator
            .get_consensus_status(GetConsensusStatusRequest {})
            .await?;
        Ok((found, consensus.into_inner()))
    })
    .await
}

/// One line that says what the membership change is waiting for.
fn progress(node: &Node, consensus: &GetConsensusStatusResponse) -> String {
    let mut changes = consensus.changes.iter();
    let change = changes.find(|change| change.node_id == node.id);
    let mut members = consensus.members.iter();
    let learns = members.any(|member| member.node_id == node.id && member.learner);
    match change {
        Some(change) if !change.reason.is_empty() => safe(&change.reason),
        _ if learns => "learner is catching up".to_owned(),
        Some(_) => "membership change is queued".to_owned(),
        None => "waiting for the node record to be updated".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::{ConsensusMemberStatus, MembershipChange, NodeRoles, node_roles};

    use super::*;

    #[test]
    fn a_change_that_is_pending_is_waited_for_and_one_that_nobody_wants_is_not() {
        let [nothing, pending] = [
            WaitStatus::Idle(String::new()),
            WaitStatus::Pending(String::new()),
        ];
        let mut idle = 0;
        for _ in 0..5 {
            for _ in 1..TAKEN_BACK_AFTER {
                assert!(!is_taken_back(&mut idle, &nothing));
            }
            assert!(!is_taken_back(&mut idle, &pending));
        }
        let looks = (0..TAKEN_BACK_AFTER).filter(|_| is_taken_back(&mut idle, &nothing));
        assert_eq!(looks.count(), 1);
    }

    #[test]
    fn goals_need_the_record_and_the_membership() {
        let mut node = Node {
            id: "a".into(),
            ..Node::default()
        };
        let mut consensus = GetConsensusStatusResponse::default();
        let reached = |node: &Node, consensus: &_| {
            let member = &[RoleName::ConsensusMember];
            [
                Goal::Has(member),
                Goal::HasNot(member),
                Goal::Decommissioned,
            ]
            .map(|goal| goal.look(node, consensus) == WaitStatus::Reached)
        };
        assert_eq!(reached(&node, &consensus), [false, true, false]);
        consensus.changes.push(MembershipChange {
            node_id: "a".into(),
            ..MembershipChange::default()
        });
        assert_eq!(reached(&node, &consensus), [false; 3]);
        consensus.members.push(ConsensusMemberStatus {
            node_id: "a".into(),
            learner: true,
            ..ConsensusMemberStatus::default()
        });
        node.roles = Some(NodeRoles {
            consensus_member: Some(node_roles::ConsensusMember::default()),
            ..NodeRoles::default()
        });
        assert_eq!(reached(&node, &consensus), [false; 3]);
        consensus.changes.clear();
        assert_eq!(reached(&node, &consensus), [false; 3]);
        consensus.members[0].learner = false;
        assert_eq!(reached(&node, &consensus), [true, false, false]);
        node.set_state(NodeState::Decommissioned);
        assert_eq!(reached(&node, &consensus), [true, false, true]);
    }

    #[test]
    fn a_role_of_kubernetes_is_what_the_node_says_of_it() {
        let consensus = GetConsensusStatusResponse::default();
        let worker = &[RoleName::KubernetesWorker];
        let look = |node: &Node, goal: Goal<'_>| goal.look(node, &consensus);
        let mut node = Node::default();
        assert!(matches!(
            look(&node, Goal::Has(worker)),
            WaitStatus::Idle(_)
        ));
        assert_eq!(look(&node, Goal::HasNot(worker)), WaitStatus::Reached);

        node.roles = Some(NodeRoles {
            kubernetes_worker: Some(node_roles::KubernetesWorker::default()),
            ..NodeRoles::default()
        });
        assert!(matches!(
            look(&node, Goal::Has(worker)),
            WaitStatus::Pending(_)
        ));
        assert!(matches!(
            look(&node, Goal::HasNot(worker)),
            WaitStatus::Idle(_)
        ));

        let says = |node: &mut Node, met, reason: &str| {
            let condition = NodeCondition {
                r#type: names::CONDITION_KUBERNETES_WORKER.into(),
                met,
                reason: reason.into(),
                message: "not ready yet".into(),
            };
            node.status.get_or_insert_default().conditions = vec![condition];
        };
        says(&mut node, false, "Starting");
        let waits = "KubernetesWorker: Starting: not ready yet".to_owned();
        assert_eq!(look(&node, Goal::Has(worker)), WaitStatus::Pending(waits));
        says(&mut node, false, names::REASON_NOT_INSTALLED);
        assert!(matches!(
            look(&node, Goal::Has(worker)),
            WaitStatus::Never(_)
        ));
        says(&mut node, true, "");
        assert_eq!(look(&node, Goal::Has(worker)), WaitStatus::Reached);
        let both = &[RoleName::KubernetesWorker, RoleName::ConsensusMember];
        assert!(matches!(look(&node, Goal::Has(both)), WaitStatus::Idle(_)));

        node.roles = None;
        assert!(matches!(
            look(&node, Goal::HasNot(worker)),
            WaitStatus::Pending(_)
        ));
        node.status = None;
        assert_eq!(look(&node, Goal::HasNot(worker)), WaitStatus::Reached);
    }
}
