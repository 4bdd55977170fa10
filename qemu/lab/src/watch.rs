//! A cluster in the foreground, looked at until its machines have ended.
//!
//! Machines come and go here without ending the run: their plugs are pulled by `cargo xtask power cut`, from another
//! terminal, and `power start` asks this run to switch them on again, because only machines that it has started end with it.

use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use hearth_api::operator::{Operator, Standing};
use hearth_qemu::switch::NetworkError;
use hearth_qemu::vm::Cause;

use crate::events::{Event, Snapshot};
use crate::fleet::{Fleet, News};
use crate::record::ClusterRecord;
use crate::session::{Asker, Session};
use crate::{LabError, Result};

/// Between two looks, at the cluster and at what other processes ask for.
const PAUSE: Duration = Duration::from_secs(1);

/// The look that is on its way, beside the consoles, which must be heard meanwhile; at most one.
type Looks = FuturesUnordered<BoxFuture<'static, Result<(Operator, Standing)>>>;

impl Session<'_> {
    /// Until the only machine has gone down in order, or lost its power.
    ///
    /// # Errors
    /// If it has ended in another way.
    pub async fn watch_one(&self, fleet: &mut Fleet) -> Result<()> {
        loop {
            let (index, news) = fleet.next().await?;
            let machine = &fleet.nodes[index].name;
            match news {
                News::Line(Some(trouble)) => self.tell(&Event::Trouble {
                    machine,
                    trouble: &trouble,
                }),
                News::Line(None) => {}
                News::Ended(exit) if fleet.went_down(index, &exit) => {
                    self.tell(&Event::Down {
                        machine,
                        took: None,
                    });
                    return Ok(());
                }
                News::Ended(exit) if exit.cause == Cause::PowerCut => return Ok(()),
                News::Ended(exit) => {
                    return Err(LabError::Ended {
                        machine: machine.clone(),
                        exit: exit.to_string(),
                        tail: fleet.vm(index)?.tail().to_string(),
                    });
                }
            }
        }
    }

    /// Until all machines have gone down in order.
    ///
    /// # Errors
    /// If one cannot be started again that was asked for.
    pub async fn watch(&self, fleet: &mut Fleet, record: &mut ClusterRecord) -> Result<()> {
        let mut standing = Standing::default();
        let mut operator: Option<Operator> = None;
        let mut ticks = tokio::time::interval(PAUSE);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut looks = Looks::new();
        loop {
            tokio::select! {
                news = fleet.next() => {
                    let (index, news) = news?;
                    if self.ended(fleet, index, &news) {
                        return Ok(());
                    }
                }
                _ = ticks.tick() => {
                    if is_over(fleet).await {
                        self.tell(&Event::AllOff);
                        return Ok(());
                    }
                    for index in fleet.requested(self.state.path()) {
                        let number = fleet.nodes[index].number;
                        let parameters = self.state.parameters_of(record, number)?;
                        fleet.start(index, record, parameters).await?;
                    }
                    if looks.is_empty() {
                        looks.push(look(operator.clone(), self.asker(fleet)?));
                    }
                }
                Some(looked) = looks.next() => {
                    let candidates = self.candidates(fleet, record)?;
                    let silence = match looked {
                        Ok((connected, seen)) => {
                            operator = Some(connected);
                            standing = seen;
                            // Those that the user has let in are members, too.
                            self.remember(&candidates, record, &standing)?;
                            None
                        }
                        Err(error) => Some(error),
                    };
                    let on: Vec<bool> = fleet.nodes.iter().map(|node| node.on).collect();
                    self.tell(&Event::Seen(&Snapshot {
                        candidates: &candidates,
                        on: &on,
                        standing: &standing,
                        silence: silence.as_ref(),
                    }));
                }
            }
        }
    }

    /// A machine has spoken or ended; true: all of them went down in order.
    fn ended(&self, fleet: &Fleet, index: usize, news: &News) -> bool {
        let machine = &fleet.nodes[index].name;
        match news {
            News::Line(Some(trouble)) => self.tell(&Event::Trouble { machine, trouble }),
            News::Line(None) => {}
            News::Ended(exit) if fleet.went_down(index, exit) => {
                self.tell(&Event::Down {
                    machine,
                    took: None,
                });
                return fleet.nodes.iter().all(|node| !node.on);
            }
            News::Ended(exit) => self.tell(&Event::Off { machine, exit }),
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

fn look(
    operator: Option<Operator>,
    asker: Asker,
) -> BoxFuture<'static, Result<(Operator, Standing)>> {
    Box::pin(async move {
        let operator = match operator {
            Some(operator) => operator,
            None => asker.connect().await?,
        };
        let standing = operator.standing().await;
        let standing = standing.map_err(LabError::call("GetConsensusStatus and GetNodes"))?;
        Ok((operator, standing))
    })
}
