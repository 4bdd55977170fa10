//! The membership of consensus: what operators want, and what etcd has.
//!
//! Operators write intents; the elected leader works them off, one step after
//! the other. [`plan`] finds each step from what is, and this module sees what
//! is ([`view`]) and does the step. Membership is the truth: a node's role
//! says that it is a member only once etcd does, and no longer than etcd does.
//!
//! Every write of records bears the leader's election key as a condition, so a
//! leader that was replaced while it slept writes nothing. Changes of etcd's
//! membership cannot bear one: see [`hearth_consensus::Members`] for why they
//! harm nothing when they come late.
//!
//! Nothing is decided by records that are not recent: each look has a
//! linearizable read in it.

mod plan;
mod steps;
mod view;

use std::{convert::Infallible, time::Duration};

use hearth_api::{
    identity::NodeId,
    v1::{
        ConsensusMemberStatus, ConsensusStore, GetConsensusStatusResponse, MembershipChange,
        consensus_member_status, membership_change::Kind,
    },
};
use hearth_consensus::fenced::{Condition, Write};
use hearth_consensus::{Alarm, MemberId, QUOTA};
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use self::{
    plan::{Learner, Step, View},
    steps::StepError,
};
use super::{
    cache::Leadership,
    core::Core,
    state::{self, Wanted},
    status::unavailable,
};

/// Between two looks while something is wanted, when nothing is heard of
/// meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// The same when all is as it should be: what could change that is heard of, and
/// each look is asked of etcd.
const SETTLED_LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// Between two looks at least, and after a step that failed.
const LEAST_LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// A learner that has applied what was written so long ago is in sync. It
/// reports four times a second.
const MARK_LASTS: Duration = Duration::from_secs(5);

/// Adds to this write, by which the node leaves consensus, what lets it go;
/// refuses if it is the last voter, or if those that stay, as far as they are
/// alive, would have no quorum.
///
/// The write happens only if nobody else was let go since this looked, or two
/// that can each be done without would leave at once. That is all it rests on:
/// what else changes about those that stay does not delay it.
pub async fn let_go(core: &Core, node: NodeId, write: Write) -> Result<Write, Status> {
    let last = core.client.get(state::DEPARTURE).await;
    let last = last.map_err(|error| unavailable(&error))?;
    let view = look(core).await?;
    if !view.votes(node) {
        return Ok(write);
    }
    view.may_leave_after_all(node)
        .map_err(|stays| Status::failed_precondition(stays.to_string()))?;
    let key = state::DEPARTURE.to_owned();
    Ok(write
        .and(match last {
            Some(last) => Condition::Unchanged(key, last.mod_revision),
            None => Condition::Absent(key),
        })
        .put(state::DEPARTURE, node.to_string().into_bytes()))
}

/// The members, and what is about to change.
pub async fn status(core: &Core) -> Result<GetConsensusStatusResponse, Status> {
    let view = look(core).await?;
    let own = core.members.status().await.map_err(|e| unavailable(&e))?;
    let alarms = core.members.alarms(&own).await;
    let alarms = alarms.map_err(|e| unavailable(&e))?;
    let alarms_of = |id: MemberId| {
        let of_it = alarms.iter().filter(|(member, _)| *member == id);
        let told = of_it.map(|(_, alarm)| match alarm {
            Alarm::NoSpace => consensus_member_status::Alarm::NoSpace,
            Alarm::Corrupt => consensus_member_status::Alarm::Corrupt,
        });
        told.map(i32::from).collect()
    };
    let members = view.members.iter().map(|member| ConsensusMemberStatus {
        member_id: member.id.0,
        node_id: member
            .node()
            .map(|node| node.to_string())
            .unwrap_or_default(),
        peer_urls: member.peer_urls.clone(),
        learner: member.learner,
        started: member.started(),
        leader: own.leader == Some(member.id),
        alarms: alarms_of(member.id),
    });
    let changes = view.intents.iter().map(|intent| {
        let (kind, member) = match intent.wanted {
            Wanted::Join { member } => (Kind::Join, member.unwrap_or_default()),
            Wanted::Leave { .. } => (Kind::Leave, 0),
        };
        MembershipChange {
            node_id: intent.node.to_string(),
            kind: kind.into(),
            member_id: member,
            reason: plan::step_of(&view, intent).err().unwrap_or_default(),
        }
    });
    Ok(GetConsensusStatusResponse {
        changes: changes.collect(),
        members: members.collect(),
        store: Some(ConsensusStore {
            file_bytes: own.file,
            used_bytes: own.used,
            quota_bytes: QUOTA,
        }),
    })
}

async fn look(core: &Core) -> Result<View, Status> {
    view::take(core, Learner::default())
        .await
        .map_err(|error| match error {
            view::ViewError::Stale(stale) => stale.into(),
            view::ViewError::Consensus(error) => unavailable(&error),
            view::ViewError::Record(error) => Status::failed_precondition(error.to_string()),
        })
}

/// What a leader remembers from one look to the next.
struct Term {
    leadership: Leadership,
    /// Since when it has seen this learner.
    learner: Option<(MemberId, Instant)>,
    /// Where the log was when it looked last for this learner.
    mark: Option<(MemberId, u64, Instant)>,
    /// Since when it was about to remove this voter: see [`Term::is_sure`].
    leaving: Option<(MemberId, Instant)>,
    /// What was said last of why nothing happens.
    said: Vec<String>,
    /// It is to hand over, and nobody is there who could take over.
    is_stuck: bool,
}

