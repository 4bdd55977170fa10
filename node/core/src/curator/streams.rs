//! Nodes on their way to a subscriber: first what there is, then what changes,
//! in pieces that fit into a message.
//!
//! A stream is nothing but a position: the node up to which the backlog was
//! sent, then the version up to which changes were. The next piece is taken
//! from the cache when the subscriber has room for it, and holds each node as
//! it is at that moment. A subscriber that reads slowly therefore misses the
//! steps in between, never the last one, and what it costs does not grow.

use std::sync::Arc;

use futures::{Stream, stream};
use hearth_api::{
    identity::NodeId,
    tls::PeerCertificate,
    v1::{Node, WatchEvent},
};
use prost::Message as _;
use tonic::Status;

use super::core::Core;

/// Bytes of nodes in one message. Receivers take 4 MiB and were promised less
/// than 2; one node has far less than the difference. But each stream keeps a
/// buffer as large as its largest message was, as long as it lasts.
const PIECE: usize = 32 << 10;
/// Nodes that are looked at for one piece.
const MOST: usize = 1024;

/// Where a subscriber is.
enum Position {
    Backlog {
        after: Option<NodeId>,
        /// When the backlog began: what changed since comes again.
        version: Option<u64>,
    },
    Changes {
        version: u64,
    },
    End,
}

/// All nodes or `only` one, for as long as the subscriber listens and belongs
/// to the cluster, and this curator is in touch.
pub fn watch(
    core: Arc<Core>,
    peer: PeerCertificate,
    only: Option<NodeId>,
) -> impl Stream<Item = Result<WatchEvent, Status>> {
    let position = match only {
        // The backlog of one node is its change since ever.
        Some(_) => Position::Changes { version: 0 },
        None => Position::Backlog {
            after: None,
            version: None,
        },
    };
    stream::unfold(
        (core, peer, position, only.is_some()),
        move |state| async move {
            let (core, peer, position, first_of_one) = state;
            let next = async {
                match position {
                    Position::End => None,
                    Position::Backlog { after, version } => Some(backlog(&core, after, version)),
                    Position::Changes { version: 0 } if first_of_one => Some(one(&core, only)),
                    Position::Changes { version } => Some(changes(&core, version, only).await),
                }
            };
            let step = tokio::select! {
                biased;
                status = core.end_of_stream(&peer) => Some(Err(status)),
                step = next => step.map(Ok),
            }?;
            Some(match step {
                Ok((event, position)) => (Ok(event), (core, peer, position, false)),
                Err(status) => (Err(status), (core, peer, Position::End, false)),
            })
        },
    )
}

fn backlog(core: &Core, after: Option<NodeId>, version: Option<u64>) -> (WatchEvent, Position) {
    let (nodes, now) = core.cache.nodes_after(after, MOST);
    let version = version.unwrap_or(now);
    let fitting = fitting(&nodes);
    let complete = fitting == nodes.len() && fitting < MOST;
    let nodes: Vec<_> = nodes.into_iter().take(fitting).collect();
    let position = if complete {
        Position::Changes { version }
    } else {
        Position::Backlog {
            // What is in the cache has an ID that parses.
            after: nodes.last().and_then(|node| node.id.parse().ok()),
            version: Some(version),
        }
    };
    let event = WatchEvent {
        nodes,
        tombstones: Vec::new(),
        backlog_complete: complete,
        progress: 0,
    };
    (event, position)
}

/// The backlog of one node: itself, or that it is not there.
fn one(core: &Core, only: Option<NodeId>) -> (WatchEvent, Position) {
    let wanted = only.map(|id| id.to_string()).unwrap_or_default();
    let version = *core.cache.watch().borrow();
    let nodes = core.cache.nodes(|node| node.id == wanted);
    let event = WatchEvent {
        tombstones: if nodes.is_empty() {
            vec![wanted]
        } else {
            Vec::new()
        },
        nodes,
        backlog_complete: true,
        progress: 0,
    };
    (event, Position::Changes { version })
}

/// Waits until there are some, and until it is time to tell.
async fn changes(core: &Core, mut version: u64, only: Option<NodeId>) -> (WatchEvent, Position) {
    let mut news = core.pace.subscribe();
    loop {
        // The sender lives in `core`.
        let _ = news.wait_for(|newest| *newest > version).await;
        let changes = core.cache.changes_since(version, only, MOST, PIECE);
        version = changes.version;
        if !changes.nodes.is_empty() || !changes.tombstones.is_empty() {
            let event = WatchEvent {
                nodes: changes.nodes,
                tombstones: changes.tombstones,
                backlog_complete: false,
                progress: 0,
            };
            return (event, Position::Changes { version });
        }
    }
}

/// How many of the first nodes fit into one message; at least one, if there
/// is one.
fn fitting(nodes: &[Node]) -> usize {
    let mut bytes = 0;
    let fit = nodes.iter().take_while(|node| {
        bytes += node.encoded_len();
        bytes <= PIECE
    });
    fit.count().max(1).min(nodes.len())
}

/// Nodes of one moment, in pieces. At least one piece, be it empty.
pub fn pieces(mut nodes: Vec<Node>) -> Vec<Vec<Node>> {
    let mut pieces = Vec::new();
    loop {
        let rest = nodes.split_off(fitting(&nodes));
        pieces.push(nodes);
        if rest.is_empty() {
            return pieces;
        }
        nodes = rest;
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::Label;
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
