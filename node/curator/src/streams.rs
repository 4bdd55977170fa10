//! Streams of nodes to subscribers: first the backlog, then changes, in messages of bounded size.
//!
//! The only state of a stream is a position: the node up to which the backlog was sent, then the
//! version up to which changes were sent. The next message is built from the cache when the
//! subscriber can receive it, and has the latest state of each node. So a slow subscriber misses
//! intermediate states, but never the last one, and its cost is bounded.
//!
//! Each event after the backlog contains the revision up to which all changes have been sent, so
//! that a subscriber knows how current it is. While its nodes do not change, it is sent a new
//! revision every few seconds. While nothing changes at all, it is still sent events, less often:
//! without events for longer than that, the curator hangs.

use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, stream};
use hearth_api::identity::NodeId;
use hearth_api::tls::PeerCertificate;
use hearth_api::v1::Node;
use prost::Message as _;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::budget::Slot;
use super::cache::Moment;
use super::core::Core;

/// Bytes of nodes in one message. Receivers accept 4 MiB, and the API promises less than 2 MiB; one
/// node is far smaller than the difference.
const LARGEST_MESSAGE: usize = 1 << 20;
/// The same for a watch, which lasts: its buffer stays as large as its largest message.
const LARGEST_WATCH_PIECE: usize = 32 << 10;
/// Maximum number of nodes in one message.
const NODES_PER_PIECE: usize = 1024;

/// A message with the encoding of [`hearth_api::v1::WatchEvent`], whose nodes are encoded already,
/// once for all subscribers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EncodedEvent {
    /// `WatchEvent.nodes`, encoded.
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub nodes: Vec<Bytes>,
    /// `WatchEvent.tombstones`.
    #[prost(string, repeated, tag = "2")]
    pub tombstones: Vec<String>,
    /// `WatchEvent.backlog_complete`.
    #[prost(bool, tag = "3")]
    pub backlog_complete: bool,
    /// `WatchEvent.progress`.
    #[prost(int64, tag = "4")]
    pub progress: i64,
}

/// The position of a subscriber.
enum Position {
    Begin,
    Backlog {
        after: Option<NodeId>,
        /// When the backlog began: changes since then are sent after it.
        began: Moment,
    },
    Changes(Moment),
    End,
}

/// A stream of all nodes, or of `only` one. It ends when the subscriber cancels it or is not a
/// member any more, when it has lost its slot, or when this curator is stale.
pub fn watch(
    core: Arc<Core>,
    peer: PeerCertificate,
    slot: Option<Slot>,
    only: Option<NodeId>,
) -> impl Stream<Item = Result<EncodedEvent, Status>> {
    stream::unfold(
        (core, peer, slot, Position::Begin),
        move |(core, peer, slot, position)| async move {
            let next = async {
                Some(match position {
                    Position::End => return None,
                    Position::Begin => match only {
                        Some(only) => one(&core, only),
                        None => backlog(&core, None, core.cache.moment()),
                    },
                    Position::Backlog { after, began } => backlog(&core, after, began),
                    Position::Changes(told) => changes(&core, told, only).await,
                })
            };
            let step = tokio::select! {
                biased;
                status = core.end_of_stream(&peer) => Some(Err(status)),
                status = replaced(slot.as_ref()) => Some(Err(status)),
                step = next => step.map(Ok),
            }?;
            Some(match step {
                Ok((event, position)) => (Ok(event), (core, peer, slot, position)),
                Err(status) => (Err(status), (core, peer, slot, Position::End)),
            })
        },
    )
}

/// Waits until the node has opened more streams than it may have. An operator's stream has no slot.
async fn replaced(slot: Option<&Slot>) -> Status {
    match slot {
        Some(slot) => slot.replaced().await,
        None => std::future::pending().await,
    }
}

fn backlog(core: &Core, after: Option<NodeId>, began: Moment) -> (EncodedEvent, Position) {
    let nodes = core.cache.nodes_after(after, NODES_PER_PIECE);
    let fitting = fitting(
        nodes.iter().map(|(_, node)| node.len()),
        LARGEST_WATCH_PIECE,
    );
    let complete = fitting == nodes.len() && fitting < NODES_PER_PIECE;
    let position = if complete {
        Position::Changes(began)
    } else {
        Position::Backlog {
            after: nodes.get(fitting.saturating_sub(1)).map(|(id, _)| *id),
            began,
        }
    };
    let nodes = nodes.into_iter().take(fitting);
    let event = EncodedEvent {
        nodes: nodes.map(|(_, node)| node).collect(),
        tombstones: Vec::new(),
        backlog_complete: complete,
        progress: if complete { began.revision } else { 0 },
    };
    (event, position)
}

