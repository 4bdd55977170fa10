//! A bounded list with one writer and any number of independent readers.
//!
//! Console lines, console reports and QMP events have the same two requirements: a late subscriber must get what was
//! written before, and a slow reader must neither use up memory nor block the machine. A broadcast channel has no
//! backlog, an unbounded list no bound. So entries are numbered and kept in one ring; a subscription is only a number.
//! A reader that falls behind the ring continues at its oldest entry and can tell how many entries it missed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Limits of a journal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Number of entries.
    pub(crate) entries: usize,
    /// Their total weight, by [`Weigh`].
    pub(crate) weight: usize,
}

/// The weight of an entry for [`Limits::weight`].
pub(crate) trait Weigh {
    fn weight(&self) -> usize;
}

/// The reading end. Clones read the same entries.
#[derive(Debug)]
pub(crate) struct Journal<T> {
    shared: Arc<Mutex<Ring<T>>>,
    /// The number of written entries, and whether there will be more.
    progress: watch::Receiver<Progress>,
}

/// The writing end; when it is dropped, readers come to the end.
#[derive(Debug)]
pub(crate) struct Writer<T> {
    shared: Arc<Mutex<Ring<T>>>,
    progress: watch::Sender<Progress>,
    limits: Limits,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// The number of the next entry.
    next: u64,
}

#[derive(Debug)]
struct Ring<T> {
    entries: VecDeque<T>,
    weight: usize,
    /// The number of the oldest kept entry.
    first: u64,
}

pub(crate) fn journal<T: Weigh + Clone>(limits: Limits) -> (Writer<T>, Journal<T>) {
    let shared = Arc::new(Mutex::new(Ring {
        entries: VecDeque::new(),
        weight: 0,
        first: 0,
    }));
    let (sender, progress) = watch::channel(Progress::default());
    let writer = Writer {
        shared: shared.clone(),
        progress: sender,
        limits,
    };
    (writer, Journal { shared, progress })
}

/// No code panics while it holds the lock, and a ring is consistent after every step; so a poisoned lock can be used.
fn lock<T>(shared: &Mutex<Ring<T>>) -> MutexGuard<'_, Ring<T>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Weigh + Clone> Writer<T> {
    /// Adds an entry, and drops the oldest ones if necessary.
    pub(crate) fn push(&self, entry: T) {
        let next = {
            let mut ring = lock(&self.shared);
            ring.weight += entry.weight();
            ring.entries.push_back(entry);
            // The newest entry is kept, whatever its weight.
            while ring.entries.len() > 1
                && (ring.entries.len() > self.limits.entries || ring.weight > self.limits.weight)
            {
                if let Some(oldest) = ring.entries.pop_front() {
                    ring.weight -= oldest.weight();
                    ring.first += 1;
                }
            }
            ring.first + ring.entries.len() as u64
        };
        self.progress.send_replace(Progress { next });
    }
}

impl<T> Clone for Journal<T> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
            progress: self.progress.clone(),
        }
    }
}

impl<T: Weigh + Clone> Journal<T> {
    /// Reads from the oldest kept entry on.
    pub(crate) fn read(&self) -> Cursor<T> {
        Cursor {
            next: lock(&self.shared).first,
            missed: 0,
            journal: self.clone(),
        }
    }

    /// Reads only future entries.
    pub(crate) fn read_new(&self) -> Cursor<T> {
        Cursor {
            next: {
                let ring = lock(&self.shared);
                ring.first + ring.entries.len() as u64
            },
            missed: 0,
            journal: self.clone(),
        }
    }

    /// The last `count` entries, oldest first.
    pub(crate) fn last(&self, count: usize) -> Vec<T> {
        let ring = lock(&self.shared);
        let skip = ring.entries.len().saturating_sub(count);
        ring.entries.iter().skip(skip).cloned().collect()
    }

    /// Waits until no more entries will be written.
    pub(crate) async fn ended(&self) {
        let mut progress = self.progress.clone();
        while progress.changed().await.is_ok() {}
    }
}

