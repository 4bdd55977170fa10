//! Watches a cluster in the foreground until its machines have ended.
//!
//! Machines can end and start here without ending the run: `cargo xtask power cut` in another terminal cuts their
//! power, and `power start` asks this run to start them again, because only machines that it has started end with it.

use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use hearth_operator::{ClusterStatus, Operator};
use hearth_qemu::switch::NetworkError;
use hearth_qemu::vm::Cause;

use crate::events::{Event, Snapshot};
use crate::fleet::{Machines, News};
use crate::record::ClusterRecord;
use crate::session::{Asker, Session};
use crate::{LabError, Result};

/// Between two checks of the cluster and of requests from other processes.
const PAUSE: Duration = Duration::from_secs(1);

/// The outstanding status call, at most one; the consoles are read meanwhile.
type Looks = FuturesUnordered<BoxFuture<'static, Result<(Operator, ClusterStatus)>>>;

impl Session<'_> {
    /// Runs until the only machine has shut down cleanly, or lost its power.
    ///
    /// # Errors
    /// If it ends in another way.
    pub async fn watch_one(&self, fleet: &mut Machines) -> Result<()> {
        loop {
            let (index, news) = fleet.next().await?;
            let machine = &fleet.nodes[index].name;
            match news {
                News::Line(Some(trouble)) => self.tell(&Event::BootFailure {
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

    /// Runs until all machines have shut down cleanly.
    ///
    /// # Errors
    /// If a requested machine cannot be started again.
    pub async fn watch(&self, fleet: &mut Machines, record: &mut ClusterRecord) -> Result<()> {
        let mut cluster_status = ClusterStatus::default();
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
                            cluster_status = seen;
                            // Nodes that the user has approved are members, too.
                            self.remember(&candidates, record, &cluster_status)?;
                            None
                        }
                        Err(error) => Some(error),
                    };
                    let on: Vec<bool> = fleet.nodes.iter().map(|node| node.on).collect();
                    self.tell(&Event::Seen(&Snapshot {
                        candidates: &candidates,
                        on: &on,
                        cluster_status: &cluster_status,
                        silence: silence.as_ref(),
                    }));
                }
            }
        }
    }

    /// Processes an event of a machine; true: all of them have shut down cleanly.
    fn ended(&self, fleet: &Machines, index: usize, news: &News) -> bool {
        let machine = &fleet.nodes[index].name;
        match news {
            News::Line(Some(trouble)) => self.tell(&Event::BootFailure { machine, trouble }),
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

/// Whether another process has ended the cluster, as `cargo xtask stop --force` does. Machines that are only off can be
/// started again, but not without their network.
async fn is_over(fleet: &Machines) -> bool {
    let network = fleet.cluster().network();
    match network.filter(|_| fleet.nodes.iter().all(|node| !node.on)) {
        Some(network) => matches!(network.status().await, Err(NetworkError::Ended { .. })),
        None => false,
    }
}

fn look(
    operator: Option<Operator>,
    asker: Asker,
) -> BoxFuture<'static, Result<(Operator, ClusterStatus)>> {
    Box::pin(async move {
        let operator = match operator {
            Some(operator) => operator,
            None => asker.connect().await?,
        };
        let cluster_status = operator.cluster_status().await;
        let cluster_status =
            cluster_status.map_err(LabError::call("GetConsensusStatus or GetNodes"))?;
        Ok((operator, cluster_status))
    })
}
