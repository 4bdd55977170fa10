//! The membership controller: changes etcd's members as operators request.
//!
//! Operators write intents; the elected leader executes them, one step at a time. [`plan`] derives
//! the next step from the current state; this module reads the state ([`view`]) and executes the
//! step. etcd's member list is authoritative: a node has the role of a consensus member only while
//! etcd has a member for it.
//!
//! Every write of records has the leader's election key as a condition, so a leader that was
//! replaced while it was paused writes nothing. Changes of etcd's members cannot have a condition;
//! [`hearth_consensus::Members`] explains why late ones are harmless.
//!
//! Nothing is decided from stale records: each reconciliation includes a linearizable read.
//!
//! Where the cluster's setting `damaged_member_policy` is REPLACE, the leader writes an intent itself: for a node that
//! reports that the data of its member are damaged, a join that first removes this member.

mod departure;
mod plan;
mod steps;
mod view;

use std::convert::Infallible;
use std::time::Duration;

use hearth_api::v1::membership_change::Kind;
use hearth_api::v1::{
    ConsensusMemberStatus, ConsensusStore, GetConsensusStatusResponse, MembershipChange,
    consensus_member_status,
};
use hearth_cluster::state::Wanted;
use hearth_consensus::{Alarm, MemberId, QUOTA};
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use self::plan::{Learner, Step, View};
use self::steps::StepError;
use super::cache::Leadership;
use super::core::Core;
use super::status::unavailable;

pub use self::departure::{Departure, authorize as authorize_departure};

/// Reconciliation interval while a change is pending, if no record changes.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Reconciliation interval while no change is pending. A change of records triggers one anyway, and
/// each one costs a request to etcd.
const SETTLED_LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum interval of reconciliations, and delay after a failed step.
const LEAST_LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// How long a mark is valid: a learner that has applied the log up to a valid mark is in sync. It
/// reports its progress four times a second.
const MARK_LASTS: Duration = Duration::from_secs(5);

/// The members of etcd, and the pending changes.
pub async fn status(core: &Core) -> Result<GetConsensusStatusResponse, Status> {
    let view = view::look(core).await?;
    let own = core.members.status().await.map_err(|e| unavailable(&e))?;
    let alarms = core.members.alarms(&own).await;
    let alarms = alarms.map_err(|e| unavailable(&e))?;
    let alarms_of = |id: MemberId| {
        // That of member 0 concerns all of them.
        let of_it = alarms
            .iter()
            .filter(|(member, _)| *member == id || member.0 == 0);
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
            Wanted::Join { .. } if view.is_replaced(intent) => {
                (Kind::Replace, intent.replaces.unwrap_or_default())
            }
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

/// The leader's state between two reconciliations.
struct Term {
    leadership: Leadership,
    /// The current learner, and since when there is one.
    learner: Option<(MemberId, Instant)>,
    /// The log index that was last marked for this learner, and when.
    mark: Option<(MemberId, u64, Instant)>,
    /// The step by which a voter leaves, and since when it is the next one: see [`Term::is_sure`].
    leaving: Option<(Step, Instant)>,
    /// The last logged reasons why changes are waiting.
    said: Vec<String>,
    /// This node has to hand over the leadership, and there is no other candidate.
    is_stuck: bool,
}

/// Executes intents while this curator leads. Never returns.
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
                        tracing::warn!("cannot reconcile etcd membership: {error}");
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
        // Any change of records may unblock the next step.
        let _ = timeout(pause, changes.changed()).await;
    }
}

/// Tells etcd in time that it will get peers: before another node can become a member, a machine
/// must be able to register.
fn announce_peers(core: &Core) {
    if core.peers.is_peer_timing_ready() {
        return;
    }
    let others = core.cache.nodes(|_| true).len() > 1;
    if others || core.cache.ticket().is_some() {
        core.peers.expect_peers();
    }
}

/// When to reconcile again.
enum Next {
    /// There may be another step.
    AtOnce,
    /// A pending change is waiting.
    Soon,
    /// No change is pending.
    Later,
}

/// Reads the state and executes one step.
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
                "cannot hand over the leadership: this node is leaving etcd, and no other curator \
                 is a candidate"
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
    /// Updates the learner and its mark from the view.
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

    /// Whether a step may be executed now. A voter that has died counts as alive until the
    /// heartbeat timeout. So no voter is removed until the remaining ones have been alive for that
    /// long.
    fn is_sure(&mut self, core: &Core, view: &View, step: Step) -> bool {
        let leaves = match step {
            Step::Remove(_, id) => view.members.iter().any(|m| m.id == id && !m.learner),
            Step::Replace(..) => true,
            _ => false,
        };
        if !leaves {
            self.leaving = None;
            return true;
        }
        let now = Instant::now();
        let since = match self.leaving {
            Some((known, since)) if known == step => since,
            _ => now,
        };
        self.leaving = Some((step, since));
        now >= since + core.timing.heartbeat_bound
    }

    /// Logs why pending changes are waiting, once per reason.
    fn say(&mut self, view: &View) {
        let waits = |intent| Some((intent, plan::step_of(view, intent).err()?));
        let reasons: Vec<_> = view.intents.iter().filter_map(waits).collect();
        let said: Vec<_> = reasons
            .iter()
            // The part after the colon, a learner's progress, changes all the time.
            .map(|(intent, why)| {
                format!("{}: {}", intent.node, why.split(':').next().unwrap_or(""))
            })
            .collect();
        if said != self.said {
            for (intent, why) in reasons {
                tracing::info!(node = %intent.node, "etcd membership change is waiting: {why}");
            }
            self.said = said;
        }
    }
}