/// A reader's position.
#[derive(Debug)]
pub(crate) struct Cursor<T> {
    journal: Journal<T>,
    next: u64,
    missed: u64,
}

impl<T: Weigh + Clone> Cursor<T> {
    /// The next entry; `None` at the end. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<T> {
        loop {
            if let Some(entry) = self.ready() {
                return Some(entry);
            }
            let next = self.next;
            let waited = self
                .journal
                .progress
                .wait_for(|progress| progress.next > next)
                .await
                .map(drop);
            if waited.is_err() {
                // The writer is gone; its last entries may not have been read yet.
                return self.ready();
            }
        }
    }

    /// Number of entries that were dropped before this reader read them.
    pub(crate) fn missed(&self) -> u64 {
        self.missed
    }

    fn ready(&mut self) -> Option<T> {
        let ring = lock(&self.journal.shared);
        if self.next < ring.first {
            self.missed += ring.first - self.next;
            self.next = ring.first;
        }
        let index = usize::try_from(self.next - ring.first).ok()?;
        let entry = ring.entries.get(index)?.clone();
        self.next += 1;
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Weigh for u64 {
        fn weight(&self) -> usize {
            1
        }
    }

    const FEW: Limits = Limits {
        entries: 4,
        weight: usize::MAX,
    };

    #[tokio::test]
    async fn late_readers_get_the_backlog_and_then_the_end() {
        let (writer, journal) = journal(FEW);
        writer.push(1u64);
        writer.push(2);
        let mut cursor = journal.read();
        let mut news = journal.read_new();
        assert_eq!(cursor.next().await, Some(1));
        writer.push(3);
        drop(writer);
        assert_eq!(cursor.next().await, Some(2));
        assert_eq!(cursor.next().await, Some(3));
        assert_eq!(cursor.next().await, None);
        assert_eq!(cursor.next().await, None);
        assert_eq!(news.next().await, Some(3));
        assert_eq!(news.next().await, None);
        assert_eq!(journal.last(2), [2, 3]);
        journal.ended().await;
    }

    #[tokio::test]
    async fn a_reader_that_waits_is_woken() {
        let (writer, journal) = journal(FEW);
        let reader = tokio::spawn(async move { journal.read().next().await });
        tokio::task::yield_now().await;
        writer.push(7u64);
        assert_eq!(reader.await.expect("no panic"), Some(7));
    }

    struct Heavy(usize);

    impl Weigh for Heavy {
        fn weight(&self) -> usize {
            self.0
        }
    }

    impl Clone for Heavy {
        fn clone(&self) -> Self {
            Self(self.0)
        }
    }

    #[test]
    fn weight_is_bounded_and_the_newest_stays() {
        let (writer, journal) = journal(Limits {
            entries: 100,
            weight: 10,
        });
        for weight in [4, 4, 4, 50] {
            writer.push(Heavy(weight));
        }
        assert_eq!(
            journal
                .last(10)
                .iter()
                .map(|heavy| heavy.0)
                .collect::<Vec<_>>(),
            [50]
        );
        writer.push(Heavy(1));
        assert_eq!(journal.last(10).len(), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// In any order of writing and reading: entries arrive in order, and each is either read or counted as missed.
        #[test]
        fn nothing_is_lost_uncounted(steps in proptest::collection::vec(any::<bool>(), 0..60)) {
            let (writer, journal) = journal(FEW);
            let mut cursor = journal.read();
            let (mut written, mut seen) = (0u64, 0u64);
            for write in steps {
                if write {
                    writer.push(written);
                    written += 1;
                } else if let Some(entry) = cursor.ready() {
                    seen += 1;
                    prop_assert_eq!(entry + 1, seen + cursor.missed());
                }
            }
            while cursor.ready().is_some() {
                seen += 1;
            }
            prop_assert_eq!(seen + cursor.missed(), written);
        }
    }
}
