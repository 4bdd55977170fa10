//! Until the cluster is what the user asked for: boot, take ownership, take in, wait.
//!
//! The first node founds the cluster and is brought HOME alone. With it there is a curator to ask for the register ticket,
//! and the others boot, two at a time: a boot under TCG takes a processor, and more of them at once only make all of them
//! late. Members boot at once: they may need each other for a quorum.

use std::collections::VecDeque;
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use hearth_api::client::Endpoint;
use hearth_api::owner as owner_files;
use hearth_api::v1::NodeState;
use hearth_qemu::cluster;

use super::fleet::{Fleet, News};
use super::owner::{Owner, Progress};
use super::state::{Founding, save_register};
use super::{Run, VOTERS, failure};
use crate::formation::{Candidate, Look, look_once};
use crate::hearthctl;
use crate::operator::{Operator, Standing};

/// Between two looks at the cluster: nothing to subscribe to tells nodes and consensus at once.
const PAUSE: Duration = Duration::from_millis(500);

/// So many machines boot at once.
const AT_ONCE: usize = 2;

/// What is asked of the cluster beside listening to the machines.
type Question = Pin<Box<dyn Future<Output = Answer>>>;

enum Answer {
    /// Of hearthctl.
    Owner(Box<Owner>, Result<Progress>),
    /// A certificate of our own, and what further nodes are told.
    Met(Result<(Operator, Vec<u8>)>),
    /// One look.
    Look(Operator, Result<Look>),
}