/// The backlog of a stream of one node: the node, or a tombstone if it does not exist.
fn one(core: &Core, only: NodeId) -> (EncodedEvent, Position) {
    let began = core.cache.moment();
    let node = core.cache.encoded(only);
    let event = EncodedEvent {
        tombstones: match node {
            Some(_) => Vec::new(),
            None => vec![only.to_string()],
        },
        nodes: node.into_iter().collect(),
        backlog_complete: true,
        progress: began.revision,
    };
    (event, Position::Changes(began))
}

/// Waits for an announced change. Without one, returns an event without nodes after the quiet
/// period if there is a newer revision, and in any case after [`Timing::mark`](super::Timing).
async fn changes(core: &Core, mut told: Moment, only: Option<NodeId>) -> (EncodedEvent, Position) {
    let mut news = core.pace.subscribe();
    let progress = told.revision;
    let mut quiet_until = Instant::now() + core.timing.quiet;
    let mark_at = Instant::now() + core.timing.mark;
    loop {
        // The sender lives in `core`.
        let announced = news.wait_for(|newest| *newest > told.version);
        let _ = timeout_at(quiet_until, announced).await;
        let changes =
            core.cache
                .changes_since(told.version, only, NODES_PER_PIECE, LARGEST_WATCH_PIECE);
        told.version = changes.version;
        told.revision = changes.complete.unwrap_or(progress).max(progress);
        let is_quiet = changes.nodes.is_empty() && changes.tombstones.is_empty();
        let now = Instant::now();
        let is_due = now >= quiet_until;
        if !is_quiet || (is_due && (told.revision > progress || now >= mark_at)) {
            let event = EncodedEvent {
                nodes: changes.nodes,
                tombstones: changes.tombstones,
                backlog_complete: false,
                progress: told.revision,
            };
            return (event, Position::Changes(told));
        }
        if is_due {
            quiet_until = Instant::now() + core.timing.quiet;
        }
    }
}

/// How many of the first items with these sizes fit into `most` bytes; at least one, if there is
/// one.
fn fitting(sizes: impl ExactSizeIterator<Item = usize>, most: usize) -> usize {
    let (count, mut bytes) = (sizes.len(), 0);
    let fit = sizes.take_while(|size| {
        bytes += size;
        bytes <= most
    });
    fit.count().max(1).min(count)
}

/// Splits nodes into messages. Returns at least one, which may be empty.
pub fn pieces(mut nodes: Vec<Node>) -> Vec<Vec<Node>> {
    let mut pieces = Vec::new();
    loop {
        let sizes = nodes.iter().map(|node| node.encoded_len());
        let rest = nodes.split_off(fitting(sizes, LARGEST_MESSAGE));
        pieces.push(nodes);
        if rest.is_empty() {
            return pieces;
        }
        nodes = rest;
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::{Label, WatchEvent};
    use proptest::prelude::*;

    use super::*;

    fn node(bytes: usize) -> Node {
        Node {
            labels: vec![Label {
                key: "x".repeat(bytes),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn an_encoded_event_is_an_event() {
        let event = WatchEvent {
            nodes: vec![node(3), node(0), node(300)],
            tombstones: vec!["a".into(), "b".into()],
            backlog_complete: true,
            progress: -7,
        };
        let encoded = EncodedEvent {
            nodes: event
                .nodes
                .iter()
                .map(|n| n.encode_to_vec().into())
                .collect(),
            tombstones: event.tombstones.clone(),
            backlog_complete: event.backlog_complete,
            progress: event.progress,
        };
        assert_eq!(encoded.encode_to_vec(), event.encode_to_vec());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn pieces_fit_and_lose_nothing(sizes in prop::collection::vec(0_usize..400_000, 0..12)) {
            let nodes: Vec<_> = sizes.iter().map(|size| node(*size)).collect();
            let pieces = pieces(nodes.clone());
            prop_assert!(!pieces.is_empty());
            for piece in &pieces {
                let bytes: usize = piece.iter().map(|n| n.encoded_len() + 8).sum();
                prop_assert!(bytes < 2 << 20);
            }
            prop_assert_eq!(pieces.concat(), nodes);
        }
    }
}