/// Works off what is wanted while this curator leads, for ever.
pub async fn run(core: &Core) -> Infallible {
    let mut term: Option<Term> = None;
    loop {
        let mut changes = core.cache.watch();
        changes.mark_unchanged();
        core.reads.fresh().await;
        announce_peers(core);
        let next = match core.cache.leadership() {
            None => {
                term = None;
                Next::Later
            }
            Some(leadership) => {
                let term = match &mut term {
                    Some(term) if term.leadership == leadership => term,
                    other => other.insert(Term {
                        leadership,
                        learner: None,
                        mark: None,
                        leaving: None,
                        said: Vec::new(),
                        is_stuck: false,
                    }),
                };
                match round(core, term).await {
                    Ok(next) => next,
                    Err(error) => {
                        tracing::warn!("consensus membership: {error}");
                        Next::Soon
                    }
                }
            }
        };
        sleep(LEAST_LOOK_INTERVAL).await;
        let pause = match next {
            Next::AtOnce => continue,
            Next::Soon => LOOK_INTERVAL,
            Next::Later => SETTLED_LOOK_INTERVAL,
        };
        // Whatever has changed may be what was waited for.
        let _ = timeout(pause, changes.changed()).await;
    }
}

/// Tells etcd in time that there will be other members: before anyone can become a
/// member somebody must be able to register.
fn announce_peers(core: &Core) {
    if core.peers.is_peer_timing_ready() {
        return;
    }
    let others = core.cache.nodes(|_| true).len() > 1;
    if others || core.cache.ticket().is_some() {
        core.peers.expect_peers();
    }
}

/// When to look again.
enum Next {
    /// There may be another step.
    AtOnce,
    /// Something is waited for.
    Soon,
    /// Nothing is wanted.
    Later,
}

/// Looks, and takes one step.
async fn round(core: &Core, term: &mut Term) -> Result<Next, StepError> {
    let mut view = view::take(core, Learner::default()).await?;
    view.learner = term.note(core, &view);
    let step = plan::plan(&view);
    term.say(&view);
    let Some(step) = step else {
        term.leaving = None;
        let is_settled = view.intents.is_empty() && view.members.iter().all(|m| !m.learner);
        return Ok(match is_settled {
            true => Next::Later,
            false => Next::Soon,
        });
    };
    if let Step::Mark(member) = step {
        let index = steps::mark(core, &term.leadership).await?;
        term.mark = Some((member, index, Instant::now()));
        return Ok(Next::Soon);
    }
    if step == Step::HandOver && core.cache.candidates() < 2 {
        if !std::mem::replace(&mut term.is_stuck, true) {
            tracing::info!(
                "this node is to leave consensus, and no other curator is ready to lead"
            );
        }
        return Ok(Next::Soon);
    }
    if !term.is_sure(core, &view, step) {
        return Ok(Next::Soon);
    }
    steps::take(core, &term.leadership, &view, step).await?;
    Ok(Next::AtOnce)
}

impl Term {
    fn note(&mut self, core: &Core, view: &View) -> Learner {
        let now = Instant::now();
        let learner = view.members.iter().find(|m| m.learner).map(|m| m.id);
        self.learner = learner.map(|id| match self.learner {
            Some((known, since)) if known == id => (id, since),
            _ => (id, now),
        });
        self.mark = self
            .mark
            .filter(|(member, _, at)| learner == Some(*member) && *at + MARK_LASTS > now);
        Learner {
            mark: self.mark.map(|(member, index, _)| (member, index)),
            overdue: self
                .learner
                .filter(|(_, since)| *since + core.timing.learner <= now)
                .map(|(id, _)| id),
        }
    }

    /// Whether a step may be taken now. A voter that has died is held for alive
    /// until its heartbeats are missed; so nobody is removed before those who
    /// stay have been alive all of that time.
    fn is_sure(&mut self, core: &Core, view: &View, step: Step) -> bool {
        let removed = match step {
            Step::Remove(_, id) => view.members.iter().find(|m| m.id == id && !m.learner),
            _ => None,
        };
        let Some(id) = removed.map(|member| member.id) else {
            self.leaving = None;
            return true;
        };
        let now = Instant::now();
        let since = match self.leaving {
            Some((known, since)) if known == id => since,
            _ => now,
        };
        self.leaving = Some((id, since));
        now >= since + core.timing.heartbeat_bound
    }

    /// Says why what is wanted does not happen, once.
    fn say(&mut self, view: &View) {
        let waits = |intent| Some((intent, plan::step_of(view, intent).err()?));
        let reasons: Vec<_> = view.intents.iter().filter_map(waits).collect();
        let said: Vec<_> = reasons
            .iter()
            // How far a learner is changes all the time.
            .map(|(intent, why)| {
                format!("{}: {}", intent.node, why.split(':').next().unwrap_or(""))
            })
            .collect();
        if said != self.said {
            for (intent, why) in reasons {
                tracing::info!(node = %intent.node, "a change of consensus waits: {why}");
            }
            self.said = said;
        }
    }
}