impl Run<'_> {
    /// Until the cluster is complete, by the word of its machines and by its own.
    pub(super) async fn form(&self, fleet: &mut Fleet, founding: &mut Founding) -> Result<()> {
        // Whoever was started before may be a member by now, of which nobody was there to tell: the user approves and
        // gives roles to nodes that were left running, too.
        let known = cluster::known(self.state.path())?;
        let members: Vec<usize> = (0..fleet.nodes.len())
            .filter(|index| *index == 0 || known.contains(&fleet.nodes[*index].name))
            .collect();
        let mut others: VecDeque<usize> = (0..fleet.nodes.len())
            .filter(|index| !members.contains(index))
            .collect();
        for index in members {
            self.announce(&fleet.nodes[index].name);
            let parameters = match index {
                0 => Some(self.parameters.clone()),
                _ => {
                    let number = fleet.nodes[index].number;
                    self.state.parameters_of(founding, number)?
                }
            };
            fleet.start(index, founding, parameters).await?;
        }
        let bound = self.bound(founding);
        let deadline = tokio::time::sleep(bound);
        tokio::pin!(deadline);
        let mut register: Option<Vec<u8>> = None;
        let mut question: Option<Question> = None;
        let mut missing: Vec<(String, String)> = Vec::new();
        loop {
            if let Some(parameters) = &register {
                self.start_some(fleet, founding, &mut others, parameters)
                    .await?;
            }
            tokio::select! {
                news = fleet.next() => {
                    let (index, news) = news?;
                    self.heard(fleet, founding, index, news)?;
                    if question.is_none() && fleet.nodes.iter().any(|node| node.is_home()) {
                        let Some(owner) = self.owner(fleet, founding) else { return Ok(()) };
                        self.show_asking(fleet);
                        question = Some(ask(owner));
                    }
                }
                answer = pending(&mut question) => match answer {
                    Answer::Owner(owner, progress) => {
                        match self.owned(fleet, founding, *owner, progress)? {
                            Some(next) => question = Some(next),
                            None => return Ok(()),
                        }
                    }
                    Answer::Met(Ok((operator, parameters))) => {
                        register = Some(parameters);
                        question = Some(look(operator, self.candidates(fleet, founding)?));
                    }
                    Answer::Met(Err(error)) => {
                        self.show_waiting(fleet, format!("an answer ({error:#})"));
                        question = Some(self.meet(fleet)?);
                    }
                    Answer::Look(operator, looked) => {
                        if let Some(look) = self.looked(looked) {
                            self.remember(fleet, founding, &look.standing)?;
                            if others.is_empty() && look.plan.missing.is_empty() && look.plan.steps.is_empty() {
                                return Ok(());
                            }
                            self.tell_missing(&missing, &look.plan.missing);
                            missing = look.plan.missing;
                        }
                        question = Some(self::look(operator, self.candidates(fleet, founding)?));
                    }
                },
                () = &mut deadline => return Err(late(fleet, bound, &missing)),
            }
        }
    }

    /// A machine has spoken, or ended.
    pub(super) fn heard(
        &self,
        fleet: &Fleet,
        founding: &mut Founding,
        index: usize,
        news: News,
    ) -> Result<()> {
        match news {
            News::Ended(exit) => return Err(failure(fleet, index, exit)),
            News::Line(Some(trouble)) => return Err(failure(fleet, index, trouble)),
            News::Line(None) => {}
        }
        if fleet.nodes[0].is_home() && !founding.was_home {
            founding.was_home = true;
            self.state.save(founding)?;
        }
        Ok(())
    }

    /// As many of the others as may boot at once.
    async fn start_some(
        &self,
        fleet: &mut Fleet,
        founding: &Founding,
        others: &mut VecDeque<usize>,
        parameters: &[u8],
    ) -> Result<()> {
        while fleet.nodes.iter().filter(|node| node.is_booting()).count() < AT_ONCE {
            let Some(index) = others.pop_front() else {
                return Ok(());
            };
            self.announce(&fleet.nodes[index].name);
            fleet
                .start(index, founding, Some(parameters.to_vec()))
                .await?;
        }
        Ok(())
    }

    /// Who asks; none where the cluster's owner is somebody else.
    fn owner(&self, fleet: &Fleet, founding: &Founding) -> Option<Owner> {
        founding.storage?;
        Some(Owner {
            ui: self.ui.clone(),
            hearthctl: self.hearthctl.clone(),
            config: hearthctl::config(self.state.path()),
            key: self.state.owner_key(),
            secret: self.state.first_contact_secret(),
            curators: fleet.curators(),
            routes: fleet.routes(),
            routed: false,
            owned_at: founding.owned_at.clone(),
            asked: None,
        })
    }

    /// What hearthctl has come to; the next question, or none when all is well.
    fn owned(
        &self,
        fleet: &mut Fleet,
        founding: &mut Founding,
        owner: Owner,
        progress: Result<Progress>,
    ) -> Result<Option<Question>> {
        let several = fleet.nodes.len() > 1;
        Ok(match progress {
            Ok(Progress::Well { took }) => {
                let took = took.as_secs_f64();
                self.ui.say(format_args!(
                    "  {:<10} {took:>6.2} s  HOME, healthy",
                    "answers"
                ));
                None
            }
            Ok(Progress::Owned(addresses)) => {
                founding.owned_at = addresses;
                self.state.save(founding)?;
                match several {
                    true => Some(self.meet(fleet)?),
                    false => Some(ask(owner)),
                }
            }
            // The context stands from an earlier run; our own certificate does not.
            Ok(Progress::NotYet(_)) if several && owner.is_owned() => Some(self.meet(fleet)?),
            Ok(Progress::NotYet(why)) => {
                self.show_waiting(fleet, why);
                Some(ask(owner))
            }
            Err(error) => {
                let why = format!("its owner cannot use it: {error:#}");
                return Err(failure(fleet, 0, why));
            }
        })
    }

    /// The next try to become the owner in this process.
    fn meet(&self, fleet: &Fleet) -> Result<Question> {
        let key = owner_files::read_key(&self.state.owner_key())?;
        let secret = owner_files::read_first_contact_secret(&self.state.first_contact_secret())?;
        let curators: Vec<Endpoint> = fleet.curators().into_iter().map(Endpoint::from).collect();
        let register = self.state.register();
        Ok(Box::pin(async move {
            let met = async {
                let operator = Operator::take_ownership(&key, &secret, &curators).await?;
                let parameters = operator.register_parameters().await?;
                Ok((operator, save_register(&register, &parameters)?))
            };
            let met = met.await;
            if met.is_err() {
                tokio::time::sleep(PAUSE).await;
            }
            Answer::Met(met)
        }))
    }

    /// The machines as the plan wants to know them.
    pub(super) fn candidates(&self, fleet: &Fleet, founding: &Founding) -> Result<Vec<Candidate>> {
        let approved = founding.nodes.saturating_sub(self.args.join_later);
        let candidate = |node: &super::fleet::Node| {
            let address = fleet.cluster().address(&node.name);
            Ok(Candidate {
                machine: node.name.clone(),
                address: address.with_context(|| format!("{} has no address", node.name))?,
                public_key: node.key.clone(),
                id: founding.members.get(&node.name).cloned(),
                approve: node.number <= approved,
                votes: node.number <= VOTERS.min(approved),
            })
        };
        fleet.nodes.iter().map(candidate).collect()
    }

    /// What one look comes to; a call that fails is tried again.
    fn looked(&self, look: Result<Look>) -> Option<Look> {
        match look {
            Ok(look) => {
                for step in &look.taken {
                    self.ui.say(format_args!("  {step}"));
                }
                Some(look)
            }
            Err(error) => {
                self.ui.detail(format_args!("asking again: {error:#}"));
                None
            }
        }
    }

    /// Machines that have become members are remembered by their node IDs.
    pub(super) fn remember(
        &self,
        fleet: &Fleet,
        founding: &mut Founding,
        standing: &Standing,
    ) -> Result<()> {
        let candidates = self.candidates(fleet, founding)?;
        let mut new = false;
        for candidate in candidates.iter().filter(|candidate| candidate.id.is_none()) {
            let node = candidate.node(&standing.nodes);
            if let Some(node) = node.filter(|node| node.state() == NodeState::Up) {
                founding
                    .members
                    .insert(candidate.machine.clone(), node.id.clone());
                new = true;
            }
        }
        match new {
            true => self.state.save(founding),
            false => Ok(()),
        }
    }

    /// What is waited for, each reason once.
    fn tell_missing(&self, before: &[(String, String)], now: &[(String, String)]) {
        for (machine, what) in now.iter().filter(|missing| !before.contains(missing)) {
            self.ui
                .say(format_args!("  {machine}  … waiting for {what}"));
        }
    }

    fn show_asking(&self, fleet: &Fleet) {
        if let Some(display) = &fleet.nodes[0].display {
            display.asking();
        }
    }

    fn show_waiting(&self, fleet: &mut Fleet, why: String) {
        if let Some(display) = &mut fleet.nodes[0].display {
            display.show_waiting(why);
        }
    }
}

