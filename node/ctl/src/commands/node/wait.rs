//! Waiting for what the cluster and its nodes go on with after the curator has
//! answered.

use std::time::Duration;

use hearth_api::client::{Channel, within};
use hearth_api::names;
use hearth_api::operator;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    GetConsensusStatusRequest, GetConsensusStatusResponse, GetNodesRequest, Node, NodeCondition,
    NodeState,
};
use tonic::Status;

use super::passing;
use crate::args::{Global, RoleName};
use crate::failure::{Failure, Kind};
use crate::output::{self, safe};

/// How often it is looked. Changes of the membership are nothing that the
/// cluster tells of itself.
const LOOK: Duration = Duration::from_secs(1);

/// A change that is complete shows at once, one that is not is pending. If it
/// is neither for so many looks, somebody has taken it back.
const TAKEN_BACK_AFTER: u32 = 10;

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal<'a> {
    /// It has these roles, and they work.
    Has(&'a [RoleName]),
    /// It has none of these roles, and nothing of them runs.
    HasNot(&'a [RoleName]),
    /// It is out of service.
    Decommissioned,
}

/// How far it is, with a line that says what it waits for. Of several, the last
/// in this order holds for all.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Look {
    Reached,
    /// It is not so, and nothing is pending.
    Idle(String),
    Pending(String),
    /// No waiting helps.
    Never(String),
}

impl Goal<'_> {
    fn look(self, node: &Node, consensus: &GetConsensusStatusResponse) -> Look {
        let (roles, held) = match self {
            Self::Has(roles) => (roles, true),
            Self::HasNot(roles) => (roles, false),
            Self::Decommissioned if node.state() == NodeState::Decommissioned => {
                return Look::Reached;
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
        looks.max().unwrap_or(Look::Reached)
    }
}

fn is_changing(node: &Node, consensus: &GetConsensusStatusResponse) -> bool {
    consensus.changes.iter().any(|one| one.node_id == node.id)
}

/// Whether it is a voter, or has left.
fn member(node: &Node, consensus: &GetConsensusStatusResponse, held: bool) -> Look {
    let mut members = consensus.members.iter();
    let member = members.find(|member| member.node_id == node.id);
    let roles = node.roles.unwrap_or_default();
    let has = roles.consensus_member.is_some();
    let reached = match held {
        true => has && member.is_some_and(|member| !member.learner),
        false => !has && member.is_none(),
    };
    match reached && !is_changing(node, consensus) {
        true => Look::Reached,
        false => follows(node, consensus),
    }
}

/// What consensus has yet to do for the node.
fn follows(node: &Node, consensus: &GetConsensusStatusResponse) -> Look {
    let progress = progress(node, consensus);
    match is_changing(node, consensus) {
        true => Look::Pending(progress),
        false => Look::Idle(progress),
    }
}

/// Whether a role of Kubernetes works, or has ended, by what the node says of
/// it; `changed` if the records say what is wanted.
fn kubernetes(node: &Node, name: &str, changed: bool, held: bool) -> Look {
    let mut conditions = node.status.iter().flat_map(|status| &status.conditions);
    let condition = conditions.find(|condition| condition.r#type == name);
    let is_final = |condition: &NodeCondition| {
        [names::REASON_NOT_INSTALLED, names::REASON_EXTENSION_REFUSED]
            .contains(&condition.reason.as_str())
    };
    match (held, condition) {
        _ if !changed => Look::Idle("the node's record follows".to_owned()),
        (true, None) => Look::Pending(format!("{name}: the node has yet to say how it stands")),
        (true, Some(condition)) if condition.met => Look::Reached,
        (true, Some(condition)) => {
            let text = safe(&output::Condition::from(condition).text());
            match is_final(condition) {
                true => Look::Never(text),
                false => Look::Pending(text),
            }
        }
        (false, None) => Look::Reached,
        (false, Some(_)) => Look::Pending(format!("{name}: the node has yet to end it")),
    }
}

/// Until it is so. The cluster may be out of reach for a while meanwhile. This
/// has no bound while the change is pending: it takes as long as a node needs to
/// get in sync, or to be switched on.
pub(super) async fn until(
    global: &Global,
    channel: &Channel,
    id: &str,
    goal: Goal<'_>,
) -> Result<Node, Failure> {
    tokio::select! {
        reached = follow(global, channel, id, goal) => reached,
        _ = tokio::signal::ctrl_c() => {
            Err(Failure::new(Kind::Interrupted, "wait any longer")
                .because("interrupted")
                .advise("the cluster goes on with it; the same command again waits again"))
        }
    }
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
                return Err(failure("somebody has deleted it"));
            }
            Err(status) if passing(&status) => {
                tell(
                    &mut told,
                    "lost touch with the cluster, trying again".into(),
                );
                continue;
            }
            Err(status) => return Err(Failure::call(what, status)),
        };
        let look = goal.look(&node, &consensus);
        if is_taken_back(&mut idle, &look) {
            let why =
                "the change is not complete, and not pending any more: somebody has taken it back";
            return Err(failure(why).advise(
                "`hearthctl node describe` and `hearthctl etcd members` show how it stands",
            ));
        }
        match look {
            Look::Reached => return Ok(node),
            Look::Idle(progress) | Look::Pending(progress) => tell(&mut told, progress),
            Look::Never(why) => {
                return Err(failure(&why).advise(
                    "install an image with the extension on it (docs/kubernetes.md), or take the \
                     role back",
                ));
            }
        }
    }
}

