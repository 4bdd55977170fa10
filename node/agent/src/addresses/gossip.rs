//! Exchanges address records with other nodes.
//!
//! Requests go to the consensus members, because every node knows them. Each of them gets every new
//! record of this node once. While the node is SPLIT it repeats the exchange with all of them, and
//! with a few of the other nodes: a single response may be enough to reach the cluster again.
//! Otherwise it stops after [`TRIES`] attempts: a member that was away gets the record from the
//! curators later.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::{Curators, Endpoint, Options};
use hearth_api::identity::NodeId;
use hearth_api::tls::{self, ExpectedServer};
use hearth_api::v1::ExchangeAddressesRequest;
use hearth_api::v1::node_local_client::NodeLocalClient;
use hearth_base::supervisor::{Context, Outcome};
use hearth_host::cluster_state::State;
use hearth_host::handover::MemberData;
use rustls::ClientConfig;
use tokio::task::JoinSet;

use super::Worker;
use super::book::{AddressBook, Source};

/// Timeout of one exchange.
const BOUND: Duration = Duration::from_secs(4);
/// Maximum number of concurrent exchanges.
const AT_A_TIME: usize = 8;
/// Number of attempts, unless the node is SPLIT; members that have not answered get the record from
/// the curators.
const TRIES: u32 = 12;
/// Number of other nodes that are asked per interval while the node is SPLIT.
const OTHERS: usize = 4;

pub(super) async fn run(ctx: Context, worker: Arc<Worker>, member: Arc<MemberData>) -> Outcome {
    let trust = tls::node_client_config(&member.own, ExpectedServer::AnyNode)?;
    ctx.healthy();
    ctx.until_cancelled(gossip(&worker, &member, &trust)).await
}

async fn gossip(worker: &Worker, member: &MemberData, trust: &Arc<ClientConfig>) -> Outcome {
    let mut own = worker.book.own().watch();
    let mut states = worker.cluster_state.watch();
    own.next().await?;
    // Nodes that have received this node's newest record.
    let mut told = Vec::new();
    let mut tries = 0;
    let mut turn = 0;
    loop {
        let state = worker.cluster_state.get();
        if state == State::Disowning {
            return std::future::pending().await;
        }
        let is_split = state == State::Split;
        let mut targets = members(worker, member);
        if is_split {
            turn += 1;
            targets.extend(some_others(worker, turn));
        } else {
            targets.retain(|node, _| !told.contains(node));
        }
        let again = is_split || !targets.is_empty() && tries < TRIES;
        if again {
            told.extend(exchange(worker, targets, trust).await);
            tries += 1;
        }
        tokio::select! {
            next = own.next() => {
                next?;
                told.clear();
                tries = 0;
            }
            state = states.next() => drop(state?),
            () = tokio::time::sleep(worker.each), if again => {}
        }
    }
}

/// The known consensus members.
fn members(worker: &Worker, member: &MemberData) -> BTreeMap<NodeId, IpAddr> {
    let directory = worker.directory.get();
    let directory = directory.unwrap_or_else(|| member.directory.clone());
    let members = directory.nodes.iter().filter_map(|node| {
        let id = node.id.parse().ok()?;
        let mut hosts = node.addresses.iter();
        let host = hosts.find_map(|address| address.host.parse().ok())?;
        (id != member.own.node()).then_some((id, host))
    });
    members.collect()
}

/// Some of the nodes with a signed record, different ones each time.
fn some_others(worker: &Worker, turn: usize) -> Vec<(NodeId, IpAddr)> {
    let learned = worker.learned.get().unwrap_or_default();
    let count = learned.len();
    let all = learned.iter().cycle().skip(turn * OTHERS % count.max(1));
    all.take(OTHERS.min(count))
        .map(|(id, located)| (*id, located.host))
        .collect()
}

/// Exchanges records with all targets; returns those that have answered.
async fn exchange(
    worker: &Worker,
    targets: BTreeMap<NodeId, IpAddr>,
    trust: &Arc<ClientConfig>,
) -> Vec<NodeId> {
    let mut waiting = targets.into_iter();
    let mut running = JoinSet::new();
    let mut answered = Vec::new();
    loop {
        while running.len() < AT_A_TIME
            && let Some((node, host)) = waiting.next()
        {
            let endpoint = Endpoint::new(host, worker.port);
            let (book, trust) = (worker.book.clone(), trust.clone());
            running.spawn(async move { ask(book, endpoint, trust).await.then_some(node) });
        }
        match running.join_next().await {
            // A panic is in the log, and counts as no answer.
            Some(outcome) => answered.extend(outcome.ok().flatten()),
            None => return answered,
        }
    }
}

/// The server is verified to be a node of the cluster. Which one does not matter, because the
/// records are signed.
async fn ask(book: Arc<AddressBook>, endpoint: Endpoint, trust: Arc<ClientConfig>) -> bool {
    let options = Options {
        connect_timeout: BOUND,
        call_timeout: BOUND,
        ..Options::default()
    };
    let there = Curators::new(vec![endpoint.clone()], trust, options);
    let addresses = book.records();
    let request = ExchangeAddressesRequest { addresses };
    match NodeLocalClient::new(there.channel())
        .exchange_addresses(request)
        .await
    {
        Ok(answer) => {
            let answer = answer.into_inner().addresses;
            book.store_valid(&answer, Source::Answer).await;
            true
        }
        Err(status) => {
            tracing::debug!(%endpoint, "cannot exchange addresses: {}", status.message());
            false
        }
    }
}
