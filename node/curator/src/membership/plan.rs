//! The leader's next step for etcd's membership: a pure function of the current state.
//!
//! It has no memory of earlier steps. Each step is derived from the current records and etcd's
//! members, so when a leader dies in the middle of a change, the next one continues at that point.
//!
//! Steps of a join:
//!
//! | member in the intent | in etcd | next step |
//! |---|---|---|
//! | none | no member of the node | add a learner, if there is no other |
//! | none | a member of the node | record it in intent and role, in one write |
//! | M | no M | requeue the intent and remove the role |
//! | M | M, a learner | promote it, once it is in sync |
//! | M | M, a learner whose time is over | remove M |
//! | M | M, a voter | the join is complete |
//!
//! A join that replaces the damaged member D of its node goes the same way, except for its beginning:
//!
//! | in etcd | next step |
//! |---|---|
//! | D, and the node still reports that it is damaged | remove D, as in a leave |
//! | D, and the node does not | the join is complete: nothing is to be replaced |
//! | another member of the node, or none | as above |
//!
//! Steps of a leave: remove the member, if the remaining ones keep a quorum; when there is no
//! member, remove the role and the intent. Members of etcd without a record are removed the same
//! way.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use hearth_api::identity::NodeId;
use hearth_cluster::state::{Intent, Wanted};
use hearth_consensus::{Member, MemberId};

/// The state from which a step is derived.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// The node of this curator.
    pub own: NodeId,
    /// The members of etcd.
    pub members: Vec<Member>,
    /// All nodes whose records can be read.
    pub nodes: BTreeMap<NodeId, NodeView>,
    /// The nodes whose records cannot be read: nothing is known about them.
    pub unreadable: BTreeSet<NodeId>,
    /// Pending intents, in the order in which they are executed.
    pub intents: Vec<Intent>,
    /// Whether etcd's timing is set for several members.
    pub peer_timing_ready: bool,
    /// The leader's state about the learner; there is at most one.
    pub learner: Learner,
    /// The cluster replaces damaged members by itself.
    pub replaces_damaged: bool,
    /// It has done so not long ago.
    pub has_just_replaced: bool,
}

/// The part of a node's state that matters for membership.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeView {
    /// The node is UP.
    pub up: bool,
    /// The member ID in its role; 0 for the bootstrap node.
    pub role: Option<u64>,
    /// The node is healthy.
    pub alive: bool,
    /// The progress that its etcd has reported.
    pub progress: Option<Progress>,
    /// The member ID, as in its role, of which it reports that its data are damaged.
    pub damaged: Option<u64>,
}

impl NodeView {
    /// Whether the node reports damage of the member that it has now.
    fn is_damaged(&self) -> bool {
        self.damaged.is_some() && self.damaged == self.role
    }
}

/// The progress of a node's etcd, as the node reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// The member that runs on the node.
    pub member: MemberId,
    /// The member is not a voter.
    pub learner: bool,
    /// The applied log index.
    pub applied: u64,
}

/// The leader's state about the learner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Learner {
    /// A recent log index: a learner that has applied it is in sync and was alive since then.
    pub mark: Option<(MemberId, u64)>,
    /// The learner whose time to get in sync is over.
    pub overdue: Option<MemberId>,
}

/// A step of the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Add a learner to etcd.
    Add(NodeId),
    /// Record the learner's member ID in the intent and in the node's role.
    Record(NodeId, MemberId),
    /// Note the current log index, which the learner has to reach.
    Mark(MemberId),
    /// Promote the learner to voter.
    Promote(NodeId, MemberId),
    /// The node is a voter: delete the intent.
    Complete(NodeId),
    /// Remove a member from etcd.
    Remove(NodeId, MemberId),
    /// The learner is gone: remove the role, and retry after the other intents.
    Requeue(NodeId),
    /// The member is gone: remove the role, delete the intent.
    Clear(NodeId),
    /// Let another curator lead, which then removes this node.
    HandOver,
    /// Write an intent that replaces the node's damaged member.
    Replace(NodeId, MemberId),
}

/// Why a node cannot leave etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CannotLeave {
    /// There would be no voter left.
    Last(NodeId),
    /// The live ones of the remaining voters would not be a quorum.
    NoQuorum {
        /// The node that is to leave.
        node: NodeId,
        /// The number of remaining voters.
        voters: usize,
        /// The size of their quorum.
        quorum: usize,
        /// The nodes or members that are not healthy.
        missing: Vec<String>,
    },
}

