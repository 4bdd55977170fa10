//! Forms the requested cluster: boot, take ownership, approve nodes, wait.
//!
//! The first node founds the cluster and becomes HOME alone. Then there is a curator that issues the register ticket,
//! and the other nodes boot, two at a time: a boot under TCG needs a whole processor, so more of them at once would
//! only delay each other. Nodes that are members already boot at once: they may need each other for a quorum.
//!
//! An encrypted cluster that was off as a whole is unlocked by its owner first ([`crate::unlock`]).
//!
//! [`crate::formation`] decides on the next steps, as pure functions. They are carried out here, while the consoles are
//! read: there is one outstanding call to the cluster at a time, and its result leads to the next.

use std::collections::VecDeque;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use hearth_api::v1;
use hearth_operator::Operator;
use tokio::time::Instant;

use crate::events::Event;
use crate::fleet::Machines;
use crate::formation::{Candidate, ReconcileResult, reconcile};
use crate::hearthctl::{Owning, Progress};
use crate::record::ClusterRecord;
use crate::session::{Asker, Session};
use crate::unlock::{ColdStart, Round};
use crate::{LabError, Result};

/// Between two reconciliations: no subscription covers both nodes and consensus.
const PAUSE: Duration = Duration::from_millis(500);

/// Maximum number of machines that boot at the same time.
const MAX_BOOTING: usize = 2;

/// The result of a call to the cluster.
enum Answer {
    /// From hearthctl.
    Owner(Box<Owning>, Result<Progress>),
    /// A certificate for this process, and the parameters of further nodes.
    Met(Result<(Operator, Box<v1::NodeParameters>)>),
    /// From one reconciliation.
    ReconcileResult(Operator, Result<ReconcileResult>),
}

/// The outstanding call to the cluster, at most one.
type Questions = FuturesUnordered<BoxFuture<'static, Answer>>;

/// The outstanding round of a cold start, at most one. A node that was unlocked may be HOME before there is a quorum, so
/// it goes on beside the calls to the cluster.
type Rounds = FuturesUnordered<BoxFuture<'static, (ColdStart, Result<Round>)>>;

/// The progress of a formation.
struct Forming {
    questions: Questions,
    rounds: Rounds,
    /// Machines that are still to be started, in this order.
    others: VecDeque<usize>,
    /// Their parameters, once known.
    register: Option<Vec<u8>>,
    /// What was missing at the last reconciliation, by machine.
    missing: Vec<(String, String)>,
    /// Whether the cluster waits for the user, who may take any time.
    by_user: bool,
    complete: bool,
}

impl Session<'_> {
    /// Runs until the cluster is complete, according to its machines and to the cluster itself.
    ///
    /// # Errors
    /// If a machine fails, its owner cannot use it, or the cluster is not complete in time.
    pub async fn form(&self, fleet: &mut Machines, record: &mut ClusterRecord) -> Result<()> {
        let members = self.started_before(fleet)?;
        let others = (0..fleet.nodes.len()).filter(|index| !members.contains(index));
        let mut forming = Forming {
            questions: Questions::new(),
            rounds: Rounds::new(),
            others: others.collect(),
            register: None,
            missing: Vec::new(),
            by_user: false,
            complete: false,
        };
        if let Some(start) = self.cold_start(fleet, record)? {
            forming.rounds.push(start.round());
        }
        for index in members {
            let parameters = match index {
                0 => Some(self.parameters.clone()),
                _ => self
                    .state
                    .parameters_of(record, fleet.nodes[index].number)?,
            };
            fleet.start(index, record, parameters).await?;
        }
        let bound = self.bound(record);
        let deadline = tokio::time::sleep(bound);
        tokio::pin!(deadline);
        while !forming.complete {
            forming.start_some(fleet, record).await?;
            tokio::select! {
                news = fleet.next() => {
                    let (index, news) = news?;
                    self.heard(fleet, record, index, news)?;
                }
                Some(answer) = forming.questions.next() => {
                    self.answered(fleet, record, &mut forming, answer)?;
                }
                Some((start, round)) = forming.rounds.next() => {
                    let next = self.unlocked(fleet, record, start, round).await?;
                    let is_home = fleet.nodes.iter().any(|node| node.is_home());
                    forming.by_user = self.no_unlock && next.is_none() && !is_home;
                    forming.rounds.extend(next.map(ColdStart::round));
                }
                () = &mut deadline, if !forming.by_user => {
                    return Err(late(fleet, bound, &forming.missing));
                }
            }
            let is_idle = forming.questions.is_empty() && !forming.complete;
            if is_idle && fleet.nodes.iter().any(|n| n.is_home()) {
                if std::mem::take(&mut forming.by_user) {
                    deadline.as_mut().reset(Instant::now() + bound);
                }
                self.first_question(fleet, record, &mut forming);
            }
        }
        Ok(())
    }

    /// The first call is hearthctl's; there is none if the cluster belongs to another owner.
    fn first_question(&self, fleet: &Machines, record: &ClusterRecord, forming: &mut Forming) {
        if record.storage.is_none() {
            forming.complete = true;
            return;
        }
        let machine = &fleet.nodes[0].name;
        self.tell(&Event::Asking { machine });
        forming.questions.push(own(Owning {
            tool: self.hearthctl.clone(),
            owner: self.state.path().to_owned(),
            curators: fleet.curators(),
            routes: fleet.routes(),
            routed: false,
            owned_at: record.owned_at.clone(),
            asked: None,
        }));
    }

    /// Processes a result: pushes the next call, or ends.
    fn answered(
        &self,
        fleet: &mut Machines,
        record: &mut ClusterRecord,
        forming: &mut Forming,
        answer: Answer,
    ) -> Result<()> {
        match answer {
            Answer::Owner(owning, progress) => {
                self.owned(fleet, record, forming, *owning, progress)
            }
            Answer::Met(Ok((operator, parameters))) => {
                forming.register = Some(self.state.save_register(&parameters)?);
                let candidates = self.candidates(fleet, record)?;
                forming.questions.push(look(operator, candidates));
                Ok(())
            }
            Answer::Met(Err(error)) => {
                let why = format!(
                    "a successful call (last error: {})",
                    hearth_api::chain(&error)
                );
                fleet.wait_for(0, &why);
                forming.questions.push(meet(self.asker(fleet)?));
                Ok(())
            }
            Answer::ReconcileResult(operator, looked) => {
                let candidates = self.candidates(fleet, record)?;
                match looked {
                    Ok(look) => self.looked(record, forming, look, &candidates)?,
                    Err(error) => self.tell(&Event::AskingAgain(&error)),
                }
                forming.questions.push(look(operator, candidates));
                Ok(())
            }
        }
    }

    /// Processes a result of hearthctl.
    fn owned(
        &self,
        fleet: &mut Machines,
        record: &mut ClusterRecord,
        forming: &mut Forming,
        owning: Owning,
        progress: Result<Progress>,
    ) -> Result<()> {
        let several = fleet.nodes.len() > 1;
        let next = match progress {
            Ok(Progress::Well { took }) => {
                self.tell(&Event::Answers { took });
                forming.complete = true;
                return Ok(());
            }
            Ok(Progress::Owned(addresses)) => {
                record.owned_at = addresses;
                self.state.save(record)?;
                match several {
                    true => meet(self.asker(fleet)?),
                    false => own(owning),
                }
            }
            // The context exists from an earlier run; this process's certificate does not.
            Ok(Progress::NotYet(_)) if several && owning.is_owned() => meet(self.asker(fleet)?),
            Ok(Progress::NotYet(why)) => {
                fleet.wait_for(0, &why);
                own(owning)
            }
            Err(error) => {
                let why = hearth_api::chain(&error);
                let why = format!("its owner cannot access it: {why}");
                return Err(fleet.failure(0, why));
            }
        };
        forming.questions.push(next);
        Ok(())
    }

    /// Processes the result of a reconciliation.
    fn looked(
        &self,
        record: &mut ClusterRecord,
        forming: &mut Forming,
        look: ReconcileResult,
        candidates: &[Candidate],
    ) -> Result<()> {
        for step in &look.taken {
            self.tell(&Event::Took(step));
        }
        self.remember(candidates, record, &look.cluster_status)?;
        if forming.others.is_empty() && look.is_complete() {
            forming.complete = true;
            return Ok(());
        }
        let missing = look.plan.missing;
        for (machine, what) in missing.iter().filter(|new| !forming.missing.contains(new)) {
            self.tell(&Event::Lacks { machine, what });
        }
        forming.missing = missing;
        Ok(())
    }
}