/// Says what is new.
fn tell(told: &mut String, progress: String) {
    if progress != *told {
        eprintln!("hearthctl: {progress}");
        *told = progress;
    }
}

/// Whether nothing has been pending for long enough. Records and membership are
/// read one after the other, so one look alone tells nothing.
fn is_taken_back(idle: &mut u32, look: &Look) -> bool {
    *idle = match look {
        Look::Idle(_) => *idle + 1,
        Look::Reached | Look::Pending(_) | Look::Never(_) => 0,
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
        let nodes = operator::nodes(ManagementClient::new(channel.clone()), request).await?;
        let found = nodes.into_iter().find(|node| node.id == id);
        let mut curator = CuratorClient::new(channel.clone());
        let consensus = curator
            .get_consensus_status(GetConsensusStatusRequest {})
            .await?;
        Ok((found, consensus.into_inner()))
    })
    .await
}

/// In one line, what it waits for.
fn progress(node: &Node, consensus: &GetConsensusStatusResponse) -> String {
    let mut changes = consensus.changes.iter();
    let change = changes.find(|change| change.node_id == node.id);
    let mut members = consensus.members.iter();
    let learns = members.any(|member| member.node_id == node.id && member.learner);
    match change {
        Some(change) if !change.reason.is_empty() => safe(&change.reason),
        _ if learns => "it is in consensus, and gets what the others have".to_owned(),
        Some(_) => "the change of the membership waits for its turn".to_owned(),
        None => "the node's record follows".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::{ConsensusMemberStatus, MembershipChange, NodeRoles, node_roles};

    use super::*;

    #[test]
    fn a_change_that_is_pending_is_waited_for_and_one_that_nobody_wants_is_not() {
        let [nothing, pending] = [Look::Idle(String::new()), Look::Pending(String::new())];
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
            .map(|goal| goal.look(node, consensus) == Look::Reached)
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
        assert!(matches!(look(&node, Goal::Has(worker)), Look::Idle(_)));
        assert_eq!(look(&node, Goal::HasNot(worker)), Look::Reached);

        node.roles = Some(NodeRoles {
            kubernetes_worker: Some(node_roles::KubernetesWorker::default()),
            ..NodeRoles::default()
        });
        assert!(matches!(look(&node, Goal::Has(worker)), Look::Pending(_)));
        assert!(matches!(look(&node, Goal::HasNot(worker)), Look::Idle(_)));

        let says = |node: &mut Node, met, reason: &str| {
            let condition = NodeCondition {
                r#type: names::CONDITION_KUBERNETES_WORKER.into(),
                met,
                reason: reason.into(),
                message: "so it is".into(),
            };
            node.status.get_or_insert_default().conditions = vec![condition];
        };
        says(&mut node, false, "Starting");
        let waits = "KubernetesWorker: Starting: so it is".to_owned();
        assert_eq!(look(&node, Goal::Has(worker)), Look::Pending(waits));
        says(&mut node, false, names::REASON_NOT_INSTALLED);
        assert!(matches!(look(&node, Goal::Has(worker)), Look::Never(_)));
        says(&mut node, true, "");
        assert_eq!(look(&node, Goal::Has(worker)), Look::Reached);
        let both = &[RoleName::KubernetesWorker, RoleName::ConsensusMember];
        assert!(matches!(look(&node, Goal::Has(both)), Look::Idle(_)));

        node.roles = None;
        assert!(matches!(
            look(&node, Goal::HasNot(worker)),
            Look::Pending(_)
        ));
        node.status = None;
        assert_eq!(look(&node, Goal::HasNot(worker)), Look::Reached);
    }
}
