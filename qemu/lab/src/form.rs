//! Until the cluster is what the user asked for: boot, take ownership, take in, wait.
//!
//! The first node founds the cluster and is brought HOME alone. With it there is a curator to ask for the register ticket,
//! and the others boot, two at a time: a boot under TCG takes a processor, and more of them at once only make all of them
//! late. Members boot at once: they may need each other for a quorum.
//!
//! What is to be done next is decided in [`crate::formation`], without any of this; here it is carried out, beside
//! listening to the machines: one question at a time is on its way to the cluster, and its answer leads to the next.

use std::collections::VecDeque;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use hearth_api::operator::Operator;
use hearth_api::v1;

use crate::events::Event;
use crate::fleet::Fleet;
use crate::formation::{Candidate, Look, reconcile};
use crate::hearthctl::{Owning, Progress};
use crate::record::ClusterRecord;
use crate::session::{Asker, Session};
use crate::{LabError, Result};

/// Between two looks at the cluster: nothing to subscribe to tells nodes and consensus at once.
const PAUSE: Duration = Duration::from_millis(500);

/// So many machines boot at once.
const MAX_BOOTING: usize = 2;

/// What was asked of the cluster, answered.
enum Answer {
    /// By hearthctl.
    Owner(Box<Owning>, Result<Progress>),
    /// A certificate of our own, and what further nodes are told.
    Met(Result<(Operator, v1::NodeParameters)>),
    /// One look.
    Look(Operator, Result<Look>),
}

/// The question that is on its way, beside listening to the machines; at most one.
type Questions = FuturesUnordered<BoxFuture<'static, Answer>>;

/// How far a formation is.
struct Forming {
    questions: Questions,
    /// Machines that are to be started yet, in this order.
    others: VecDeque<usize>,
    /// What they are told, once that is known.
    register: Option<Vec<u8>>,
    /// What was missing at the last look, by machine.
    missing: Vec<(String, String)>,
    complete: bool,
}

impl Session<'_> {
    /// Until the cluster is complete, by the word of its machines and by its own.
    ///
    /// # Errors
    /// If a machine fails or its owner cannot use it, or it is not complete in time.
    pub async fn form(&self, fleet: &mut Fleet, record: &mut ClusterRecord) -> Result<()> {
        let members = self.started_before(fleet)?;
        let others = (0..fleet.nodes.len()).filter(|index| !members.contains(index));
        let mut forming = Forming {
            questions: Questions::new(),
            others: others.collect(),
            register: None,
            missing: Vec::new(),
            complete: false,
        };
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
                    if forming.questions.is_empty() && fleet.nodes.iter().any(|n| n.is_home()) {
                        self.first_question(fleet, record, &mut forming);
                    }
                }
                Some(answer) = forming.questions.next() => {
                    self.answered(fleet, record, &mut forming, answer)?;
                }
                () = &mut deadline => return Err(late(fleet, bound, &forming.missing)),
            }
        }
        Ok(())
    }

    /// hearthctl asks first; nobody, where the cluster's owner is somebody else.
    fn first_question(&self, fleet: &Fleet, record: &ClusterRecord, forming: &mut Forming) {
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

    /// What an answer comes to: the next question, or the end.
    fn answered(
        &self,
        fleet: &mut Fleet,
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
                let why = format!("an answer ({})", hearth_api::chain(&error));
                fleet.wait_for(0, &why);
                forming.questions.push(meet(self.asker(fleet)?));
                Ok(())
            }
            Answer::Look(operator, looked) => {
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

    /// What hearthctl has come to.
    fn owned(
        &self,
        fleet: &mut Fleet,
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
            // The context stands from an earlier run; our own certificate does not.
            Ok(Progress::NotYet(_)) if several && owning.is_owned() => meet(self.asker(fleet)?),
            Ok(Progress::NotYet(why)) => {
                fleet.wait_for(0, &why);
                own(owning)
            }
            Err(error) => {
                let why = hearth_api::chain(&error);
                let why = format!("its owner cannot use it: {why}");
                return Err(fleet.failure(0, why));
            }
        };
        forming.questions.push(next);
        Ok(())
    }

    /// What a look has shown.
    fn looked(
        &self,
        record: &mut ClusterRecord,
        forming: &mut Forming,
        look: Look,
        candidates: &[Candidate],
    ) -> Result<()> {
        for step in &look.taken {
            self.tell(&Event::Took(step));
        }
        self.remember(candidates, record, &look.standing)?;
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
    /// As many of the others as may boot at once.
    async fn start_some(&mut self, fleet: &mut Fleet, record: &ClusterRecord) -> Result<()> {
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

/// The next try to become the owner in this process.
fn meet(asker: Asker) -> BoxFuture<'static, Answer> {
    Box::pin(async move {
        let met = async {
            let operator = asker.connect().await?;
            let parameters = operator.register_parameters().await;
            let parameters = parameters.map_err(LabError::call("what further nodes are told"))?;
            Ok((operator, parameters))
        };
        let met = met.await;
        if met.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        Answer::Met(met)
    })
}

/// Looks once, and does what the look calls for.
fn look(operator: Operator, candidates: Vec<Candidate>) -> BoxFuture<'static, Answer> {
    Box::pin(async move {
        tokio::time::sleep(PAUSE).await;
        let looked = reconcile(&operator, &candidates).await;
        Answer::Look(operator, looked)
    })
}

fn late(fleet: &Fleet, bound: Duration, missing: &[(String, String)]) -> LabError {
    let seconds = bound.as_secs();
    // The first that is behind.
    let behind = fleet.nodes.iter().position(|node| {
        let lacks = missing.iter().any(|(machine, _)| *machine == node.name);
        lacks || (node.on && !node.is_home() && node.key().is_none())
    });
    let index = behind.unwrap_or(0);
    let Some(boot) = &fleet.nodes[index].boot else {
        let why = format!("not within {seconds} s; it was not even started");
        return fleet.failure(index, why);
    };
    let lacks = missing
        .iter()
        .find(|(machine, _)| *machine == fleet.nodes[index].name);
    let phase = match (boot.timeline().current(), lacks) {
        (_, Some((_, what))) => format!("it lacks {what}"),
        (Some(phase), None) => format!("it has come to: {}", phase.word()),
        (None, None) => "it has come to: answers".to_owned(),
    };
    let waiting = match boot.waiting() {
        Some(why) => format!(", where it waits for {why}"),
        None => String::new(),
    };
    fleet.failure(
        index,
        format_args!("not within {seconds} s; {phase}{waiting}"),
    )
}
