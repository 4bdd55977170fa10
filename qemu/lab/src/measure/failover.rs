//! From the loss of the controller that has the virtual address until the API answers at that address again.
//!
//! A cluster of voters, of which two are Kubernetes controllers. The first one has the address, because it was the only
//! controller for a while; it has founded the cluster, too, so that etcd loses its leader with it, unless the
//! leadership has moved. Then its power is cut, and a user on the host asks `kubectl get --raw /readyz` again and again,
//! through the address alone.

use std::time::{Duration, Instant};

use hearth_api::names::{self, conditions};
use hearth_api::v1::NodeCondition;
use hearth_operator::Operator;
use hearth_qemu::cluster::Cluster;
use hearth_qemu::command::CommandLine;
use hearth_qemu::switch::NetworkOptions;
use hearth_qemu::vm::Vm;

use super::cluster::{Formed, Plan, Progress, one_ends};
use crate::formation::Candidate;
use crate::hearthctl::Hearthctl;
use crate::{LabError, Result, tool};

/// Bound for two control planes, which start one after the other, and for the API to answer again.
const BOUND: Duration = Duration::from_secs(1800);
/// Between two calls while nothing is measured.
const PAUSE: Duration = Duration::from_secs(1);
/// What the new holder logs.
const HAS_IT: &str = "has the virtual address of the API servers";

/// What is measured.
pub struct Failover<'a> {
    /// The cluster, whose configuration has [`api_address`].
    pub plan: Plan<'a>,
    /// The operator's tool.
    pub hearthctl: Hearthctl,
    /// Path of kubectl.
    pub kubectl: std::path::PathBuf,
}

/// The results, in seconds from the power cut.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// Until the other controller has the address.
    pub moved: f64,
    /// Until the API has answered at it.
    pub answered: f64,
}

/// The virtual address of the API servers in a measured cluster.
pub fn api_address() -> std::net::Ipv4Addr {
    NetworkOptions::default().shared_address()
}

impl Failover<'_> {
    /// Forms the cluster and measures. `told` receives what is awaited.
    ///
    /// # Errors
    /// If the API does not answer in time, before or after.
    pub async fn run(&self, told: &dyn Fn(&str)) -> Result<Moved> {
        let formed = self.plan.form(|progress| match progress {
            Progress::First => told("one node"),
            Progress::Others => told("three voters"),
            Progress::NotYet(error) => {
                told(&format!("three voters ({})", hearth_api::chain(error)))
            }
        });
        let formed = formed.await?;
        let bounded = tokio::time::timeout(BOUND, async {
            tokio::select! {
                ready = self.prepare(&formed, told) => ready,
                error = one_ends(&formed.cluster) => Err(error),
            }?;
            told("the other controller");
            self.lose_the_holder(&formed.cluster).await
        });
        let moved = bounded.await.unwrap_or(Err(LabError::Late {
            what: "API at the virtual address",
            bound: BOUND,
        }))?;
        self.plan.end(formed.cluster)?;
        Ok(moved)
    }

    /// Makes the first two nodes controllers, and gets access for a user.
    async fn prepare(&self, formed: &Formed, told: &dyn Fn(&str)) -> Result<()> {
        let cluster = &formed.cluster;
        for (index, reason) in [(0, "Holder"), (1, "Standby")] {
            let candidate = &formed.candidates[index];
            told(&format!("an API server on {}", candidate.machine));
            become_controller(&formed.operator, candidate, reason).await?;
        }
        told("the API at the virtual address");
        let network = cluster.network().ok_or_else(|| LabError::Unplugged {
            machine: cluster.machines()[0].name().to_owned(),
            what: "network",
        })?;
        let server = network
            .forward_shared(api_address(), names::PORT_KUBERNETES)
            .await?;
        let curator = cluster.forwarded(cluster.machines()[1].name(), names::PORT_CURATOR);
        let folder = &self.plan.lab.folder;
        let own = self
            .hearthctl
            .take_ownership("bench", folder, curator.as_slice());
        tool::run(&own).await?;
        let words = ["kubernetes", "kubeconfig", "--embed", "--server"];
        let mut write = self.hearthctl.call(words);
        write
            .arg(format!("https://{server}"))
            .option("--output-file", self.kubeconfig());
        tool::run(&write).await?;
        while tool::run(&self.ask()).await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn lose_the_holder(&self, cluster: &Cluster) -> Result<Moved> {
        let [holder, other, ..] = cluster.machines() else {
            return Err(LabError::Unplugged {
                machine: "two".to_owned(),
                what: "machines",
            });
        };
        let cut = holder.power_cut().await;
        cut.map_err(LabError::process("kill QEMU"))?;
        let cut = Instant::now();
        let (moved, answered) = tokio::join!(has_it(other), async {
            // Each call ends within a second, and the next begins at once.
            while tool::run(&self.ask()).await.is_err() {}
            cut.elapsed()
        });
        let moved = (other.started() + moved?).saturating_duration_since(cut);
        Ok(Moved {
            moved: moved.as_secs_f64(),
            answered: answered.as_secs_f64(),
        })
    }

    fn kubeconfig(&self) -> std::path::PathBuf {
        self.plan.lab.folder.join("kubeconfig")
    }

    fn ask(&self) -> CommandLine {
        let mut line = CommandLine::new(&self.kubectl);
        line.option("--kubeconfig", self.kubeconfig());
        for word in ["get", "--raw", "/readyz", "--request-timeout=1s"] {
            line.arg(word);
        }
        line
    }
}

/// When the machine says that it has the address, since it was started.
async fn has_it(vm: &Vm) -> Result<Duration> {
    let line = vm.wait_for("the virtual address", BOUND, |line| line.contains(HAS_IT));
    Ok(line.await?.at)
}

/// Makes a node a controller, and waits until it says this of the address.
async fn become_controller(operator: &Operator, candidate: &Candidate, reason: &str) -> Result<()> {
    let is_so = |condition: &NodeCondition| {
        condition.r#type == conditions::KUBERNETES_API_ADDRESS && condition.reason == reason
    };
    loop {
        // Calls that fail are repeated: curators restart when nodes change their roles.
        if let Ok(nodes) = operator.nodes().await
            && let Some(node) = candidate.node(&nodes)
        {
            let mut told = node.status.iter().flat_map(|status| &status.conditions);
            if told.any(is_so) {
                return Ok(());
            }
            let roles = node.roles.unwrap_or_default();
            if roles.kubernetes_controller.is_none() {
                let given = operator.give_kubernetes_roles(&node.id, true, false);
                // Not before it is a voter.
                let _ = given.await;
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
