//! Clients of all curators of a cluster, whose history is checked: [`hearth_history`] on booted machines.

use std::time::Duration;

use hearth_history::{CheckError, Checked, Plan, Reads};

use crate::owner::Operator;
use crate::{Outcome, bounds};

/// Time after which a client gives up an operation: a curator that has lost its quorum answers earlier.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two operations of a client: emulated machines have other things to do.
const PACE: Duration = Duration::from_millis(20);

/// Read and write until they are stopped or dropped. The client of a node's curator has the number of the node.
pub struct Clients(hearth_history::Clients);

impl Clients {
    pub(crate) async fn start(
        node: &str,
        curators: Vec<Operator>,
        reads: Reads,
    ) -> anyhow::Result<Self> {
        let plan = Plan {
            node: node.to_owned(),
            labels: vec!["history-a".to_owned(), "history-b".to_owned()],
            reads,
            patience: PATIENCE,
            pace: PACE,
        };
        let channels = curators.iter().map(|operator| operator.once().channel());
        let clients = hearth_history::Clients::start(plan, channels.collect(), 1).await?;
        let all: Vec<usize> = (0..curators.len()).collect();
        clients.go_on(&all, bounds::SETTLED).await?;
        Ok(Self(clients))
    }

    /// Waits until the clients of these nodes' curators get further answers, also to changes.
    ///
    /// # Errors
    /// If that times out, or a call fails for another reason than a fault.
    pub async fn go_on(&self, numbers: &[u16]) -> Outcome {
        let clients = numbers.iter().map(|number| usize::from(*number) - 1);
        let clients: Vec<usize> = clients.collect();
        Ok(self.0.go_on(&clients, bounds::SETTLED).await?)
    }

    /// Checks what they have seen so far. They continue.
    ///
    /// # Errors
    /// If it is not linearizable.
    pub fn check(&self) -> Result<Checked, CheckError> {
        self.0.history().check()
    }

    /// Stops them, and checks what they have seen.
    ///
    /// # Errors
    /// If it is not linearizable, or a call failed for another reason than a fault.
    pub async fn verify(self) -> anyhow::Result<Checked> {
        Ok(self.0.stop().await?.check()?)
    }
}
