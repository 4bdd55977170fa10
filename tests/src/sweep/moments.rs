//! Moments of two machines that are recorded together: how long both logs were at the same time.
//!
//! What the second machine has written depends on what the first has told it, and the other way round. A cut of the second
//! at one moment and the first as it was at another would be a cluster that never was. So the lengths of both logs are
//! taken again and again, and cuts are made at these moments only. A moment counts if the second log has not grown while
//! the first was looked at: then both lengths belong to one time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};

/// Between two looks: a flush takes an emulated machine longer. There is no event to wait for.
const LOOK_AGAIN: Duration = Duration::from_micros(300);

/// The lengths of two logs at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Moment {
    pub first: u64,
    pub second: u64,
}

/// Takes moments until it is stopped or dropped.
pub(super) struct Clock {
    logs: [PathBuf; 2],
    moments: Arc<Mutex<Vec<Moment>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Clock {
    pub(super) fn start(first: &Path, second: &Path) -> Self {
        let logs = [first.to_owned(), second.to_owned()];
        let (moments, stop) = (Arc::default(), Arc::default());
        let thread = {
            let (logs, moments, stop) = (logs.clone(), Arc::clone(&moments), Arc::clone(&stop));
            thread::spawn(move || take(&logs, &moments, &stop))
        };
        Self {
            logs,
            moments,
            stop,
            thread: Some(thread),
        }
    }

    /// How many moments there have been: what is said now holds at all that follow.
    pub(super) fn count(&self) -> usize {
        lock(&self.moments).len()
    }

    /// All moments, the last one being now.
    ///
    /// # Errors
    /// If a log cannot be read.
    pub(super) fn stop(mut self) -> anyhow::Result<Vec<Moment>> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            let ended = ended.map_err(|_| anyhow!("the thread that takes moments has panicked"))?;
            ended.context("cannot read the lengths of the logs")?;
        }
        let [first, second] = [length(&self.logs[0])?, length(&self.logs[1])?];
        let mut moments = lock(&self.moments);
        moments.push(Moment { first, second });
        Ok(moments.clone())
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Takes a moment whenever the second log has grown.
fn take(logs: &[PathBuf; 2], moments: &Mutex<Vec<Moment>>, stop: &AtomicBool) -> io::Result<()> {
    let mut last = None;
    while !stop.load(Ordering::Relaxed) {
        let second = length(&logs[1])?;
        if last != Some(second) {
            let first = length(&logs[0])?;
            if length(&logs[1])? == second {
                lock(moments).push(Moment { first, second });
                last = Some(second);
            }
        }
        thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

fn length(log: &Path) -> io::Result<u64> {
    Ok(fs::metadata(log)?.len())
}

/// Consistent after a panic: no code that holds the lock can panic.
fn lock(moments: &Mutex<Vec<Moment>>) -> std::sync::MutexGuard<'_, Vec<Moment>> {
    moments.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn moments_follow_the_second_log() {
        let folder = std::env::temp_dir().join(format!("hearth-moments-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [first, second] = ["first", "second"].map(|name| folder.join(name));
        // Never shorter in between.
        let grow = |log: &Path, length: u64| {
            let file = fs::File::options().create(true).append(true).open(log);
            file.unwrap().set_len(length).unwrap();
        };
        grow(&first, 1);
        grow(&second, 1);
        let clock = Clock::start(&first, &second);
        let until = |count: usize| {
            let begun = Instant::now();
            while clock.count() < count {
                assert!(begun.elapsed() < Duration::from_secs(60));
                thread::yield_now();
            }
        };
        until(1);
        grow(&first, 5);
        grow(&second, 2);
        until(2);
        grow(&first, 7);
        let moments = clock.stop().unwrap();
        let last = Moment {
            first: 7,
            second: 2,
        };
        assert_eq!(moments[0].second, 1);
        assert_eq!(moments.last(), Some(&last));
        assert!(
            moments.contains(&Moment {
                first: 5,
                second: 2
            }),
            "{moments:?}"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
}
