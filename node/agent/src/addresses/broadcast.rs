//! Broadcasts this node's signed record on its link, for the case that no node can be reached at
//! its known address, because all addresses have changed at once.
//!
//! A record is one datagram. A new record is sent three times, because datagrams may be lost, and
//! then repeatedly while the node is SPLIT. A node that receives one answers with its own record,
//! so that the later of two nodes finds the earlier one. A disowned node sends nothing. The sender
//! of a datagram is not authenticated: only the signature counts. Only a record that its node has
//! signed is answered, with as many bytes as it has, and answers have a rate limit: whoever sends
//! datagrams with the address of another machine has nothing sent there that he could not send
//! himself.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use hearth_api::identity::NodeId;
use hearth_api::v1::NodeAddress;
use hearth_base::supervisor::{Context, Outcome};
use hearth_host::cluster_state::State;
use prost::Message;
use tokio::net::UdpSocket;
use tokio::time::{MissedTickBehavior, interval};

use super::Worker;
use super::book::{Pace, Source};

/// How often a new record is sent.
const TIMES: u32 = 3;
/// Maximum size of a datagram in bytes. A record is far below, and fits into one packet of usual
/// links.
const LARGEST: usize = 2048;
/// Rate limit for answers: burst, and per second.
const ANSWERS: (f64, f64) = (64.0, 16.0);

/// The destinations of a broadcast from this address: all nodes on its link.
pub fn link(own: IpAddr, port: u16) -> Vec<SocketAddr> {
    match own {
        IpAddr::V4(_) => vec![(Ipv4Addr::BROADCAST, port).into()],
        // Nodes only listen on IPv4 so far.
        IpAddr::V6(_) => Vec::new(),
    }
}

pub(super) async fn run(ctx: Context, worker: Arc<Worker>, own: NodeId) -> Outcome {
    let socket = UdpSocket::bind(worker.listen).await?;
    ctx.healthy();
    ctx.until_cancelled(talk(&worker, &socket, own)).await
}

async fn talk(worker: &Worker, socket: &UdpSocket, own: NodeId) -> Outcome {
    let mut words = worker.book.own().watch();
    let mut states = worker.cluster_state.watch();
    let mut answers = Pace::new(ANSWERS);
    let mut word: Option<NodeAddress> = None;
    let mut left = 0;
    let mut due = interval(worker.each);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut buffer = [0; LARGEST];
    let is = |state| worker.cluster_state.get() == state;
    while !is(State::Disowning) {
        tokio::select! {
            received = socket.recv_from(&mut buffer) => {
                // The error is about a datagram that was sent, not about the socket.
                let Ok((length, from)) = received else { continue };
                let heard = hear(worker, &buffer[..length], own);
                // A datagram from the port that answers are sent from is itself an answer.
                let wants_one = heard && from.port() != worker.port && !is(State::Disowning);
                if wants_one && answers.take() && let Some(word) = &word {
                    let to = SocketAddr::new(from.ip(), worker.port);
                    let sent = socket.send_to(&word.encode_to_vec(), to).await;
                    sent.map_or_else(|error| unsent(to, &error), drop);
                }
            }
            next = words.next() => {
                word = Some(next?);
                left = TIMES;
                due.reset_immediately();
            }
            state = states.next() => drop(state?),
            _ = due.tick() => {
                if let Some(word) = &word && (left > 0 || is(State::Split)) {
                    left = left.saturating_sub(1);
                    broadcast(worker, word).await;
                }
            }
        }
    }
    std::future::pending().await
}

/// Handles one datagram; returns whether it is a record that another node has signed.
fn hear(worker: &Worker, datagram: &[u8], own: NodeId) -> bool {
    let Ok(record) = NodeAddress::decode(datagram) else {
        return false;
    };
    // This node's own records, too: it may have lost its counter.
    let signed = worker.book.store_signed(&record, Source::Unasked);
    signed && record.node_id.parse().is_ok_and(|id: NodeId| id != own)
}

/// Sent from the address in the record, so that it goes to that link.
async fn broadcast(worker: &Worker, word: &NodeAddress) {
    let Ok(own) = word.host.parse::<IpAddr>() else {
        return;
    };
    let socket = UdpSocket::bind((own, 0)).await;
    let socket = socket.and_then(|socket| socket.set_broadcast(true).map(|()| socket));
    for to in (worker.link)(own, worker.port) {
        let sent = match &socket {
            Ok(socket) => socket.send_to(&word.encode_to_vec(), to).await,
            Err(error) => return unsent(to, error),
        };
        sent.map_or_else(|error| unsent(to, &error), drop);
    }
}

/// Logged only: the next datagram may succeed.
fn unsent(to: SocketAddr, error: &std::io::Error) {
    tracing::debug!(%to, %error, "cannot send an address broadcast");
}
