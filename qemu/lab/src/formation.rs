//! From a cluster of one node to the requested cluster: decides the next steps from its current status.
//!
//! Nothing is remembered between two reconciliations, and no step is taken that the latest status does not require: an
//! interrupted formation continues where it was, and a complete one has no next step. What happens in between (a
//! curator that is lost, a learner that is removed and queued again) is handled by the cluster, and only appears here
//! as one more status in which something is missing.

use std::net::Ipv4Addr;
use std::time::Duration;

use hearth_api::v1::{self, ClusterState, NodeHealth, NodeState};
use hearth_operator::{ClusterStatus, Operator};

use crate::{LabError, Result};

/// Number of nodes that are made consensus members, the first of the cluster: enough for losing one; each further one
/// makes every write slower.
pub const VOTERS: u16 = 3;

/// A machine that is, or will be, a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the machine.
    pub machine: String,
    /// Its address in the network.
    pub address: Ipv4Addr,
    /// Its public key, from its own console while it waits for approval.
    pub public_key: Option<Vec<u8>>,
    /// Its node ID, if it has been a member before.
    pub id: Option<String>,
    /// Whether it is to be approved.
    pub approve: bool,
    /// Whether it is to be a consensus member.
    pub votes: bool,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Approve the node with this key.
    Approve {
        /// Name of its machine.
        machine: String,
        /// Its key.
        public_key: Vec<u8>,
    },
    /// Make this node a consensus member.
    MakeMember {
        /// Name of its machine.
        machine: String,
        /// Its node ID.
        id: String,
    },
}

/// The outcome of one reconciliation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What to do next.
    pub steps: Vec<Step>,
    /// What is missing, by machine; empty if the cluster is as requested.
    pub missing: Vec<(String, String)>,
}

impl Candidate {
    /// The node of this machine in the cluster's list, by its key or its ID. An address alone only identifies a member,
    /// which reports it itself over mutual TLS.
    pub fn node<'a>(&self, nodes: &'a [v1::Node]) -> Option<&'a v1::Node> {
        let is = |node: &&v1::Node| {
            let key = self.public_key.as_ref();
            if let Some(id) = &self.id {
                return node.id == *id;
            }
            if let Some(key) = key {
                return node.public_key == *key;
            }
            let status = node.status.as_ref();
            status.is_some_and(|status| status.external_address == self.address.to_string())
        };
        nodes.iter().find(is)
    }
}

/// Decides the next steps.
pub fn plan(candidates: &[Candidate], cluster_status: &ClusterStatus) -> Plan {
    let mut plan = Plan::default();
    for candidate in candidates {
        let (step, missing) = look(candidate, cluster_status);
        plan.steps.extend(step);
        if let Some(missing) = missing {
            plan.missing.push((candidate.machine.clone(), missing));
        }
    }
    plan
}

fn look(candidate: &Candidate, cluster_status: &ClusterStatus) -> (Option<Step>, Option<String>) {
    let missing = |what: &str| Some(what.to_owned());
    let Some(node) = candidate.node(&cluster_status.nodes) else {
        return match candidate.approve && candidate.id.is_none() {
            true => (None, missing("its registration")),
            // Left for the user: whether it has registered yet does not matter. Or it was a member and has been deleted
            // since: it cannot rejoin.
            false => (None, None),
        };
    };
    match node.state() {
        NodeState::New if candidate.approve => {
            let step = Step::Approve {
                machine: candidate.machine.clone(),
                public_key: node.public_key.clone(),
            };
            // Never by the list alone: only a key that the machine itself has shown on its console.
            match &candidate.public_key {
                Some(_) => (Some(step), missing("its approval")),
                None => (None, missing("its key on its console")),
            }
        }
        NodeState::New => (None, None),
        NodeState::Standby => (None, missing("its commit")),
        NodeState::Up => up(candidate, node, cluster_status),
        NodeState::Decommissioned => (None, None),
        NodeState::Unspecified => (None, missing("a known node state")),
    }
}

