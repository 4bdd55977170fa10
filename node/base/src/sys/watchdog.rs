//! Keeps the hardware watchdog from biting while the core is alive.
//!
//! The kernel's device bites when nobody has written to it for its bound. One
//! runnable of the core writes; if the core hangs, so does the writing. The
//! magic close (`V`) that would disarm the device is written only when the
//! runnable is told to stop, that is when the machine goes down in order: a
//! core that dies leaves the watchdog armed for the case that PID 1 fails as
//! well.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use crate::supervisor::{Context, Outcome};

const DEVICE: &str = "/dev/watchdog";
const BOUND: &str = "/sys/class/watchdog/watchdog0/timeout";
/// Of the drivers' defaults the shortest, for a kernel that does not tell.
const USUAL_BOUND: Duration = Duration::from_secs(15);

/// Feeds the watchdog, if the machine has one.
pub async fn run(ctx: Context) -> Outcome {
    let device = fs::OpenOptions::new()
        .write(true)
        .custom_flags(rustix::fs::OFlags::CLOEXEC.bits().cast_signed())
        .open(DEVICE);
    let mut device = match device {
        Ok(device) => device,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            tracing::info!("this machine has no watchdog");
            ctx.healthy();
            ctx.done();
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let bound = fs::read_to_string(BOUND).ok();
    let bound = bound
        .and_then(|text| text.trim().parse().ok())
        .map_or(USUAL_BOUND, Duration::from_secs);
    tracing::info!(seconds = bound.as_secs(), "the watchdog is armed");
    ctx.healthy();
    // A third: two writes may be late before it bites.
    let mut beat = tokio::time::interval(bound / 3);
    loop {
        tokio::select! {
            _ = beat.tick() => device.write_all(b"\0")?,
            () = ctx.cancelled() => {
                device.write_all(b"V")?;
                return Ok(());
            }
        }
    }
}