fn ask(owner: Owner) -> Question {
    Box::pin(async {
        let (owner, progress) = owner.next().await;
        Answer::Owner(Box::new(owner), progress)
    })
}

/// Looks once, and does what the look calls for.
fn look(operator: Operator, candidates: Vec<Candidate>) -> Question {
    Box::pin(async move {
        tokio::time::sleep(PAUSE).await;
        let looked = look_once(&operator, &candidates).await;
        Answer::Look(operator, looked)
    })
}

/// Pending for as long as there is no question; takes the one that is answered.
async fn pending(question: &mut Option<Question>) -> Answer {
    match question {
        Some(asked) => asked.as_mut().await,
        None => std::future::pending().await,
    }
}

fn late(fleet: &Fleet, bound: Duration, missing: &[(String, String)]) -> anyhow::Error {
    let seconds = bound.as_secs();
    // The first that is behind.
    let behind = fleet.nodes.iter().position(|node| {
        let lacks = missing.iter().any(|(machine, _)| *machine == node.name);
        lacks || (node.on && !node.is_home() && node.key.is_none())
    });
    let index = behind.unwrap_or(0);
    let Some(display) = &fleet.nodes[index].display else {
        return anyhow!(
            "not within {seconds} s; {} was not even started",
            fleet.nodes[index].name
        );
    };
    let lacks = missing
        .iter()
        .find(|(machine, _)| *machine == fleet.nodes[index].name);
    let phase = match (display.timeline().current(), lacks) {
        (_, Some((_, what))) => format!("it lacks {what}"),
        (Some(phase), None) => format!("it has come to: {}", phase.word()),
        (None, None) => "it has come to: answers".to_owned(),
    };
    let waiting = match display.waiting() {
        Some(why) => format!(", where it waits for {why}"),
        None => String::new(),
    };
    failure(
        fleet,
        index,
        format_args!("not within {seconds} s; {phase}{waiting}"),
    )
}