impl Forming {
    /// Starts as many of the other machines as may boot at the same time.
    async fn start_some(&mut self, fleet: &mut Machines, record: &ClusterRecord) -> Result<()> {
        let Some(parameters) = &self.register else {
            return Ok(());
        };
        while fleet.nodes.iter().filter(|node| node.is_booting()).count() < MAX_BOOTING {
            let Some(index) = self.others.pop_front() else {
                return Ok(());
            };
            let parameters = Some(parameters.clone());
            fleet.start(index, record, parameters).await?;
        }
        Ok(())
    }
}

fn own(owning: Owning) -> BoxFuture<'static, Answer> {
    Box::pin(async {
        let (owning, progress) = owning.next().await;
        Answer::Owner(Box::new(owning), progress)
    })
}

/// The next attempt at taking ownership in this process.
fn meet(asker: Asker) -> BoxFuture<'static, Answer> {
    Box::pin(async move {
        let met = async {
            let operator = asker.connect().await?;
            let parameters = operator.register_parameters().await;
            let parameters =
                parameters.map_err(LabError::call("GetRegisterTicket or GetClusterInfo"))?;
            Ok((operator, Box::new(parameters)))
        };
        let met = met.await;
        if met.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        Answer::Met(met)
    })
}

/// Reconciles once.
fn look(operator: Operator, candidates: Vec<Candidate>) -> BoxFuture<'static, Answer> {
    Box::pin(async move {
        tokio::time::sleep(PAUSE).await;
        let looked = reconcile(&operator, &candidates).await;
        Answer::ReconcileResult(operator, looked)
    })
}

fn late(fleet: &Machines, bound: Duration, missing: &[(String, String)]) -> LabError {
    let seconds = bound.as_secs();
    // The first machine that is late.
    let behind = fleet.nodes.iter().position(|node| {
        let lacks = missing.iter().any(|(machine, _)| *machine == node.name);
        lacks || (node.on && !node.is_home() && node.key().is_none())
    });
    let index = behind.unwrap_or(0);
    let Some(boot) = &fleet.nodes[index].boot else {
        let why = format!("timed out after {seconds} s, before it was started");
        return fleet.failure(index, why);
    };
    let lacks = missing
        .iter()
        .find(|(machine, _)| *machine == fleet.nodes[index].name);
    let phase = match (boot.timeline().current(), lacks) {
        (_, Some((_, what))) => format!("still missing: {what}"),
        (Some(phase), None) => format!("reached: {}", phase.word()),
        (None, None) => "reached: answers".to_owned(),
    };
    let waiting = match boot.waiting() {
        Some(why) => format!(", waiting for {why}"),
        None => String::new(),
    };
    fleet.failure(
        index,
        format_args!("timed out after {seconds} s; {phase}{waiting}"),
    )
}
