//! Measures what a node that does all it can to disturb costs the others.
//!
//! Some nodes make a call now and then, as nodes do, and the time to the answer is measured: once while a process
//! computes, and once while the same process is a node with valid credentials that calls the curator from many
//! connections at once, with everything that makes it work. In both phases that process gets half a core, so that the
//! difference is what the curator does for it, and not the processor time of the attacker on the same machine.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::future::{join_all, try_join_all};
use hearth_api::client::Channel;
use hearth_api::identity::{MeshSecret, NodeCredentials, NodeId};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::issue_certificate_request::{EtcdPeer, Kind};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ClusterState, GetNodesRequest, HeartbeatRequest, IssueCertificateRequest, NodeCondition,
    NodeStatus, UpdateNodeClusterNetworkingRequest, UpdateNodeStatusRequest, WatchRequest,
};
use hearth_curator::testing::BOOT_ID;
use nix::time::{ClockId, clock_gettime};
use tokio::process::{Child, Command};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::report;
use crate::serve::{Budget, Served};

/// Nodes whose calls are measured; the attacker is one more.
const NODES: usize = 8;
/// Between two calls of a node.
const CALL_EVERY: Duration = Duration::from_millis(50);
/// Duration of each phase.
const SPAN: Duration = Duration::from_secs(6);
/// Until the attacker has its connections and has used up the first of its budgets.
const WARM_UP: Duration = Duration::from_secs(2);
/// Connections of the attacker, and calls at a time on each.
const CONNECTIONS: usize = 16;
const CALLS: usize = 8;
/// The attacker gives up a call that is not answered, to make the next one.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the attacker's process does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It computes.
    Quiet,
    /// It calls the curator.
    Hostile,
}

impl Mode {
    const ALL: [Self; 2] = [Self::Quiet, Self::Hostile];

    const fn name(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Hostile => "hostile",
        }
    }

    /// The mode of this name.
    pub(crate) fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// Runs the measurement and reports the results.
pub(crate) async fn run(rounds: usize) -> Result<()> {
    let served = Served::start(NODES + 1, Budget::Default).await?;
    let [_, attacker, nodes @ ..] = &served.nodes[..] else {
        anyhow::bail!("the server has no nodes");
    };
    let attacker = NodeId::from_public_key(&attacker.key.public());
    let mut ratios = Vec::new();
    let mut seconds = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        let mut found = [0.0; 2];
        for (mode, found) in Mode::ALL.into_iter().zip(&mut found) {
            let mut disturbance = start(&served, attacker, mode)?;
            sleep(WARM_UP).await;
            *found = measure(&served, nodes).await?;
            let over = disturbance.try_wait()?;
            anyhow::ensure!(over.is_none(), "the attacker has ended: {over:?}");
            disturbance.kill().await?;
        }
        ratios.push(found[1] / found[0]);
        for (all, found) in seconds.iter_mut().zip(found) {
            all.push(found);
        }
    }
    for (mode, seconds) in Mode::ALL.into_iter().zip(&seconds) {
        report(
            &format!("curator.{}_p99_seconds", mode.name()),
            "s",
            seconds,
        );
    }
    report("curator.hostile_p99_ratio_quiet", "ratio", &ratios);
    served.stop().await
}

fn start(served: &Served, attacker: NodeId, mode: Mode) -> Result<Child> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    command
        .arg("disturb")
        .arg(served.folder())
        .arg(served.address().to_string())
        .arg(attacker.to_string())
        .arg(mode.name())
        .kill_on_drop(true);
    command.spawn().context("cannot start the attacker")
}

/// The time within which 99 of 100 calls were answered, in seconds.
async fn measure(served: &Served, nodes: &[NodeCredentials]) -> Result<f64> {
    let mut callers = Vec::new();
    for node in nodes {
        callers.push(Caller::new(node, served.curator(node)?));
    }
    let times = try_join_all(callers.iter_mut().map(Caller::call_for_a_while)).await?;
    let mut times: Vec<f64> = times.into_iter().flatten().collect();
    times.sort_unstable_by(f64::total_cmp);
    let place = times.len() * 99 / 100;
    times.get(place).copied().context("no call was made")
}

/// A node that reads its own record now and then, and reports once a second.
struct Caller {
    id: NodeId,
    curator: CuratorClient<Channel>,
    management: ManagementClient<Channel>,
}

impl Caller {
    fn new(node: &NodeCredentials, channel: Channel) -> Self {
        Self {
            id: NodeId::from_public_key(&node.key.public()),
            curator: CuratorClient::new(channel.clone()),
            management: ManagementClient::new(channel),
        }
    }

