//! Measures calls per second of a curator, compared with an etcd that is called directly.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use hearth_api::client::Channel;
use hearth_api::identity::{NodeCredentials, NodeId};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{ClusterState, GetNodesRequest, NodeStatus, UpdateNodeStatusRequest};
use hearth_cluster::state;
use hearth_consensus::NamespacedClient;
use hearth_consensus::fenced::{Condition, Write};
use hearth_curator::testing::BOOT_ID;

use crate::report;
use crate::serve::{Budget, Handshakes, Served};

/// Duration of each measurement in each round.
const SPAN: Duration = Duration::from_millis(1500);
/// Numbers of concurrent callers.
const CALLERS: [usize; 2] = [1, 32];

/// One caller, with a connection to the curator and one to the other etcd.
struct Caller {
    id: NodeId,
    curator: CuratorClient<Channel>,
    management: ManagementClient<Channel>,
    etcd: NamespacedClient,
    handshakes: Handshakes,
    /// The revision of its node's record in the other etcd.
    revision: i64,
    count: u64,
}

impl Caller {
    async fn new(served: &Served, node: &NodeCredentials) -> Result<Self> {
        let id = NodeId::from_public_key(&node.key.public());
        let channel = served.curator(node)?;
        let etcd = served.etcd(node).await?;
        // A record for the condition of the writes, about as large as a real one.
        let key = state::node_key(id);
        let write = Write::when(Condition::Absent(key.clone())).put(key, vec![7; 100]);
        Ok(Self {
            id,
            curator: CuratorClient::new(channel.clone()),
            management: ManagementClient::new(channel),
            revision: etcd.write(write).await?,
            handshakes: served.handshakes(node)?,
            etcd,
            count: 0,
        })
    }

    /// A status that differs from all earlier ones.
    fn status(&mut self) -> NodeStatus {
        self.count += 1;
        NodeStatus {
            external_address: "192.0.2.1".into(),
            curator_port: 7835,
            version: format!("bench-{}", self.count),
            boot_id: BOOT_ID.into(),
            cluster_state: ClusterState::Home.into(),
            ..NodeStatus::default()
        }
    }

    async fn update(&mut self) -> Result<()> {
        let status = Some(self.status());
        let node_id = self.id.to_string();
        let request = UpdateNodeStatusRequest { node_id, status };
        self.curator.update_node_status(request).await?;
        Ok(())
    }

    /// The transaction that the curator would execute for it.
    async fn raw_update(&mut self) -> Result<()> {
        let value = state::encode_status(self.status());
        let condition = Condition::Unchanged(state::node_key(self.id), self.revision);
        let write = Write::when(condition).put(state::status_key(self.id), value);
        self.etcd.write(write).await?;
        Ok(())
    }

    async fn read(&mut self, allow_stale: bool) -> Result<()> {
        let request = GetNodesRequest {
            node_ids: vec![self.id.to_string()],
            allow_stale,
            ..Default::default()
        };
        let mut answer = self.management.get_nodes(request).await?.into_inner();
        let nodes = answer
            .message()
            .await?
            .context("GetNodes: empty stream")?
            .nodes;
        anyhow::ensure!(
            nodes.len() == 1,
            "GetNodes: expected 1 node, got {}",
            nodes.len()
        );
        // The call is complete only when the caller has received the end of the stream.
        anyhow::ensure!(
            answer.message().await?.is_none(),
            "GetNodes: more than one message"
        );
        Ok(())
    }

    async fn raw_read(&mut self) -> Result<()> {
        let record = self.etcd.get(&state::status_key(self.id)).await?;
        record.map(drop).context("the record does not exist")
    }
}

#[derive(Clone, Copy)]
enum Way {
    Update,
    RawUpdate,
    Read,
    CachedRead,
    RawRead,
    Handshake,
    RawHandshake,
}

const WAYS: [(Way, &str); 7] = [
    (Way::Update, "update"),
    (Way::RawUpdate, "update_etcd"),
    (Way::Read, "read"),
    (Way::RawRead, "read_etcd"),
    (Way::CachedRead, "cached_read"),
    (Way::Handshake, "handshake"),
    (Way::RawHandshake, "handshake_etcd"),
];

/// Calls per second of these concurrent callers.
async fn rate(callers: &mut [Caller], way: Way) -> Result<f64> {
    let begin = Instant::now();
    let calls = callers.iter_mut().map(|caller| async move {
        let mut calls = 0_u32;
        while begin.elapsed() < SPAN {
            one(caller, way).await?;
            calls += 1;
        }
        anyhow::Ok(calls)
    });
    let calls: u32 = try_join_all(calls).await?.into_iter().sum();
    Ok(f64::from(calls) / begin.elapsed().as_secs_f64())
}

async fn one(caller: &mut Caller, way: Way) -> Result<()> {
    match way {
        Way::Update => caller.update().await,
        Way::RawUpdate => caller.raw_update().await,
        Way::Read => caller.read(false).await,
        Way::CachedRead => caller.read(true).await,
        Way::RawRead => caller.raw_read().await,
        Way::Handshake => caller.handshakes.curator().await,
        Way::RawHandshake => caller.handshakes.etcd().await,
    }
}

/// Runs the measurement and reports the results.
pub(crate) async fn run(rounds: usize) -> Result<()> {
    let most = CALLERS[CALLERS.len() - 1];
    let served = Served::start(most, Budget::Unlimited).await?;
    let mut callers = Vec::new();
    for node in &served.nodes[1..=most] {
        let mut caller = Caller::new(&served, node).await?;
        for (way, _) in WAYS {
            one(&mut caller, way).await?;
        }
        callers.push(caller);
    }
    let mut ratios = [const { Vec::new() }; 4];
    let mut rates = vec![Vec::new(); CALLERS.len() * WAYS.len()];
    // The first round is a warm-up and is not counted.
    for round in 0..=rounds {
        eprintln!("round {round} of {rounds}");
        let mut least = [f64::INFINITY; 4];
        for (number, count) in CALLERS.into_iter().enumerate() {
            let mut found = [0.0; WAYS.len()];
            for (place, (way, _)) in WAYS.into_iter().enumerate() {
                found[place] = rate(&mut callers[..count], way).await?;
                if round > 0 {
                    rates[number * WAYS.len() + place].push(found[place]);
                }
            }
            let [
                update,
                raw_update,
                read,
                raw_read,
                cached,
                handshake,
                raw_handshake,
            ] = found;
            let against = [
                update / raw_update,
                read / raw_read,
                cached / raw_read,
                handshake / raw_handshake,
            ];
            for (least, ratio) in least.iter_mut().zip(against) {
                *least = least.min(ratio);
            }
        }
        if round > 0 {
            for (ratios, least) in ratios.iter_mut().zip(least) {
                ratios.push(least);
            }
        }
    }
    for (number, count) in CALLERS.into_iter().enumerate() {
        for (place, (_, name)) in WAYS.into_iter().enumerate() {
            let samples = &rates[number * WAYS.len() + place];
            report(&format!("curator.{name}_rate_{count}"), "1/s", samples);
        }
    }
    let [update, read, cached, handshake] = &ratios;
    report("curator.update_rate_ratio_etcd", "ratio", update);
    report("curator.read_rate_ratio_etcd", "ratio", read);
    report("curator.cached_read_ratio_etcd", "ratio", cached);
    report("curator.handshake_ratio_etcd", "ratio", handshake);
    served.stop().await
}
