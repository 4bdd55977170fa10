//! Ends a machine, with increasing force.

use std::io;
use std::time::Duration;

use hearth_process::process::Process;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::qmp::Qmp;

/// Interval of pressing the power button: firmware and a kernel that has just started ignore it.
const PRESS_AGAIN: Duration = Duration::from_secs(2);

/// Bound for QEMU to end after `quit`; it takes seconds on a busy host.
const QUIT: Duration = Duration::from_secs(20);

/// The force that was needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// The guest shut down by itself when its power button was pressed, or had ended before.
    Clean,
    /// It did not within the bound, and QEMU got `quit`.
    Quit,
    /// QEMU did not quit either, and was killed.
    Killed,
}

/// Presses the power button, waits for at most `bound`, and then ends QEMU forcibly.
pub(crate) async fn shut_down(
    qmp: &Qmp,
    process: &Process,
    bound: Duration,
) -> io::Result<Shutdown> {
    tokio::select! {
        ended = process.ended() => return ended.map(|()| Shutdown::Clean),
        () = async {
            // Until the bound, even if QEMU does not answer any more: it may be about to end.
            let _ = timeout(bound, press(qmp)).await;
        } => {}
    }
    if process.ended_within(Duration::ZERO) {
        return Ok(Shutdown::Clean);
    }
    order(qmp, "quit").await;
    if let Ok(ended) = timeout(QUIT, process.ended()).await {
        return ended.map(|()| Shutdown::Quit);
    }
    process.kill()?;
    process.ended().await.map(|()| Shutdown::Killed)
}

/// Presses the power button repeatedly, without end.
async fn press(qmp: &Qmp) {
    // A paused machine does not react.
    order(qmp, "cont").await;
    loop {
        order(qmp, "system_powerdown").await;
        sleep(PRESS_AGAIN).await;
    }
}

/// Sends a command. Its failure shows in what follows.
async fn order(qmp: &Qmp, command: &str) {
    if let Err(error) = qmp.execute(command, Value::Null).await {
        tracing::debug!(%error, "cannot send a QMP command during shutdown");
    }
}
