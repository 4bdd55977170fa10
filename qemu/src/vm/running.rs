//! The QEMU process of a machine, from its start to its end.

use std::io;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_process::process::Process;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::exit::{Cause, Exit};
use crate::console::Console;
use crate::qmp::Qmp;
use crate::tpm::Emulator;

/// Bound for reading the rest of QEMU's output after its end, all of which is in buffers already.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(10);

/// The QEMU process; shared by the handle and the task that waits for its end.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) process: Process,
    child: Mutex<Child>,
    /// The TPM, which ends with the machine.
    tpm: Option<Emulator>,
    /// Set before we kill it, so that its end is known to be a power cut.
    cut: AtomicBool,
}

impl Running {
    /// Wraps a child that has just been started.
    pub(super) fn of_child(mut child: Child) -> io::Result<Self> {
        match Process::of_child(child.id()) {
            Ok(process) => Ok(Self {
                process,
                child: Mutex::new(child),
                tpm: None,
                cut: AtomicBool::new(false),
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// The same with a TPM.
    pub(super) fn with_tpm(self, tpm: Option<Emulator>) -> Self {
        Self { tpm, ..self }
    }

    pub(super) fn kill(&self) -> io::Result<()> {
        self.cut.store(true, Ordering::SeqCst);
        self.process.kill()
    }

    /// Reads its exit status, if it has ended; then its TPM has ended, too. Can be called repeatedly.
    pub(super) fn reap(&self) -> io::Result<Option<ExitStatus>> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let status = child.try_wait()?;
        if let (Some(_), Some(tpm)) = (&status, &self.tpm) {
            tpm.end();
        }
        Ok(status)
    }
}

/// On drop, kills the process and waits until it has ended.
#[derive(Debug)]
pub(super) struct KillOnDrop(pub(super) Option<Arc<Running>>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let Some(running) = &self.0 else { return };
        if let Err(error) = running.kill() {
            tracing::warn!(%error, "cannot kill QEMU");
        }
        // Blocks this thread for some milliseconds: only when it has ended are its disks and ports free again.
        if running.process.ended_within(LAST_WORDS) {
            let _ = running.reap();
        }
    }
}

/// Waits for the end and publishes how it ended, once all earlier output has been read.
pub(super) async fn watch_process(
    running: Arc<Running>,
    console: Console,
    qmp: Qmp,
    ended: CancellationToken,
    started: Instant,
    exit: watch::Sender<Option<Exit>>,
) {
    if let Err(error) = running.process.ended().await {
        // Readers of `exit` see that the process is no longer watched.
        tracing::error!(%error, "cannot wait for QEMU");
        return;
    }
    let at = started.elapsed();
    ended.cancel();
    let read = async { tokio::join!(console.ended(), qmp.ended()) };
    if timeout(LAST_WORDS, read).await.is_err() {
        tracing::warn!("did not read all of QEMU's output");
    }
    match running.reap() {
        Ok(Some(status)) => {
            let cut = running.cut.load(Ordering::SeqCst);
            let cause = Cause::of(status, cut, &qmp.last_events());
            exit.send_replace(Some(Exit { cause, status, at }));
        }
        Ok(None) => tracing::error!("QEMU has ended without an exit status"),
        Err(error) => tracing::error!(%error, "cannot wait for QEMU"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::console;
    use crate::qmp::fake;

    /// The end of a process that runs this script, watched like QEMU.
    async fn end_of(script: &str, kill: bool) -> Exit {
        let folder = tempfile::tempdir().expect("a folder");
        let child = Command::new("sh").args(["-c", script]).spawn();
        let running = Arc::new(Running::of_child(child.expect("sh")).expect("its descriptor"));
        let started = Instant::now();
        let (qmp, peer) = fake::connected(folder.path(), fake::SHUTDOWN).await;
        // QEMU's side of the connection ends with QEMU.
        drop(peer);
        let ended = CancellationToken::new();
        let serial = folder.path().join("serial.log");
        std::fs::write(&serial, "its last line\n").expect("a log");
        let (console, follower) =
            console::follow(&serial, started, ended.clone()).expect("a console");
        let (exit_in, exit) = watch::channel(None);
        if kill {
            running.kill().expect("killed");
        }
        let watched = watch_process(running, console, qmp, ended, started, exit_in);
        tokio::join!(follower, watched);
        let exit = exit.borrow().clone();
        exit.expect("its end is told")
    }

    #[tokio::test]
    async fn an_end_is_told_with_its_cause() {
        let exit = end_of("exit 0", false).await;
        assert_eq!(exit.cause, Cause::GuestShutdown, "by QEMU's last event");
        assert_eq!(end_of("exit 3", false).await.cause, Cause::Failed(3));
        let exit = end_of("kill -TERM $$", false).await;
        assert_eq!(exit.cause, Cause::Signal(15));
        assert_eq!(end_of("exec sleep 600", true).await.cause, Cause::PowerCut);
    }

    #[test]
    fn a_guard_that_goes_takes_its_process_along() {
        let child = Command::new("sleep").arg("600").spawn().expect("sleep");
        let running = Arc::new(Running::of_child(child).expect("its descriptor"));
        assert!(running.reap().expect("asked").is_none());
        drop(KillOnDrop(Some(running.clone())));
        assert!(running.reap().expect("asked").is_some());
    }
}
