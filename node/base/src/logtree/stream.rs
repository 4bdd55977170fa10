//! A followed log: a bounded queue between the journal and one reader.
//!
//! The journal never waits for a reader: an entry that does not fit is dropped and counted, and the
//! count is queued exactly where the entries are missing.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::{Entry, Filter};

/// An item of a followed log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// The next entry.
    Entry(Entry),
    /// This many entries that pass the filter were dropped here because the reader was too slow.
    Missed(u64),
}

#[derive(Debug, Default)]
struct Slots {
    items: VecDeque<Item>,
    bytes: usize,
    waker: Option<Waker>,
    /// The log tree is gone; nothing follows.
    ended: bool,
    /// The reader is gone.
    abandoned: bool,
    /// Number of items queued so far; consecutive missed entries are one item.
    put: u64,
}

/// The journal's end of a stream.
#[derive(Debug)]
pub(super) struct Queue {
    slots: Mutex<Slots>,
    filter: Filter,
    max_entries: usize,
    max_bytes: usize,
}

impl Queue {
    pub(super) fn new(filter: Filter, max_entries: usize, max_bytes: usize) -> Arc<Queue> {
        Arc::new(Queue {
            slots: Mutex::default(),
            filter,
            max_entries: max_entries.max(1),
            max_bytes,
        })
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offers an entry. Returns the reader's waker, to be woken when no lock is held any more.
    pub(super) fn offer(&self, entry: &Entry) -> Option<Waker> {
        if !self.filter.matches(entry) {
            return None;
        }
        let mut slots = self.slots();
        if slots.abandoned {
            return None;
        }
        let fits = slots.items.len() < self.max_entries
            && (slots.items.is_empty() || slots.bytes + entry.weight() <= self.max_bytes);
        if fits {
            slots.bytes += entry.weight();
            slots.items.push_back(Item::Entry(entry.clone()));
            slots.put += 1;
        } else if let Some(Item::Missed(count)) = slots.items.back_mut() {
            *count += 1;
        } else {
            slots.items.push_back(Item::Missed(1));
            slots.put += 1;
        }
        slots.waker.take()
    }

    /// Whether the reader is gone.
    pub(super) fn is_abandoned(&self) -> bool {
        self.slots().abandoned
    }

    /// Marks the queue as ended; the reader gets nothing more.
    pub(super) fn end(&self) -> Option<Waker> {
        let mut slots = self.slots();
        slots.ended = true;
        slots.waker.take()
    }

    /// Number of items queued so far.
    pub(super) fn put(&self) -> u64 {
        self.slots().put
    }
}

/// The reader's end of a followed log. Also a [`futures::Stream`].
#[derive(Debug)]
pub struct LogStream {
    pub(super) queue: Arc<Queue>,
}

impl LogStream {
    /// The next item, in order; `None` when the log tree is gone. Cancel safe.
    pub async fn next(&mut self) -> Option<Item> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    /// The next item, if there is one already.
    pub fn try_next(&mut self) -> Option<Item> {
        take(&mut self.queue.slots())
    }

    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Item>> {
        let mut slots = self.queue.slots();
        if let Some(item) = take(&mut slots) {
            return Poll::Ready(Some(item));
        }
        if slots.ended {
            return Poll::Ready(None);
        }
        slots.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

fn take(slots: &mut Slots) -> Option<Item> {
    let item = slots.items.pop_front()?;
    if let Item::Entry(entry) = &item {
        slots.bytes -= entry.weight();
    }
    Some(item)
}

impl futures::Stream for LogStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
        self.poll(context)
    }
}

impl Drop for LogStream {
    fn drop(&mut self) {
        let mut slots = self.queue.slots();
        slots.abandoned = true;
        slots.items = VecDeque::new();
        slots.bytes = 0;
    }
}
