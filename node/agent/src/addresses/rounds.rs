//! Asking others where everybody is, and telling them.
//!
//! Consensus members are whom everyone knows, so they are asked. Each of them
//! is told once of every word of this node. While the cluster is out of reach
//! all of them are asked again and again, and a few of the other nodes: one
//! answer may hold what brings the cluster back. While it is not, that ends
//! after a while: who was away then finds what it missed with the curators.

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
use super::book::{Book, Brought};

/// One exchange may take so long.
const BOUND: Duration = Duration::from_secs(4);
/// So many at a time.
const AT_A_TIME: usize = 8;
/// Whoever has not answered so often is left to the curators.
const TRIES: u32 = 12;
/// Nodes that are asked beside the consensus members while these are silent.
const OTHERS: usize = 4;

pub(super) async fn run(ctx: Context, worker: Arc<Worker>, member: Arc<MemberData>) -> Outcome {
    let trust = tls::node_client_config(
        &member.credentials,
        ExpectedServer::AnyNode,
        tls::wall_clock(),
    )?;
    ctx.healthy();
    ctx.until_cancelled(rounds(&worker, &member, &trust)).await
}

async fn rounds(worker: &Worker, member: &MemberData, trust: &Arc<ClientConfig>) -> Outcome {
    let mut own = worker.book.own().watch();
    let mut states = worker.cluster_state.watch();
    own.next().await?;
    // Who has heard this node's newest word.
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

/// The consensus members, as far as known.
fn members(worker: &Worker, member: &MemberData) -> BTreeMap<NodeId, IpAddr> {
    let directory = worker.directory.get();
    let directory = directory.unwrap_or_else(|| member.directory.clone());
    let members = directory.nodes.iter().filter_map(|node| {
        let id = node.id.parse().ok()?;
        let mut hosts = node.addresses.iter();
        let host = hosts.find_map(|address| address.host.parse().ok())?;
        (id != member.node_id).then_some((id, host))
    });
    members.collect()
}

/// A few of those that are known by their own word, others each turn.
fn some_others(worker: &Worker, turn: usize) -> Vec<(NodeId, IpAddr)> {
    let learned = worker.learned.get().unwrap_or_default();
    let count = learned.len();
    let all = learned.iter().cycle().skip(turn * OTHERS % count.max(1));
    all.take(OTHERS.min(count))
        .map(|(id, located)| (*id, located.host))
        .collect()
}

/// Asks all of these; returns who has answered.
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
            // A panic would be in the log; that one has not answered.
            Some(outcome) => answered.extend(outcome.ok().flatten()),
            None => return answered,
        }
    }
}

/// Whoever answers is a node of the cluster. Which one does not matter: what
/// it says is worth its signatures.
async fn ask(book: Arc<Book>, endpoint: Endpoint, trust: Arc<ClientConfig>) -> bool {
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
            book.take_in(&answer, Brought::Answer).await;
            true
        }
        Err(status) => {
            tracing::debug!(%endpoint, "no exchange of addresses: {}", status.message());
            false
        }
    }
}
