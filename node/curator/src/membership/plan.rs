//! What the leader does next about consensus: a pure function of what is.
//!
//! There is no memory in here of what was done before. Each step is found from
//! the records and etcd's members as they are, so a leader that died in the
//! middle of a change is continued by the next, wherever it was.
//!
//! Of a join, by what there is (intent, member of etcd, role of the node):
//!
//! | intent's member | in etcd | next step |
//! |---|---|---|
//! | none | no member of the node | add a learner, if there is no other |
//! | none | a member of the node | record it: intent and role, at once |
//! | M | no M | queue the intent again, without role |
//! | M | M, a learner | promote it, when it is in sync |
//! | M | M, a learner out of time | remove M |
//! | M | M, a voter | the join is complete |
//!
//! Of a leave: remove the member, if the others can do without; when there is
//! none, clear the role and complete. What etcd has and no record stands for
//! leaves the same way.

use std::{collections::BTreeMap, fmt};

use hearth_api::identity::NodeId;
use hearth_consensus::{Member, MemberId};

use crate::state::{Intent, Wanted};

/// Everything that a step is found from.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// The node that asks.
    pub own: NodeId,
    /// Of etcd.
    pub members: Vec<Member>,
    /// All nodes there are.
    pub nodes: BTreeMap<NodeId, Standing>,
    /// In the order in which they are served.
    pub intents: Vec<Intent>,
    /// Whether etcd is patient enough for other members.
    pub peer_timing_ready: bool,
    /// What is known of the one learner.
    pub learner: Learner,
}

/// A node, as far as it matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    /// It is UP.
    pub up: bool,
    /// As which member it is to run consensus; 0 for the founder.
    pub role: Option<u64>,
    /// It is heard.
    pub alive: bool,
    /// What its etcd has reported.
    pub progress: Option<Progress>,
}

/// As a node reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// As which member.
    pub member: MemberId,
    /// Not a voter.
    pub learner: bool,
    /// How much of the log it has applied.
    pub applied: u64,
}

/// What the leader has noted of the learner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Learner {
    /// A place in the log that was written a short while ago: who has applied
    /// it is in sync, and was alive since.
    pub mark: Option<(MemberId, u64)>,
    /// The time of this one is over.
    pub overdue: Option<MemberId>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Add a learner to etcd.
    Add(NodeId),
    /// Write down who the learner is: in the intent, and in the node's role.
    Record(NodeId, MemberId),
    /// Note where the log is now, for the learner to reach.
    Mark(MemberId),
    /// Make the learner a voter.
    Promote(NodeId, MemberId),
    /// The node votes: forget the intent.
    Complete(NodeId),
    /// Take a member out of etcd.
    Remove(NodeId, MemberId),
    /// The learner is out: take the role back, and try again after the others.
    Requeue(NodeId),
    /// The node is out: take the role back, forget the intent.
    Clear(NodeId),
    /// This node is to be removed, by another leader.
    HandOver,
}

/// Why a node cannot leave consensus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stays {
    /// There would be no voter left.
    Last(NodeId),
    /// Those that stay would have no quorum.
    NoQuorum {
        /// Who wants to leave.
        node: NodeId,
        /// How many stay.
        voters: usize,
        /// How many of them it takes.
        quorum: usize,
        /// Which of them are not heard.
        missing: Vec<String>,
    },
}

impl fmt::Display for Stays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Last(node) => write!(
                f,
                "{node} is the last voting member of consensus: make another node a member first"
            ),
            Self::NoQuorum {
                node,
                voters,
                quorum,
                missing,
            } => write!(
                f,
                "without {node} consensus would have {voters} voting members, of which {quorum} \
                 must be alive, but these are not: {}; bring them back, or remove them first",
                missing.join(", ")
            ),
        }
    }
}

impl View {
    /// The member of etcd on, or for, this node.
    fn member_of(&self, node: NodeId) -> Option<&Member> {
        self.members.iter().find(|m| m.node() == Some(node))
    }

    fn intent_of(&self, node: NodeId) -> Option<&Intent> {
        self.intents.iter().find(|intent| intent.node == node)
    }

    fn is_alive(&self, member: &Member) -> bool {
        let node = member.node();
        node == Some(self.own)
            || node
                .and_then(|node| self.nodes.get(&node))
                .is_some_and(|n| n.alive)
    }

    /// Whether the voter on this node can be done without now.
    pub(super) fn may_leave(&self, node: NodeId) -> Result<(), Stays> {
        let stay: Vec<_> = self
            .members
            .iter()
            .filter(|m| !m.learner && m.node() != Some(node))
            .collect();
        if stay.is_empty() {
            return Err(Stays::Last(node));
        }
        let (voters, quorum) = (stay.len(), stay.len() / 2 + 1);
        let dead: Vec<_> = stay.iter().filter(|m| !self.is_alive(m)).collect();
        if voters - dead.len() >= quorum {
            return Ok(());
        }
        let name = |m: &&&Member| {
            let node = m.node().map(|node| node.to_string());
            node.unwrap_or_else(|| format!("member {}", m.id))
        };
        Err(Stays::NoQuorum {
            node,
            voters,
            quorum,
            missing: dead.iter().map(name).collect(),
        })
    }

    /// The same, where those that are about to leave, or whose node is
    /// deleted, count as gone.
    pub(super) fn may_leave_after_all(&self, node: NodeId) -> Result<(), Stays> {
        let stays = |other: NodeId| {
            let intent = self.intent_of(other);
            let leaves = intent.is_some_and(|i| matches!(i.wanted, Wanted::Leave { .. }));
            other != node && self.nodes.contains_key(&other) && !leaves
        };
        let voters = self.members.iter().filter(|m| !m.learner);
        if voters.filter_map(Member::node).any(stays) {
            self.may_leave(node)
        } else {
            Err(Stays::Last(node))
        }
    }

