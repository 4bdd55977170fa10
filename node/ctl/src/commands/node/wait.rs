//! Waiting for what the cluster goes on with after it has answered.

use std::time::Duration;

use hearth_api::client::{Channel, within};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    GetConsensusStatusRequest, GetConsensusStatusResponse, GetNodesRequest, Node, NodeState,
};
use tonic::Status;

use super::passing;
use crate::args::Global;
use crate::failure::{Failure, Kind};
use crate::output::safe;

/// How often it is looked. Changes of the membership are nothing that the
/// cluster tells of itself.
const LOOK: Duration = Duration::from_secs(1);

/// A change that is complete shows at once, one that is not is pending. If it
/// is neither for so many looks, somebody has taken it back.
const TAKEN_BACK_AFTER: u32 = 10;

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// It votes in consensus.
    Member,
    /// It has no part in consensus.
    NoMember,
    /// It is out of service.
    Decommissioned,
}

impl Goal {
    fn reached(self, node: &Node, consensus: &GetConsensusStatusResponse) -> bool {
        let changing = is_changing(node, consensus);
        let mut members = consensus.members.iter();
        let member = members.find(|member| member.node_id == node.id);
        let role = node
            .roles
            .is_some_and(|roles| roles.consensus_member.is_some());
        match self {
            Self::Member => role && !changing && member.is_some_and(|member| !member.learner),
            Self::NoMember => !role && !changing && member.is_none(),
            Self::Decommissioned => node.state() == NodeState::Decommissioned,
        }
    }
}

fn is_changing(node: &Node, consensus: &GetConsensusStatusResponse) -> bool {
    consensus.changes.iter().any(|one| one.node_id == node.id)
}

/// Until it is so. The cluster may be out of reach for a while meanwhile. This
/// has no bound while the change is pending: it takes as long as a node needs to
/// get in sync, or to be switched on.
pub async fn until(
    global: &Global,
    channel: &Channel,
    id: &str,
    goal: Goal,
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

async fn follow(global: &Global, channel: &Channel, id: &str, goal: Goal) -> Result<Node, Failure> {
    let mut told = String::new();
    let mut looks = tokio::time::interval(LOOK);
    let mut idle = 0;
    loop {
        looks.tick().await;
        let progress = match look(global, channel, id).await {
            Ok((Some(node), consensus)) => {
                if goal.reached(&node, &consensus) {
                    return Ok(node);
                }
                if is_taken_back(&mut idle, is_changing(&node, &consensus)) {
                    return Err(taken_back(id));
                }
                progress(&node, &consensus)
            }
            Ok((None, _)) => {
                return Err(
                    Failure::new(Kind::Cluster, format!("wait for {}", safe(id)))
                        .because("somebody has deleted it"),
                );
            }
            Err(status) if passing(&status) => "lost touch with the cluster, trying again".into(),
            Err(status) => return Err(Failure::call(format!("wait for {}", safe(id)), status)),
        };
        if progress != told {
            eprintln!("hearthctl: {progress}");
            told = progress;
        }
    }
}

/// Whether nothing has been pending for long enough. Records and membership are
/// read one after the other, so one look alone tells nothing.
fn is_taken_back(idle: &mut u32, changing: bool) -> bool {
    *idle = if changing { 0 } else { *idle + 1 };
    *idle >= TAKEN_BACK_AFTER
}

fn taken_back(id: &str) -> Failure {
    Failure::new(Kind::Cluster, format!("wait for {}", safe(id)))
        .because("the change is not complete, and not pending any more: somebody has taken it back")
        .advise("`hearthctl node describe` and `hearthctl etcd members` show how it stands")
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
        let mut management = ManagementClient::new(channel.clone());
        let mut answers = management.get_nodes(request).await?.into_inner();
        let mut found = None;
        while let Some(answer) = answers.message().await? {
            let mut nodes = answer.nodes.into_iter();
            found = nodes.find(|node| node.id == id).or(found);
        }
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
        let mut idle = 0;
        for _ in 0..5 {
            for _ in 1..TAKEN_BACK_AFTER {
                assert!(!is_taken_back(&mut idle, false));
            }
            assert!(!is_taken_back(&mut idle, true));
        }
        let looks = (0..TAKEN_BACK_AFTER).filter(|_| is_taken_back(&mut idle, false));
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
            [Goal::Member, Goal::NoMember, Goal::Decommissioned]
                .map(|goal| goal.reached(node, consensus))
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
        assert!(Goal::Decommissioned.reached(&node, &consensus));
    }
}