    /// The time of each call in seconds.
    async fn call_for_a_while(&mut self) -> Result<Vec<f64>> {
        // Connected before anything is measured.
        self.read().await?;
        let mut ticks = interval(CALL_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let per_second = (Duration::from_secs(1).as_millis() / CALL_EVERY.as_millis()) as usize;
        let begin = Instant::now();
        let mut times = Vec::new();
        while begin.elapsed() < SPAN {
            ticks.tick().await;
            let call = Instant::now();
            match times.len() % per_second {
                0 => self.update(times.len()).await?,
                _ => self.read().await?,
            }
            times.push(call.elapsed().as_secs_f64());
        }
        Ok(times)
    }

    async fn read(&mut self) -> Result<()> {
        let request = GetNodesRequest {
            node_ids: vec![self.id.to_string()],
            ..Default::default()
        };
        let mut answer = self.management.get_nodes(request).await?.into_inner();
        while answer.message().await?.is_some() {}
        Ok(())
    }

    async fn update(&mut self, number: usize) -> Result<()> {
        let request = UpdateNodeStatusRequest {
            node_id: self.id.to_string(),
            status: Some(status(number.to_string())),
        };
        self.curator.update_node_status(request).await?;
        Ok(())
    }
}

fn status(version: String) -> NodeStatus {
    NodeStatus {
        external_address: "192.0.2.1".into(),
        curator_port: 7835,
        version,
        boot_id: BOOT_ID.into(),
        cluster_state: ClusterState::Home.into(),
        ..NodeStatus::default()
    }
}

/// The attacker's process: disturbs the server whose files are in `folder`, until it is killed.
pub(crate) async fn disturb(folder: &Path, server: &str, attacker: &str, mode: Mode) -> Result<()> {
    let begin = Instant::now();
    if mode == Mode::Quiet {
        loop {
            compute();
            half_a_core(begin).await?;
        }
    }
    let nodes = crate::serve::read_nodes(folder)?;
    let attacker: NodeId = attacker.parse()?;
    let mut nodes = nodes.into_iter();
    let node = nodes.find(|node| NodeId::from_public_key(&node.key.public()) == attacker);
    let node = node.context("the attacker is not a node")?;
    let mut callers = Vec::new();
    for number in 0..CONNECTIONS * CALLS {
        let channel = crate::serve::connection(server.parse()?, &node)?;
        callers.push(attack(channel, attacker, number, begin));
    }
    join_all(callers).await;
    Ok(())
}

/// As much as one call of the attacker.
fn compute() {
    let mut value = 1_u64;
    for step in 0..20_000_u64 {
        value = std::hint::black_box(value.wrapping_mul(6_364_136_223_846_793_005) ^ step);
    }
}

/// Waits while this process has used more than half a core.
async fn half_a_core(begin: Instant) -> Result<()> {
    loop {
        let used = Duration::from(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?);
        match used.checked_sub(begin.elapsed() / 2) {
            Some(ahead) if !ahead.is_zero() => sleep(ahead * 2).await,
            _ => return Ok(()),
        }
    }
}

/// Calls the curator without end. Whatever it answers, the next call follows.
async fn attack(channel: Channel, id: NodeId, number: usize, begin: Instant) {
    let mut curator = CuratorClient::new(channel);
    let mut streams = Vec::new();
    for call in number.. {
        if half_a_core(begin).await.is_err() {
            return;
        }
        let one = async {
            match call % 6 {
                0 | 1 => drop(curator.update_node_status(report_of(id, call)).await),
                2 => drop(
                    curator
                        .update_node_cluster_networking(UpdateNodeClusterNetworkingRequest {
                            node_id: id.to_string(),
                            wireguard_public_key: MeshSecret::generate()
                                .public()
                                .as_bytes()
                                .to_vec(),
                        })
                        .await,
                ),
                3 => drop(
                    curator
                        .issue_certificate(IssueCertificateRequest {
                            kind: Some(Kind::EtcdPeer(EtcdPeer {})),
                        })
                        .await,
                ),
                4 => {
                    // Never read.
                    if let Ok(watch) = curator.watch(WatchRequest::default()).await {
                        streams.push(watch.into_inner());
                        streams.truncate(CALLS);
                    }
                }
                _ => {
                    let beat = HeartbeatRequest {
                        boot_id: format!("{call:032x}"),
                        protocol_version: 1,
                        ending: false,
                    };
                    drop(curator.heartbeat(futures::stream::iter([beat])).await);
                }
            }
        };
        // An answer that does not come is as good as one.
        let _ = timeout(PATIENCE, one).await;
    }
}

/// A report of the largest size that differs from all others.
fn report_of(id: NodeId, call: usize) -> UpdateNodeStatusRequest {
    let condition = |number: usize| NodeCondition {
        r#type: format!("Condition{number}"),
        met: false,
        reason: "Hostile".into(),
        message: format!("{call} ").repeat(60),
    };
    UpdateNodeStatusRequest {
        node_id: id.to_string(),
        status: Some(NodeStatus {
            conditions: (0..8).map(condition).collect(),
            ..status(format!("hostile-{call}"))
        }),
    }
}