fn up(
    candidate: &Candidate,
    node: &v1::Node,
    cluster_status: &ClusterStatus,
) -> (Option<Step>, Option<String>) {
    let status = node.status.as_ref();
    let state = status.map_or(ClusterState::Unspecified, |status| status.cluster_state());
    if state != ClusterState::Home {
        return (None, Some("HOME".to_owned()));
    }
    let member = member(node, cluster_status);
    let voter = member.is_some_and(|member| !member.learner);
    if candidate.votes && !voter {
        let wanted = wants(node, cluster_status);
        let role = node
            .roles
            .as_ref()
            .is_some_and(|r| r.consensus_member.is_some());
        let step = Step::MakeMember {
            machine: candidate.machine.clone(),
            id: node.id.clone(),
        };
        let asked = role || wanted.is_some() || member.is_some();
        let reason = wanted.map_or("", |change| change.reason.as_str());
        let what = match reason {
            "" => "its vote".to_owned(),
            reason => format!("its vote ({reason})"),
        };
        return ((!asked).then_some(step), Some(what));
    }
    match node.health() {
        NodeHealth::Healthy => (None, None),
        _ if node.health_reason.is_empty() => (None, Some("health".to_owned())),
        _ => (None, Some(format!("health ({})", node.health_reason))),
    }
}

/// The result of one reconciliation.
#[derive(Clone, Debug, PartialEq)]
pub struct ReconcileResult {
    /// Status of the cluster before it.
    pub cluster_status: ClusterStatus,
    /// The plan made from that status.
    pub plan: Plan,
    /// The steps that were taken.
    pub taken: Vec<Step>,
}

impl ReconcileResult {
    /// Whether the cluster is as requested.
    pub fn is_complete(&self) -> bool {
        self.plan.missing.is_empty() && self.plan.steps.is_empty()
    }
}

/// Reads the status once, and takes the steps that it requires.
///
/// # Errors
/// If a call fails. The next reconciliation continues from there.
pub async fn reconcile(operator: &Operator, candidates: &[Candidate]) -> Result<ReconcileResult> {
    let cluster_status = operator.cluster_status().await;
    let cluster_status =
        cluster_status.map_err(LabError::call("GetConsensusStatus or GetNodes"))?;
    let plan = plan(candidates, &cluster_status);
    let mut taken = Vec::new();
    for step in &plan.steps {
        step.take(operator).await?;
        taken.push(step.clone());
    }
    Ok(ReconcileResult {
        cluster_status,
        plan,
        taken,
    })
}

/// Reconciles until the cluster is as requested. `candidates` returns the machines as currently known. Calls that fail
/// are repeated: a curator that restarts its etcd is soon available again.
pub async fn complete(
    operator: &Operator,
    mut candidates: impl FnMut() -> Vec<Candidate>,
    pause: Duration,
) -> ReconcileResult {
    loop {
        match reconcile(operator, &candidates()).await {
            Ok(look) if look.is_complete() => return look,
            Ok(_) => {}
            Err(error) => tracing::debug!(error = hearth_api::chain(&error), "retrying"),
        }
        tokio::time::sleep(pause).await;
    }
}

/// The etcd member of this node.
pub fn member<'a>(
    node: &v1::Node,
    cluster_status: &'a ClusterStatus,
) -> Option<&'a v1::ConsensusMemberStatus> {
    let members = &cluster_status.consensus.members;
    members.iter().find(|member| member.node_id == node.id)
}

/// Whether a node is a member that is HOME and healthy.
pub fn is_well(node: &v1::Node) -> bool {
    let status = node.status.as_ref();
    node.state() == NodeState::Up
        && node.health() == NodeHealth::Healthy
        && status.is_some_and(|status| status.cluster_state() == ClusterState::Home)
}

/// The pending consensus change of a node.
pub fn wants<'a>(
    node: &v1::Node,
    cluster_status: &'a ClusterStatus,
) -> Option<&'a v1::MembershipChange> {
    let changes = &cluster_status.consensus.changes;
    changes.iter().find(|change| change.node_id == node.id)
}

