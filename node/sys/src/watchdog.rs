//! The hardware watchdog: reboots a node that hangs.
//!
//! Once armed, the device resets the machine unless it is fed in time. It is fed as long as the
//! core's runtime makes progress, and disarmed only on an orderly shutdown. Dropping a [`Watchdog`]
//! does *not* disarm it: if the core dies, the machine must reboot.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_base::supervisor::{Context, Outcome};
use tokio::time::MissedTickBehavior;

use super::raw;

/// The first watchdog of the machine.
pub const DEVICE: &str = "/dev/watchdog";

/// Why the watchdog cannot be armed, fed or disarmed.
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
    /// Arms the watchdog; `None` if the machine has none. The timeout is in whole seconds;
    /// [`Watchdog::timeout`] returns the one that is in effect.
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
            // Some devices have a fixed timeout. Opening the device has armed it, so it must be fed
            // in any case.
            Err(error) => {
                tracing::warn!(device = %device.display(), %error, "cannot set the watchdog timeout; the device keeps its own");
                timeout
            }
        };
        Ok(Some(Self {
            device: device.to_owned(),
            file,
            timeout,
        }))
    }

    /// The timeout in effect.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Restarts the timeout.
    pub fn feed(&mut self) -> Result<(), WatchdogError> {
        // Any byte except the one that disarms.
        self.write(b"\0", "feed it")
    }

    /// Disarms the watchdog. Only for an orderly shutdown.
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

/// Feeds the watchdog while the runtime makes progress, as a runnable.
///
/// It feeds at intervals of a third of the timeout, so that one may be late. When cancelled, it
/// feeds once more and leaves the watchdog armed: the machine has that long to reboot after the
/// core has ended.
pub async fn run(ctx: Context, device: &Path, timeout: Duration) -> Outcome {
    let Some(mut watchdog) = Watchdog::arm(device, timeout)? else {
        tracing::info!("no watchdog found");
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
        // A file has no timeout, so the requested one is assumed.
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