impl fmt::Display for CannotLeave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Last(node) => write!(
                f,
                "{node} is the last voting member of etcd: make another node a member first"
            ),
            Self::NoQuorum {
                node,
                voters,
                quorum,
                missing,
            } => write!(
                f,
                "without {node} etcd would have {voters} voting members, of which {quorum} must \
                 be healthy, but these are not: {}; restore or remove them first",
                missing.join(", ")
            ),
        }
    }
}

impl View {
    /// The etcd member that runs on this node, or was added for it.
    fn member_of(&self, node: NodeId) -> Option<&Member> {
        self.members.iter().find(|m| m.node() == Some(node))
    }

    fn intent_of(&self, node: NodeId) -> Option<&Intent> {
        self.intents.iter().find(|intent| intent.node == node)
    }

    /// Whether the member counts for a quorum: its node is alive, and does not report that its etcd is off.
    fn is_alive(&self, member: &Member) -> bool {
        let node = member.node();
        node == Some(self.own)
            || node
                .and_then(|node| self.nodes.get(&node))
                .is_some_and(|n| n.alive && !n.is_damaged())
    }

    /// Checks that the voter on this node can be removed now without losing quorum.
    pub(super) fn may_leave(&self, node: NodeId) -> Result<(), CannotLeave> {
        let stay: Vec<_> = self
            .members
            .iter()
            .filter(|m| !m.learner && m.node() != Some(node))
            .collect();
        if stay.is_empty() {
            return Err(CannotLeave::Last(node));
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
        Err(CannotLeave::NoQuorum {
            node,
            voters,
            quorum,
            missing: dead.iter().map(name).collect(),
        })
    }

    /// The same, and checks that a voter remains when all those have left that are about to, or
    /// whose node is deleted.
    pub(super) fn may_leave_after_all(&self, node: NodeId) -> Result<(), CannotLeave> {
        let stays = |other: NodeId| {
            let intent = self.intent_of(other);
            let leaves = intent.is_some_and(|i| matches!(i.wanted, Wanted::Leave { .. }));
            other != node && self.nodes.contains_key(&other) && !leaves
        };
        let voters = self.members.iter().filter(|m| !m.learner);
        if voters.filter_map(Member::node).any(stays) {
            self.may_leave(node)
        } else {
            Err(CannotLeave::Last(node))
        }
    }

    /// Whether this is the member of whose data its own node reports, in contact with the cluster, that they are
    /// damaged. A report that was made of an earlier member of the node is none of this one.
    fn is_damaged(&self, member: &Member) -> bool {
        let node = member.node().filter(|node| *node != self.own);
        let Some(node_view) = node.and_then(|node| self.nodes.get(&node)) else {
            return false;
        };
        let is_its_role = node_view.role == Some(0) || node_view.role == Some(member.id.0);
        node_view.up && node_view.alive && is_its_role && node_view.is_damaged()
    }

    /// Whether the member votes, and its etcd runs on a node that is alive.
    fn serves(&self, member: &Member) -> bool {
        let node_view = member.node().and_then(|node| self.nodes.get(&node));
        let runs = |node_view: &NodeView| {
            let progress = node_view.progress;
            progress.is_some_and(|progress| progress.member == member.id && !progress.learner)
        };
        !member.learner && self.is_alive(member) && node_view.is_some_and(runs)
    }

    /// Whether the damaged member that this intent replaces is still there.
    pub(super) fn is_replaced(&self, intent: &Intent) -> bool {
        let member = self.member_of(intent.node);
        member.is_some_and(|member| intent.replaces == Some(member.id.0))
    }

    /// Whether this node has a voting member.
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
        .or_else(|| with_damage(view))
}

/// The next step for one intent, or the reason why it is waiting, for operators.
pub(super) fn step_of(view: &View, intent: &Intent) -> Result<Step, String> {
    match intent.wanted {
        Wanted::Leave { .. } => match view.member_of(intent.node) {
            None => Ok(Step::Clear(intent.node)),
            Some(member) => remove(view, intent.node, member),
        },
        Wanted::Join { member } => join(view, intent, member.map(MemberId)),
    }
}

fn remove(view: &View, node: NodeId, member: &Member) -> Result<Step, String> {
    if !member.learner {
        view.may_leave(node).map_err(|stays| stays.to_string())?;
        // A leader cannot complete the removal of its own member.
        if node == view.own {
            return Ok(Step::HandOver);
        }
    }
    Ok(Step::Remove(node, member.id))
}

fn join(view: &View, intent: &Intent, recorded: Option<MemberId>) -> Result<Step, String> {
    let node = intent.node;
    let member = view.member_of(node);
    let node_view = view.nodes.get(&node).filter(|node_view| node_view.up);
    let Some(node_view) = node_view else {
        // A node that is not UP does not start etcd.
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
    if view.is_replaced(intent) {
        return if view.replaces_damaged && view.is_damaged(member) {
            remove(view, node, member)
        } else {
            Ok(Step::Complete(node))
        };
    }
    let known = node_view.role == Some(member.id.0);
    let founder = node_view.role == Some(0) && !member.learner;
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
        return Err("the node has not started etcd yet".into());
    }
    in_sync(view, node_view, member.id)?;
    match view.learner.mark {
        Some((marked, index)) if marked == member.id => {
            let applied = node_view.progress.map_or(0, |progress| progress.applied);
            if applied >= index {
                Ok(Step::Promote(node, member.id))
            } else {
                Err(format!(
                    "the learner is not in sync yet: applied index {applied} of {index}"
                ))
            }
        }
        _ => Ok(Step::Mark(member.id)),
    }
}

/// Checks that the learner is running, and that promoting it would not cost the quorum.
fn in_sync(view: &View, node_view: &NodeView, member: MemberId) -> Result<(), String> {
    let reports = node_view
        .progress
        .is_some_and(|progress| progress.member == member);
    if !reports {
        return Err("the node has not reported the progress of its etcd".into());
    }
    if !node_view.alive {
        return Err("the node is not healthy".into());
    }
    // For example, with two voters both must be alive.
    let dead = view
        .members
        .iter()
        .filter(|m| !m.learner && !view.is_alive(m))
        .count();
    let voters = view.members.iter().filter(|m| !m.learner).count() + 1;
    if voters - dead < voters / 2 + 1 {
        return Err("too few voting members are healthy".into());
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
        return Err("etcd has a learner that belongs to no known node".into());
    }
    if !view.peer_timing_ready {
        return Err("etcd is restarting with the timing for several members".into());
    }
    Ok(Step::Add(node))
}

/// Replaces a damaged voter: one at a time, while no other node joins, and while those that serve are a quorum even if
/// the damaged one is counted. So it is never one of the last two, because one alone cannot remove the other. With pauses
/// in between, because a disk that damages data will do so again.
fn with_damage(view: &View) -> Option<Step> {
    let joins = |intent: &Intent| matches!(intent.wanted, Wanted::Join { .. });
    let is_settled =
        !view.intents.iter().any(joins) && view.members.iter().all(|member| !member.learner);
    if !view.replaces_damaged || view.has_just_replaced || !is_settled {
        return None;
    }
    let quorum = view.members.len() / 2 + 1;
    let mut damaged = view.members.iter().filter(|m| view.is_damaged(m));
    let damaged = damaged.find(|m| m.node().is_some_and(|id| view.intent_of(id).is_none()))?;
    let serving = view.members.iter().filter(|m| view.serves(m)).count();
    (serving >= quorum).then_some(Step::Replace(damaged.node()?, damaged.id))
}

/// Clears a role for which etcd has no member and no intent is pending.
fn without_member(view: &View) -> Option<Step> {
    // A member whose node is not known may belong to any node.
    if view.members.iter().any(|m| m.node().is_none()) {
        return None;
    }
    let mut dangling = view.nodes.iter().filter(|(node, node_view)| {
        node_view.role.is_some()
            && view.member_of(**node).is_none()
            && view.intent_of(**node).is_none()
    });
    dangling.next().map(|(node, _)| Step::Clear(*node))
}

/// Removes a member that has no node record with a matching role. A record that cannot be read says
/// nothing about the role: its member stays, so that one damaged record does not shrink the
/// consensus.
fn without_record(view: &View) -> Option<Step> {
    view.members.iter().find_map(|member| {
        let node = member.node()?;
        // Nodes with an intent are handled by it.
        if view.intent_of(node).is_some() || view.unreadable.contains(&node) {
            return None;
        }
        let role = view.nodes.get(&node).and_then(|node_view| node_view.role);
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