    /// Whether there is a voter on this node.
    pub(super) fn votes(&self, node: NodeId) -> bool {
        self.member_of(node).is_some_and(|m| !m.learner)
    }
}

/// The next step; `None` if there is none to take now.
pub(super) fn plan(view: &View) -> Option<Step> {
    let leaving = view
        .intents
        .iter()
        .filter(|intent| matches!(intent.wanted, Wanted::Leave { .. }));
    let joining = view
        .intents
        .iter()
        .filter(|intent| matches!(intent.wanted, Wanted::Join { .. }));
    leaving
        .filter_map(|intent| step_of(view, intent).ok())
        .next()
        .or_else(|| without_member(view))
        .or_else(|| without_record(view))
        .or_else(|| {
            joining
                .filter_map(|intent| step_of(view, intent).ok())
                .next()
        })
}

/// What is to be done for one intent, or what it waits for, for people.
pub(super) fn step_of(view: &View, intent: &Intent) -> Result<Step, String> {
    match intent.wanted {
        Wanted::Leave { .. } => match view.member_of(intent.node) {
            None => Ok(Step::Clear(intent.node)),
            Some(member) => remove(view, intent.node, member),
        },
        Wanted::Join { member } => join(view, intent.node, member.map(MemberId)),
    }
}

fn remove(view: &View, node: NodeId, member: &Member) -> Result<Step, String> {
    if !member.learner {
        view.may_leave(node).map_err(|stays| stays.to_string())?;
        // Whose etcd leaves cannot see it through.
        if node == view.own {
            return Ok(Step::HandOver);
        }
    }
    Ok(Step::Remove(node, member.id))
}

fn join(view: &View, node: NodeId, recorded: Option<MemberId>) -> Result<Step, String> {
    let member = view.member_of(node);
    let standing = view.nodes.get(&node).filter(|standing| standing.up);
    let Some(standing) = standing else {
        // Nobody will start it.
        return match member {
            None => Ok(Step::Clear(node)),
            Some(member) => remove(view, node, member),
        };
    };
    let Some(member) = member else {
        return match recorded {
            Some(_) => Ok(Step::Requeue(node)),
            None => add(view, node),
        };
    };
    let known = standing.role == Some(member.id.0);
    let founder = standing.role == Some(0) && !member.learner;
    if recorded.is_some_and(|recorded| recorded != member.id) {
        return Ok(Step::Requeue(node));
    }
    if founder || (known && !member.learner) {
        return Ok(Step::Complete(node));
    }
    if !known || recorded.is_none() {
        return Ok(Step::Record(node, member.id));
    }
    if view.learner.overdue == Some(member.id) {
        return Ok(Step::Remove(node, member.id));
    }
    if !member.started() {
        return Err("it has not started etcd yet".into());
    }
    in_sync(view, standing, member.id)?;
    match view.learner.mark {
        Some((marked, index)) if marked == member.id => {
            let applied = standing.progress.map_or(0, |progress| progress.applied);
            if applied >= index {
                Ok(Step::Promote(node, member.id))
            } else {
                Err(format!(
                    "its etcd is not in sync yet: at {applied} of {index}"
                ))
            }
        }
        _ => Ok(Step::Mark(member.id)),
    }
}

/// Whether the learner is there at all.
fn in_sync(view: &View, standing: &Standing, member: MemberId) -> Result<(), String> {
    let reports = standing
        .progress
        .is_some_and(|progress| progress.member == member);
    if !reports {
        return Err("it has not reported how far its etcd is".into());
    }
    if !standing.alive {
        return Err("it is not heard at the moment".into());
    }
    // A second voter means that both must live.
    let dead = view
        .members
        .iter()
        .filter(|m| !m.learner && !view.is_alive(m))
        .count();
    let voters = view.members.iter().filter(|m| !m.learner).count() + 1;
    if voters - dead < voters / 2 + 1 {
        return Err("too few of the voting members are alive".into());
    }
    Ok(())
}

fn add(view: &View, node: NodeId) -> Result<Step, String> {
    let other = view.members.iter().find(|m| m.learner);
    let in_flight = view.intents.iter().find(
        |intent| matches!(intent.wanted, Wanted::Join { member: Some(_) } if intent.node != node),
    );
    let before = other
        .and_then(Member::node)
        .or(in_flight.map(|intent| intent.node));
    if let Some(before) = before {
        return Err(format!("{before} is being added first"));
    }
    if other.is_some() {
        return Err("consensus has a learner that no node is known for".into());
    }
    if !view.peer_timing_ready {
        return Err("etcd is being made ready for other members".into());
    }
    Ok(Step::Add(node))
}

/// A role that etcd has no member for, and that nobody is at.
fn without_member(view: &View) -> Option<Step> {
    // A member that cannot be told to be of a node may be that of any.
    if view.members.iter().any(|m| m.node().is_none()) {
        return None;
    }
    let mut dangling = view.nodes.iter().filter(|(node, standing)| {
        standing.role.is_some()
            && view.member_of(**node).is_none()
            && view.intent_of(**node).is_none()
    });
    dangling.next().map(|(node, _)| Step::Clear(*node))
}

/// A member that no record stands for.
fn without_record(view: &View) -> Option<Step> {
    view.members.iter().find_map(|member| {
        let node = member.node()?;
        // Those are seen to as what they want.
        if view.intent_of(node).is_some() {
            return None;
        }
        let role = view.nodes.get(&node).and_then(|standing| standing.role);
        let stands = match role {
            None => false,
            Some(role) => role == member.id.0 || !member.learner,
        };
        if stands {
            return None;
        }
        remove(view, node, member).ok()
    })
}

#[cfg(test)]
mod tests;
