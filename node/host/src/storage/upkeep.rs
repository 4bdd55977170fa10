//! What the mounted data partition needs while the node runs: the end of a disk that was enlarged is made usable, and the
//! disk is told what is unused.
//!
//! With authenticated encryption the new end has to be wiped before the file system grows into it, which may take hours. The
//! node is a member of its cluster meanwhile. In the other modes the file system has grown when it was mounted.
//!
//! Disks that know which blocks are unused wear less and stay fast. That is told once a week, as distributions do, instead of
//! with each deletion, which would make deletions wait for the disk. The first time is at a random hour of the first day, so
//! that the nodes of a cluster do not do it at once after a power cut.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::console::Report;
use hearth_api::identity::random_bytes;
use hearth_base::event;
use hearth_base::supervisor::{Context, Failure, Outcome, spawn_blocking};

use super::{InUse, OwnedVolume, Progress, StorageBackend, StorageError};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// How often a disk is told what is unused.
pub(crate) const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Prints a line on the console.
pub type Reporter = Arc<dyn Fn(&Report) + Send + Sync>;

/// What this runnable works with.
pub struct Worker<M> {
    /// The data partition.
    pub data: Arc<Mutex<OwnedVolume<M>>>,
    /// Prints on the console.
    pub report: Reporter,
    /// Read: set once the data partition is mounted.
    pub storage: event::Value<InUse>,
}

/// The runnable.
pub async fn run<M: StorageBackend>(ctx: Context, worker: Arc<Worker<M>>) -> Outcome {
    ctx.healthy();
    ctx.until_cancelled(keep(&worker)).await
}

async fn keep<M: StorageBackend>(worker: &Worker<M>) -> Outcome {
    worker.storage.watch().next().await?;
    loop {
        let report = worker.report.clone();
        let mut told = move |progress: Progress| tell(&*report, progress);
        if !worker
            .step(move |data| data.grow_further(&mut told))
            .await?
        {
            break;
        }
    }
    let mut rest = part_of_a_day();
    loop {
        tokio::time::sleep(rest).await;
        match worker.step(OwnedVolume::discard_unused).await? {
            Some(bytes) => {
                tracing::info!(bytes, "told the disk what the data partition does not use")
            }
            // Nor will it be possible in a week.
            None => std::future::pending().await,
        }
        rest = WEEK;
    }
}

/// When a disk is told so for the first time: at random.
pub(crate) fn part_of_a_day() -> Duration {
    DAY.mul_f64(f64::from(u16::from_le_bytes(random_bytes())) / 65536.0)
}

impl<M: StorageBackend> Worker<M> {
    /// Runs a step on a thread that may block.
    async fn step<T: Send + 'static>(
        &self,
        step: impl FnOnce(&mut OwnedVolume<M>) -> Result<T, StorageError> + Send + 'static,
    ) -> Result<T, Failure> {
        let data = self.data.clone();
        let done = spawn_blocking(move || {
            // It has no state that a panic could leave inconsistent.
            let mut data = data.lock().unwrap_or_else(PoisonError::into_inner);
            step(&mut data)
        });
        Ok(done.await??)
    }
}

/// Tells how far a wipe is, on the console and in the log.
pub fn tell(report: &dyn Fn(&Report), progress: Progress) {
    tracing::info!("wiping the data partition: {progress}");
    report(&Report::Wiping(progress.to_string()));
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::StorageSecurity;
    use hearth_base::testing::within_timeout;

    use super::super::testing::Files;
    use super::*;
    use crate::layout::Root;

    #[tokio::test(start_paused = true)]
    async fn the_new_end_is_used_first_and_then_the_disk_is_told_weekly() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::new(directory.path());
        let root = Root::under(directory.path());
        let mut data = OwnedVolume::new(files.clone(), root.data.path().to_owned());
        let volume = super::super::testing::volume(None, 1);
        data.initialise(&volume).unwrap();
        data.make_file_system(&volume, &mut |_| {}).unwrap();
        data.mark_ready(&volume).unwrap();
        data.mount(&volume).unwrap();
        files.grow_in(3);
        let (storage, in_use) = event::value();
        let worker = Worker {
            data: Arc::new(Mutex::new(data)),
            report: Arc::new(|_: &Report| {}),
            storage: in_use,
        };
        let kept = tokio::spawn(async move { keep(&worker).await });
        tokio::time::sleep(DAY).await;
        assert_eq!(files.to_grow(), 3, "it is not known to be mounted yet");
        storage.set(InUse {
            security: StorageSecurity::Insecure,
            cipher: String::new(),
        });
        tokio::time::sleep(DAY + Duration::from_secs(60)).await;
        assert_eq!((files.to_grow(), files.discards()), (0, 1));
        tokio::time::sleep(3 * WEEK).await;
        assert_eq!(files.discards(), 4);
        // A disk that fails is asked again when the runnable is restarted.
        files.fail_after(0);
        tokio::time::sleep(WEEK).await;
        let failure = within_timeout("a failure", kept)
            .await
            .unwrap()
            .unwrap_err();
        assert!(failure.to_string().contains("access the disk"), "{failure}");
    }
}
