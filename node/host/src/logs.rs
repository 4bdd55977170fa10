//! Reads the log tree for the gRPC services: in chunks of bounded size, with the number of entries
//! that a slow reader has missed.

use std::collections::VecDeque;

use futures::Stream;
use hearth_base::logtree::{Entry, Item, LogStream, LogTree, Query};

/// Maximum number of entries in one chunk.
const MAX_ENTRIES: usize = 256;
/// Maximum size of the messages in one chunk, in bytes; the last entry may exceed it. Far below the
/// size limit of a gRPC message.
const MAX_MESSAGE_BYTES: usize = 256 << 10;

/// A chunk of the log.
#[derive(Debug, Default)]
pub struct Piece {
    /// The entries, oldest first.
    pub entries: Vec<Entry>,
    /// How many entries after these were dropped because the reader was too slow.
    pub missed: u64,
}

/// Reads the entries that match the query. The first chunk is sent at once, even if it is empty, so
/// that the reader knows that its request was accepted.
pub fn read(log_tree: &LogTree, query: Query) -> impl Stream<Item = Piece> + Send + use<> {
    let reader = log_tree.read(query);
    let reading = Reading {
        backlog: reader.backlog.into(),
        stream: reader.stream,
        begun: false,
    };
    futures::stream::unfold(reading, |mut reading| async {
        let piece = reading.next().await?;
        Some((piece, reading))
    })
}

struct Reading {
    backlog: VecDeque<Entry>,
    stream: Option<LogStream>,
    begun: bool,
}

impl Reading {
    async fn next(&mut self) -> Option<Piece> {
        let mut piece = Piece::default();
        let mut room = MAX_MESSAGE_BYTES;
        while let Some(entry) = self.backlog.pop_front() {
            if !piece.push(entry, &mut room) {
                break;
            }
        }
        if !std::mem::replace(&mut self.begun, true) || !piece.entries.is_empty() {
            return Some(piece);
        }
        let stream = self.stream.as_mut()?;
        let mut item = Some(stream.next().await?);
        while let Some(next) = item {
            match next {
                Item::Entry(entry) => {
                    let there_is_room = piece.push(entry, &mut room);
                    item = match there_is_room {
                        true => stream.try_next(),
                        false => None,
                    };
                }
                Item::Missed(count) => {
                    piece.missed = count;
                    break;
                }
            }
        }
        Some(piece)
    }
}

impl Piece {
    /// Adds an entry and returns whether another one fits.
    fn push(&mut self, entry: Entry, room: &mut usize) -> bool {
        let weight = entry.dn.len() + entry.message.len();
        self.entries.push(entry);
        *room = room.saturating_sub(weight);
        *room > 0 && self.entries.len() < MAX_ENTRIES
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use hearth_base::logtree::{Options, Severity};

    use super::*;

    fn tree(stream_entries: usize) -> LogTree {
        LogTree::new(Options {
            stream_entries,
            ..Options::default()
        })
    }

    #[tokio::test]
    async fn a_long_backlog_comes_in_pieces_and_whole() {
        let tree = tree(16);
        let text = "x".repeat(10_000);
        for n in 0..100 {
            tree.append_raw("a", Severity::Info, &format!("{n} {text}"));
        }
        let pieces: Vec<Piece> = read(&tree, Query::exact("a")).collect().await;
        assert!(pieces.len() > 1);
        let weight = |piece: &Piece| piece.entries.iter().map(|e| e.message.len()).sum::<usize>();
        assert!(
            pieces
                .iter()
                .all(|piece| weight(piece) < MAX_MESSAGE_BYTES + 20_000)
        );
        let entries: Vec<_> = pieces.into_iter().flat_map(|piece| piece.entries).collect();
        assert_eq!(entries.len(), 100);
        assert!(entries.is_sorted_by_key(|entry| entry.sequence));
    }

    #[tokio::test]
    async fn a_slow_reader_hears_how_much_it_missed() {
        let tree = tree(4);
        let query = Query {
            follow: true,
            ..Query::subtree("")
        };
        let mut pieces = Box::pin(read(&tree, query));
        assert!(pieces.next().await.unwrap().entries.is_empty());
        for n in 0..10 {
            tree.append_raw("a", Severity::Info, &n.to_string());
        }
        let piece = pieces.next().await.unwrap();
        assert_eq!((piece.entries.len(), piece.missed), (4, 6));
        tree.append_raw("a", Severity::Info, "again");
        assert_eq!(pieces.next().await.unwrap().entries.len(), 1);
        drop(tree);
        assert!(pieces.next().await.is_none());
    }
}
