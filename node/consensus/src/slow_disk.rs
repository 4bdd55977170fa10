//! Whether the disk keeps etcd waiting.
//!
//! A member acknowledges an entry when its log is on the disk. If that takes long, a follower is merely late, but a leader
//! is late with everything, and is replaced when it has been silent for the election timeout. The cluster bears that; an
//! operator should know whose disk it is. etcd says so itself, with each synchronisation of its log that has taken longer
//! than a second: the words are those of etcd 3.7. (Its histogram of these times would tell the same later, and would have
//! to be asked for over HTTP.)
//!
//! One of them is no news: so long takes a disk that spins up, or a host with many machines. The report does not change
//! while it holds, as each change is written to etcd's disk.

use std::convert::Infallible;
use std::time::Duration;

use hearth_base::event::{Closed, Watcher, Writer};
use tokio::time::{Instant, timeout};

/// etcd's message.
const WORDS: &str = "slow fdatasync";
/// So many within [`WINDOW`] are reported.
const MANY: usize = 3;
const WINDOW: Duration = Duration::from_secs(60);
/// The report ends when there was none for this long.
const QUIET: Duration = Duration::from_secs(120);

/// The disk keeps etcd waiting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the disk is slow: etcd has waited for it for more than a second, {} times within {} seconds (etcd: {words}). While this \
     member leads, the cluster is as slow as its disk. Give the node a faster one, or remove the role consensus-member",
    MANY, WINDOW.as_secs()
)]
pub struct SlowDisk {
    /// How etcd said it.
    pub words: String,
}

/// Whether one of etcd's log lines says that it has waited for its disk.
pub(crate) fn says(line: &str) -> bool {
    line.starts_with(WORDS)
}

/// The next line; of several at once the last.
async fn next(said: &mut Watcher<String>) -> String {
    match said.next().await {
        Ok(line) => line,
        // etcd has closed its output: it is about to end.
        Err(Closed) => std::future::pending().await,
    }
}

/// Reports a slow disk, and its end, from the lines for which [`says`] is true.
pub(crate) async fn keep(
    mut said: Watcher<String>,
    report: &Writer<Option<SlowDisk>>,
) -> Infallible {
    let mut recent: Vec<Instant> = Vec::new();
    loop {
        let words = next(&mut said).await;
        let now = Instant::now();
        recent.retain(|at| now.duration_since(*at) < WINDOW);
        recent.push(now);
        if recent.len() < MANY {
            continue;
        }
        recent.clear();
        let slow = SlowDisk { words };
        tracing::warn!("{slow}");
        report.set(Some(slow));
        while timeout(QUIET, next(&mut said)).await.is_ok() {}
        tracing::info!("the disk has not kept etcd waiting for {QUIET:?}");
        report.set(None);
    }
}

#[cfg(test)]
mod tests {
    use hearth_base::event;

    use super::*;

    const LINE: &str = "slow fdatasync expected-duration=1s took=1.8s";

    /// Lets the task of [`keep`] run, and some time pass.
    async fn after(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_is_slow_that_is_so_again_and_again() {
        let (lines, said) = event::value();
        let (writer, report) = event::value();
        let task = tokio::spawn(async move { keep(said.watch(), &writer).await });
        let note = |line: &str| {
            if says(line) {
                lines.set(line.to_owned());
            }
        };
        let is_slow = || report.get().flatten().is_some();
        // Three, but not within a minute; and other lines.
        for _ in 0..3 {
            note(LINE);
            note("apply request took too long took=2s");
            after(31).await;
            assert!(!is_slow());
        }
        after(60).await;
        for _ in 0..3 {
            assert!(!is_slow());
            note(LINE);
            after(5).await;
        }
        let first = report.get().flatten().expect("a report");
        assert!(first.to_string().contains(LINE), "{first}");
        // It holds while there are more, and does not change.
        for _ in 0..5 {
            note("slow fdatasync expected-duration=1s took=9s");
            after(100).await;
            assert_eq!(report.get().flatten().as_ref(), Some(&first));
        }
        after(21).await;
        assert!(!is_slow());
        // Another time.
        note(LINE);
        after(1).await;
        assert!(!is_slow());
        task.abort();
    }
}
