//! Nodes on their way to a subscriber: first what there is, then what changes,
//! in pieces that fit into a message.
//!
//! A stream is nothing but a position: the node up to which the backlog was
//! sent, then the version up to which changes were. The next piece is taken
//! from the cache when the subscriber has room for it, and holds each node as
//! it is at that moment. A subscriber that reads slowly therefore misses the
//! steps in between, never the last one, and what it costs does not grow.
//!
//! Each event after the backlog tells up to which revision everything has been
//! sent, so that a subscriber knows how current it is; where nothing happens
//! to its nodes it is told so every few seconds. Where nothing happens at all
//! it is told that, too, though more rarely: silence means a curator that hangs.

use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, stream};
use hearth_api::{identity::NodeId, tls::PeerCertificate, v1::Node};
use prost::Message as _;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::{cache::Moment, core::Core};

/// Bytes of nodes in one message. Receivers take 4 MiB and were promised less
/// than 2; one node has far less than the difference.
const LARGEST_MESSAGE: usize = 1 << 20;
/// The same of a stream that lasts: it keeps a buffer as large as its largest
/// message was.
const LARGEST_WATCH_PIECE: usize = 32 << 10;
/// Nodes that are looked at for one piece.
const NODES_PER_PIECE: usize = 1024;

/// A [`hearth_api::v1::WatchEvent`], byte for byte, whose nodes are encoded
/// already: they were once for all subscribers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EncodedEvent {
    /// See there.
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub nodes: Vec<Bytes>,
    /// See there.
    #[prost(string, repeated, tag = "2")]
    pub tombstones: Vec<String>,
    /// See there.
    #[prost(bool, tag = "3")]
    pub backlog_complete: bool,
    /// See there.
    #[prost(int64, tag = "4")]
    pub progress: i64,
}

/// Where a subscriber is.
enum Position {
    Begin,
    Backlog {
        after: Option<NodeId>,
        /// When the backlog began: what changed since comes again.
        began: Moment,
    },
    Changes(Moment),
    End,
}

/// All nodes or `only` one, for as long as the subscriber listens and belongs
/// to the cluster, and this curator is in touch.
pub fn watch(
    core: Arc<Core>,
    peer: PeerCertificate,
    only: Option<NodeId>,
) -> impl Stream<Item = Result<EncodedEvent, Status>> {
    stream::unfold(
        (core, peer, Position::Begin),
        move |(core, peer, position)| async move {
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
                step = next => step.map(Ok),
            }?;
            Some(match step {
                Ok((event, position)) => (Ok(event), (core, peer, position)),
                Err(status) => (Err(status), (core, peer, Position::End)),
            })
        },
    )
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

/// The backlog of one node: itself, or that it is not there.
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

/// Waits until there are some and it is time to tell, or until it has been
/// quiet for a while and the subscriber is more current than it knows, or until
/// it would have to doubt that anybody is there.
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

/// How many of the first things of these sizes fit into so many bytes; at least
/// one, if there is one.
fn fitting(sizes: impl ExactSizeIterator<Item = usize>, most: usize) -> usize {
    let (count, mut bytes) = (sizes.len(), 0);
    let fit = sizes.take_while(|size| {
        bytes += size;
        bytes <= most
    });
    fit.count().max(1).min(count)
}

/// Nodes of one moment, in pieces. At least one piece, be it empty.
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
