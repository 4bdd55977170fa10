//! A bounded list that one task writes and any number read at their own pace.
//!
//! Console lines, console reports and QMP events all have the same two needs:
//! whoever subscribes late must get what was said before, and nobody's
//! slowness may cost memory or hold up the machine. A broadcast channel gives
//! no backlog, an unbounded list no bound. So entries are numbered and kept in
//! one ring; a subscription is only a number. A reader that falls behind
//! further than the ring reaches goes on at its oldest entry and can tell how
//! many it missed.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

/// How much a journal keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Entries.
    pub(crate) entries: usize,
    /// Their weight together, by [`Weigh`].
    pub(crate) weight: usize,
}

/// What an entry counts towards [`Limits::weight`].
pub(crate) trait Weigh {
    fn weight(&self) -> usize;
}

/// The end that is read. Clones read the same entries.
#[derive(Debug)]
pub(crate) struct Journal<T> {
    shared: Arc<Mutex<Ring<T>>>,
    /// How far it has been written, and whether it will be any further.
    progress: watch::Receiver<Progress>,
}

/// The end that is written; when it goes, readers come to the end.
#[derive(Debug)]
pub(crate) struct Writer<T> {
    shared: Arc<Mutex<Ring<T>>>,
    progress: watch::Sender<Progress>,
    limits: Limits,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// The number that the next entry will bear.
    next: u64,
}

#[derive(Debug)]
struct Ring<T> {
    entries: VecDeque<T>,
    weight: usize,
    /// The number of the oldest entry that is kept.
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

/// No code panics while it holds the lock, and a ring is whole after every
/// step; so a poisoned one is as good as any.
fn lock<T>(shared: &Mutex<Ring<T>>) -> MutexGuard<'_, Ring<T>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Weigh + Clone> Writer<T> {
    /// Adds an entry, and drops the oldest ones if it must.
    pub(crate) fn push(&self, entry: T) {
        let next = {
            let mut ring = lock(&self.shared);
            ring.weight += entry.weight();
            ring.entries.push_back(entry);
            // The newest entry stays, however heavy.
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
    /// Reads from the oldest entry that is kept.
    pub(crate) fn read(&self) -> Cursor<T> {
        Cursor {
            next: lock(&self.shared).first,
            missed: 0,
            journal: self.clone(),
        }
    }

    /// Reads only what is written from now on.
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

    /// Waits until nothing more will be written.
    pub(crate) async fn ended(&self) {
        let mut progress = self.progress.clone();
        while progress.changed().await.is_ok() {}
    }
}

/// A reader's place.
#[derive(Debug)]
pub(crate) struct Cursor<T> {
    journal: Journal<T>,
    next: u64,
    missed: u64,
}

impl<T: Weigh + Clone> Cursor<T> {
    /// The next entry; `None` when there will be no more. Cancel safe.
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
                // The writer is gone; what it wrote last may not be read yet.
                return self.ready();
            }
        }
    }

    /// How many entries were dropped before this reader came to them.
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

        /// Whatever the order of writing and reading: entries come in order,
        /// and each is either read or counted as missed.
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
