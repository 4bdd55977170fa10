//! The watchdog: a hung node reboots.
//!
//! Once armed, the device resets the machine unless it is fed in time. It is
//! fed by whatever proves that the node is alive, and disarmed only on the
//! orderly way down. Dropping a [`Watchdog`] does *not* disarm it: if the core
//! dies, the machine is to reboot.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use hearth_base::supervisor::{Context, Outcome};
use tokio::time::MissedTickBehavior;

use super::raw;

/// The first watchdog of a machine.
pub const DEVICE: &str = "/dev/watchdog";

/// Why the watchdog was not armed or fed.
#[derive(Debug, thiserror::Error)]
#[error("watchdog {device}: cannot {step}")]
pub struct WatchdogError {
    device: PathBuf,
    step: &'static str,
    source: io::Error,
}

/// An armed watchdog.
#[derive(Debug)]
pub struct Watchdog {
    device: PathBuf,
    file: File,
    timeout: Duration,
}

impl Watchdog {
    /// Arms the watchdog, `None` if the machine has none. The time-out is in
    /// whole seconds; see [`Watchdog::timeout`] for what became of it.
    pub fn arm(device: &Path, timeout: Duration) -> Result<Option<Self>, WatchdogError> {
        let failed = |step| {
            let device = device.to_owned();
            move |source| WatchdogError {
                device,
                step,
                source,
            }
        };
        let file = match OpenOptions::new().write(true).open(device) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("arm it")(error)),
        };
        let seconds = timeout.as_secs().clamp(1, u64::from(u32::MAX)) as u32;
        let timeout = match raw::watchdog_timeout(&file, seconds) {
            Ok(seconds) => Duration::from_secs(seconds.into()),
            // Some devices have one time-out; opened it is armed, so it must
            // be fed whatever comes of this.
            Err(error) => {
                tracing::warn!(device = %device.display(), %error, "the watchdog keeps its own time-out");
                timeout
            }
        };
        Ok(Some(Self {
            device: device.to_owned(),
            file,
            timeout,
        }))
    }

    /// The time-out in force.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Grants the node another time-out.
    pub fn feed(&mut self) -> Result<(), WatchdogError> {
        // Any byte but the one that disarms.
        self.write(b"\0", "feed it")
    }

    /// Disarms it. For the orderly way down alone.
    pub fn disarm(mut self) -> Result<(), WatchdogError> {
        self.write(b"V", "disarm it")
    }

    fn write(&mut self, byte: &[u8], step: &'static str) -> Result<(), WatchdogError> {
        self.file.write_all(byte).map_err(|source| WatchdogError {
            device: self.device.clone(),
            step,
            source,
        })
    }
}

/// Feeds the watchdog for as long as the runtime turns, as a runnable.
///
/// A third of the time-out between two meals: one may be late. Cancelled, it
/// feeds once more and leaves the watchdog armed: what follows the core's end
/// has that long to reboot.
pub async fn run(ctx: Context, device: &Path, timeout: Duration) -> Outcome {
    let Some(mut watchdog) = Watchdog::arm(device, timeout)? else {
        tracing::info!("the machine has no watchdog");
        ctx.healthy();
        ctx.done();
        return Ok(());
    };
    let mut meals = tokio::time::interval(watchdog.timeout() / 3);
    meals.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ctx.healthy();
    loop {
        tokio::select! {
            _ = meals.tick() => watchdog.feed()?,
            () = ctx.cancelled() => {
                watchdog.feed()?;
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_one_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let none = Watchdog::arm(&dir.path().join("watchdog"), Duration::from_secs(30));
        assert!(none.unwrap().is_none());
    }

    #[test]
    fn it_is_fed_and_disarmed_by_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("watchdog");
        std::fs::write(&device, b"").unwrap();
        // A file knows no time-outs; the one asked for is then assumed.
        let mut watchdog = Watchdog::arm(&device, Duration::from_secs(30))
            .unwrap()
            .unwrap();
        assert_eq!(watchdog.timeout(), Duration::from_secs(30));
        watchdog.feed().unwrap();
        watchdog.feed().unwrap();
        drop(watchdog);
        assert_eq!(std::fs::read(&device).unwrap(), b"\0\0");
        let watchdog = Watchdog::arm(&device, Duration::from_secs(30)).unwrap();
        watchdog.unwrap().disarm().unwrap();
        assert_eq!(std::fs::read(&device).unwrap()[0], b'V');
    }

    #[test]
    fn one_that_cannot_be_opened_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = Watchdog::arm(dir.path(), Duration::from_secs(30)).unwrap_err();
        assert!(error.to_string().contains("arm it"), "{error}");
    }
}
