//! A cluster of several nodes in the foreground: its table, live, until Ctrl-C.
//!
//! Machines come and go here without ending the run: their plugs are pulled by `cargo xtask power cut`, from another
//! terminal, and `power start` asks this run to switch them on again, because only machines that it has started end with it.

use std::pin::Pin;
use std::time::Duration;

use anyhow::Result;
use hearth_api::client::Endpoint;
use hearth_api::owner as owner_files;
use hearth_api::v1::{self, NodeState};
use hearth_qemu::switch::NetworkError;

use super::fleet::{Fleet, News};
use super::state::Founding;
use super::table::{self, Table};
use super::{Run, machines};
use crate::formation::Candidate;
use crate::operator::{Operator, Standing};

/// Between two looks, at the cluster and at what other processes ask for.
const PAUSE: Duration = Duration::from_secs(1);

impl Run<'_> {
    /// Until all machines have gone down in order.
    pub(super) async fn watch(&self, fleet: &mut Fleet, founding: &mut Founding) -> Result<()> {
        let key = owner_files::read_key(&self.state.owner_key())?;
        let secret = owner_files::read_first_contact_secret(&self.state.first_contact_secret())?;
        let curators: Vec<Endpoint> = fleet.curators().into_iter().map(Endpoint::from).collect();
        let mut table = Table::new(self.ui);
        let mut standing = Standing::default();
        let mut operator: Option<Operator> = None;
        let mut looks = tokio::time::interval(PAUSE);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Beside the consoles, which must be heard while an answer is waited for.
        let mut question: Option<Question> = None;
        loop {
            tokio::select! {
                news = fleet.next() => {
                    let (index, news) = news?;
                    if self.ended(fleet, index, &news) {
                        return Ok(());
                    }
                }
                _ = looks.tick() => {
                    if is_over(fleet).await {
                        self.ui.say("all machines are off, and their network has ended");
                        return Ok(());
                    }
                    for index in fleet.requested(self.state) {
                        let number = fleet.nodes[index].number;
                        self.announce(&machines::name(number));
                        fleet.start(index, founding, self.state.parameters_of(founding, number)?).await?;
                    }
                    if question.is_none() {
                        let asked = ask(operator.clone(), key.clone(), secret.clone(), curators.clone());
                        question = Some(Box::pin(asked));
                    }
                }
                answered = pending(&mut question) => {
                    question = None;
                    let candidates = self.candidates(fleet, founding)?;
                    let note = match answered {
                        Ok((connected, seen)) => {
                            operator = Some(connected);
                            standing = seen;
                            // Those that the user has let in are members, too.
                            self.remember(fleet, founding, &standing)?;
                            note(&candidates, &standing)
                        }
                        Err(error) => format!("as it was last; now no curator answers: {error:#}"),
                    };
                    let on = |index: usize| fleet.nodes[index].on;
                    let rows = candidates.iter().enumerate();
                    let rows = rows.map(|(index, candidate)| table::row(candidate, on(index), &standing));
                    table.show(rows.collect(), &note);
                }
            }
        }
    }

    /// A machine has spoken or ended; true: all of them went down in order.
    fn ended(&self, fleet: &Fleet, index: usize, news: &News) -> bool {
        let name = &fleet.nodes[index].name;
        match news {
            News::Line(Some(trouble)) => self.ui.say(format_args!("{name}: {trouble}")),
            News::Line(None) => {}
            News::Ended(exit) if fleet.went_down(index, exit) => {
                self.ui.say(format_args!("{name} is down"));
                return fleet.nodes.iter().all(|node| !node.on);
            }
            News::Ended(exit) => self.ui.say(format_args!(
                "{name} is off: {exit}; `cargo xtask power start {name}` switches it on"
            )),
        }
        false
    }
}

/// Whether somebody else has ended it, as `cargo xtask stop --force` does. Machines that are merely off may be switched on
/// again, but not without their network.
async fn is_over(fleet: &Fleet) -> bool {
    let network = fleet.cluster().network();
    match network.filter(|_| fleet.nodes.iter().all(|node| !node.on)) {
        Some(network) => matches!(network.status().await, Err(NetworkError::Ended { .. })),
        None => false,
    }
}

/// What is asked of the cluster beside listening to the machines.
type Question = Pin<Box<dyn Future<Output = Result<(Operator, Standing)>>>>;

/// Pending for as long as there is no question.
async fn pending(question: &mut Option<Question>) -> Result<(Operator, Standing)> {
    match question {
        Some(asked) => asked.as_mut().await,
        None => std::future::pending().await,
    }
}

async fn ask(
    operator: Option<Operator>,
    key: hearth_api::identity::OwnerKey,
    secret: hearth_api::identity::FirstContactSecret,
    curators: Vec<Endpoint>,
) -> Result<(Operator, Standing)> {
    let operator = match operator {
        Some(operator) => operator,
        None => Operator::take_ownership(&key, &secret, &curators).await?,
    };
    let standing = operator.standing().await?;
    Ok((operator, standing))
}

/// What the user may want to do, or that all is well.
fn note(candidates: &[Candidate], standing: &Standing) -> String {
    let new = |candidate: &&Candidate| {
        let node = candidate.node(&standing.nodes);
        node.is_some_and(|node| node.state() == NodeState::New)
    };
    if let Some(candidate) = candidates.iter().find(new)
        && let Some(key) = &candidate.public_key
    {
        let key = hex::encode(key);
        let machine = &candidate.machine;
        return format!(
            "{machine} waits for your approval, with the key that its console shows: cargo xtask ctl -- node approve {key}"
        );
    }
    let members: Vec<&v1::Node> = standing
        .nodes
        .iter()
        .filter(|node| node.state() == NodeState::Up)
        .collect();
    let ill = members.iter().filter(|node| !table::is_well(node)).count();
    match ill {
        0 => format!("all {} members are well", members.len()),
        ill => format!("{ill} of {} members are not well", members.len()),
    }
}
