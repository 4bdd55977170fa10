//! One's own word to the whole link, for the case that nobody is where anybody
//! thinks: when all addresses have changed at once, nobody could be asked.
//!
//! A word is one datagram. It is sent when it is new, a few times, for
//! datagrams get lost, and again and again while the cluster is out of reach.
//! Whoever hears one answers with its own, so that the later of two finds the
//! earlier. Who is disowned says nothing any more. Datagrams have no sender worth the name: what is in them is worth
//! its signature, and the answers have a pace.

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
use super::book::{Brought, Pace};

/// How often a new word is sent.
const TIMES: u32 = 3;
/// Bytes. A word is well below, and so is what a link carries in one piece.
const LARGEST: usize = 2048;
/// Answers: at once, and for each second.
const ANSWERS: (f64, f64) = (64.0, 16.0);

/// Who hears an announcement of a node at this address: all on its link.
pub fn link(own: IpAddr, port: u16) -> Vec<SocketAddr> {
    match own {
        IpAddr::V4(_) => vec![(Ipv4Addr::BROADCAST, port).into()],
        // Nodes serve IPv4 only, so far.
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
                // An error is of one datagram that was sent, not of the socket.
                let Ok((length, from)) = received else { continue };
                let heard = hear(worker, &buffer[..length], own).await;
                // What comes from where answers are sent from is one itself.
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
                    announce(worker, word).await;
                }
            }
        }
    }
    std::future::pending().await
}

/// Takes in one datagram; tells whether it is one of another node.
async fn hear(worker: &Worker, datagram: &[u8], own: NodeId) -> bool {
    let Ok(record) = NodeAddress::decode(datagram) else {
        return false;
    };
    let of_another = record.node_id.parse().is_ok_and(|id: NodeId| id != own);
    // Of one that has forgotten what it said before, too.
    worker.book.take_in(&[record], Brought::Unasked).await;
    of_another
}

/// Sent from the address that it is about, which is the link that it is about.
async fn announce(worker: &Worker, word: &NodeAddress) {
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

/// The next one may go through.
fn unsent(to: SocketAddr, error: &std::io::Error) {
    tracing::debug!(%to, %error, "an announcement was not sent");
}