impl Step {
    async fn take(&self, operator: &Operator) -> Result<()> {
        match self {
            Step::Approve { public_key, .. } => {
                let approved = operator.approve(public_key.clone()).await;
                approved.map(drop).map_err(LabError::call("ApproveNode"))
            }
            Step::MakeMember { id, .. } => {
                let made = operator.set_consensus_member(id, true).await;
                made.map_err(LabError::call("UpdateNodeRoles"))
            }
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Step::Approve {
                machine,
                public_key,
            } => write!(f, "{machine}: approved, key {}", hex::encode(public_key)),
            Step::MakeMember { machine, id } => {
                write!(f, "{machine}: {id} will join consensus")
            }
        }
    }
}

/// The public key in a node's message that it waits for approval: the argument of the command that approves it. Other
/// messages have digests of the same length.
pub fn shown_key(text: &str) -> Option<Vec<u8>> {
    let (_, argument) = text.split_once("hearthctl node approve ")?;
    let key = argument.split(|c: char| !c.is_ascii_hexdigit()).next()?;
    (key.len() == 64).then(|| hex::decode(key).ok())?
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hearth_api::testing::{Script, TestCluster, TestCurator};
    use hearth_api::tls::wall_clock;

    use super::*;
    use crate::Owner;

    fn candidate(number: u8) -> Candidate {
        Candidate {
            machine: format!("node-{number}"),
            address: Ipv4Addr::new(10, 77, 0, 10 + number),
            public_key: None,
            id: None,
            approve: true,
            votes: true,
        }
    }

    fn node(number: u8, state: NodeState) -> v1::Node {
        v1::Node {
            id: format!("hearth-{number}"),
            public_key: vec![number; 32],
            state: state.into(),
            ..v1::Node::default()
        }
    }

    fn home(number: u8) -> v1::Node {
        v1::Node {
            status: Some(v1::NodeStatus {
                external_address: format!("10.77.0.{}", 10 + number),
                cluster_state: ClusterState::Home.into(),
                ..v1::NodeStatus::default()
            }),
            health: NodeHealth::Healthy.into(),
            ..node(number, NodeState::Up)
        }
    }

    fn voter(number: u8) -> v1::ConsensusMemberStatus {
        v1::ConsensusMemberStatus {
            member_id: number.into(),
            node_id: format!("hearth-{number}"),
            ..v1::ConsensusMemberStatus::default()
        }
    }

    fn cluster_status(
        nodes: Vec<v1::Node>,
        members: Vec<v1::ConsensusMemberStatus>,
    ) -> ClusterStatus {
        ClusterStatus {
            nodes,
            consensus: v1::GetConsensusStatusResponse {
                members,
                ..v1::GetConsensusStatusResponse::default()
            },
        }
    }

    #[test]
    fn only_a_key_that_the_machine_shows_is_approved() {
        let cluster_status = cluster_status(vec![node(2, NodeState::New)], vec![]);
        let unseen = plan(&[candidate(2)], &cluster_status);
        assert_eq!((unseen.steps.len(), unseen.missing.len()), (0, 1));
        // Another key is another node.
        let other = Candidate {
            public_key: Some(vec![9; 32]),
            ..candidate(2)
        };
        assert_eq!(plan(&[other], &cluster_status).steps, []);
        let seen = Candidate {
            public_key: Some(vec![2; 32]),
            ..candidate(2)
        };
        let approve = Step::Approve {
            machine: "node-2".to_owned(),
            public_key: vec![2; 32],
        };
        assert_eq!(
            plan(std::slice::from_ref(&seen), &cluster_status).steps,
            [approve]
        );
        let later = Candidate {
            approve: false,
            ..seen
        };
        assert_eq!(plan(&[later], &cluster_status), Plan::default());
    }

    #[test]
    fn a_member_that_was_deleted_is_not_waited_for() {
        let gone = Candidate {
            id: Some("hearth-2".to_owned()),
            ..candidate(2)
        };
        let cluster_status = cluster_status(vec![home(1)], vec![voter(1)]);
        assert_eq!(
            plan(&[candidate(1), gone], &cluster_status),
            Plan::default()
        );
        assert_eq!(plan(&[candidate(2)], &cluster_status).missing.len(), 1);
    }

    #[test]
    fn who_is_home_is_made_a_member_once() {
        let mut cluster_status = cluster_status(vec![home(1), home(2)], vec![voter(1)]);
        let candidates = [candidate(1), candidate(2)];
        let step = Step::MakeMember {
            machine: "node-2".to_owned(),
            id: "hearth-2".to_owned(),
        };
        assert_eq!(plan(&candidates, &cluster_status).steps, [step]);
        cluster_status.consensus.changes = vec![v1::MembershipChange {
            node_id: "hearth-2".to_owned(),
            reason: "it is a learner".to_owned(),
            ..v1::MembershipChange::default()
        }];
        let pending = plan(&candidates, &cluster_status);
        assert_eq!(pending.steps, []);
        assert_eq!(pending.missing[0].1, "its vote (it is a learner)");
        cluster_status.consensus.changes.clear();
        cluster_status.consensus.members.push(voter(2));
        assert_eq!(plan(&candidates, &cluster_status), Plan::default());
    }

    #[test]
    fn a_learner_is_no_voter_and_the_ill_are_waited_for() {
        let learner = v1::ConsensusMemberStatus {
            learner: true,
            ..voter(1)
        };
        let look = plan(
            &[candidate(1)],
            &cluster_status(vec![home(1)], vec![learner]),
        );
        assert_eq!((look.steps.len(), look.missing.len()), (0, 1));
        let ill = v1::Node {
            health: NodeHealth::Timeout.into(),
            health_reason: "no heartbeat".to_owned(),
            ..home(1)
        };
        let look = plan(&[candidate(1)], &cluster_status(vec![ill], vec![voter(1)]));
        assert_eq!(look.missing[0].1, "health (no heartbeat)");
    }

    #[test]
    fn a_key_is_the_argument_of_the_command_that_approves_it() {
        let key = "ab".repeat(32);
        let text = format!("approval: hearthctl node approve {key} (its public key)");
        assert_eq!(shown_key(&text), Some(vec![0xab; 32]));
        assert_eq!(shown_key(&text.replace(&key, &format!("{key}0"))), None);
        assert_eq!(shown_key(&format!("image {key} is not trusted")), None);
        assert_eq!(shown_key("hearth-0123"), None);
    }

    /// The steps of a formation, against a curator without a cluster; the test does what a cluster would do by itself
    /// in between.
    #[tokio::test]
    async fn a_machine_is_taken_in_step_by_step() {
        let cluster = Arc::new(TestCluster::new());
        let owner = Owner::generate();
        let script = Script {
            owner: Some(owner.key.public()),
            first_contact_secret: Some(owner.secret.clone()),
            nodes: vec![home(1), node(2, NodeState::New)],
            ..Script::default()
        };
        let curator = TestCurator::start(&cluster, script, wall_clock()).await;
        let status = |members| v1::GetConsensusStatusResponse {
            members,
            ..v1::GetConsensusStatusResponse::default()
        };
        curator.set_consensus(status(vec![voter(1)]));
        let bound = Duration::from_secs(20);
        let operator = owner.take_ownership(vec![curator.endpoint()], bound).await;
        let operator = operator.unwrap();

        let unseen = [candidate(1), candidate(2)];
        assert_eq!(reconcile(&operator, &unseen).await.unwrap().taken, []);
        let seen = Candidate {
            public_key: Some(vec![2; 32]),
            ..candidate(2)
        };
        let candidates = [candidate(1), seen];
        let look = reconcile(&operator, &candidates).await.unwrap();
        assert!(matches!(&look.taken[..], [Step::Approve { .. }]) && !look.is_complete());
        assert_eq!(curator.nodes()[1].state(), NodeState::Standby);
        assert_eq!(reconcile(&operator, &candidates).await.unwrap().taken, []);

        // The machine commits, and reports its status.
        curator.set_nodes(vec![home(1), home(2)]);
        let look = reconcile(&operator, &candidates).await.unwrap();
        assert!(matches!(&look.taken[..], [Step::MakeMember { .. }]));
        assert_eq!(curator.calls().last(), Some(&"UpdateNodeRoles"));

        let known = || candidates.to_vec();
        let complete = complete(&operator, known, Duration::from_millis(10));
        let consensus_follows = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            curator.set_consensus(status(vec![voter(1), voter(2)]));
        };
        let both = async { tokio::join!(complete, consensus_follows).0 };
        let look = tokio::time::timeout(bound, both).await.unwrap();
        assert_eq!(look.taken, []);
    }
}
