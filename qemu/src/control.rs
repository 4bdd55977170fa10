//! Ending a machine, step by step harder.

use std::{io, time::Duration};

use hearth_process::process::Process;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::qmp::Qmp;

/// The power button is pressed again this often: firmware and a kernel that
/// has just begun do not notice it.
const PRESS_AGAIN: Duration = Duration::from_secs(2);

/// How long QEMU may take to end once it is told to; seconds on a busy host.
const QUIT: Duration = Duration::from_secs(20);

/// How far one had to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// The guest went down by itself when its power button was pressed, or
    /// had ended before.
    Clean,
    /// It did not within the bound, and QEMU was told to quit.
    Quit,
    /// QEMU did not quit either, and was killed.
    Killed,
}

/// Presses the power button, waits for at most `bound`, and then ends QEMU
/// all the same.
pub(crate) async fn shut_down(
    qmp: &Qmp,
    process: &Process,
    bound: Duration,
) -> io::Result<Shutdown> {
    tokio::select! {
        ended = process.ended() => return ended.map(|()| Shutdown::Clean),
        () = async {
            // Until the bound, also when QEMU does not answer any more: it
            // may be just ending.
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

/// Presses the power button for ever.
async fn press(qmp: &Qmp) {
    // A machine that stands still hears nothing.
    order(qmp, "cont").await;
    loop {
        order(qmp, "system_powerdown").await;
        sleep(PRESS_AGAIN).await;
    }
}

/// Gives an order. That it was not taken shows in what follows.
async fn order(qmp: &Qmp, command: &str) {
    if let Err(error) = qmp.execute(command, Value::Null).await {
        tracing::debug!(%error, "while a machine is being shut down");
    }
}
