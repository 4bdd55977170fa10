//! Interrupts of this process (SIGINT, SIGTERM, SIGHUP), and how they are passed to the processes that it started.
//!
//! The handler that [`handle_interrupts`] installs passes an interrupt on to the groups of all running commands
//! ([`crate::command`]). The second interrupt kills all of them and this process at once, unless a task has machines to
//! stop and therefore handles interrupts itself ([`Interrupts`]). Leaving ^C to the terminal would fail for every
//! signal that does not come from a terminal, and would give make's children the time to write half a file.

use std::collections::BTreeSet;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::sync::watch;

/// Exit code of a task that was interrupted, as in shells.
pub const INTERRUPTED_EXIT_CODE: u8 = 130;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static GROUPS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
static TAKER: Mutex<Option<watch::Sender<u32>>> = Mutex::new(None);

/// The task was interrupted; everything that it started has ended. In other errors it is among the causes.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Why the interrupt handler was not installed.
#[derive(Debug, thiserror::Error)]
pub enum HandlerError {
    /// The signals could not be registered.
    #[error("cannot install the interrupt handler")]
    Install(#[source] io::Error),
    /// The handler's thread did not start.
    #[error("cannot start the interrupt handler's thread")]
    Thread(#[source] io::Error),
}

/// Installs the handler. Must be called once, before the first command. It can coexist with other handlers (tokio's).
pub fn handle_interrupts() -> Result<(), HandlerError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(HandlerError::Install)?;
    std::thread::Builder::new()
        .name("interrupts".into())
        .spawn(move || {
            for _ in signals.forever() {
                let again = INTERRUPTED.swap(true, Ordering::SeqCst);
                signal_groups(if again {
                    Signal::SIGKILL
                } else {
                    Signal::SIGTERM
                });
                match &*taker() {
                    Some(count) => count.send_modify(|count| *count += 1),
                    None if again => std::process::exit(INTERRUPTED_EXIT_CODE.into()),
                    None => {}
                }
            }
        })
        .map_err(HandlerError::Thread)?;
    Ok(())
}

/// Fails once the task has been interrupted; for long work that runs no command.
pub fn check_interrupt() -> Result<(), Interrupted> {
    if INTERRUPTED.load(Ordering::SeqCst) {
        return Err(Interrupted);
    }
    Ok(())
}

/// Interrupts for a task that handles them itself. While this exists no interrupt ends the process; running commands
/// still get theirs.
pub struct Interrupts(watch::Receiver<u32>);

impl Interrupts {
    /// Handles interrupts from now on. An earlier one counts as the first.
    pub fn take() -> Interrupts {
        let before = u32::from(INTERRUPTED.load(Ordering::SeqCst));
        let (count, interrupts) = watch::channel(before);
        *taker() = Some(count);
        Interrupts(interrupts)
    }

    /// Waits until there have been this many interrupts.
    pub async fn come(&self, wanted: u32) {
        let mut count = self.0.clone();
        if count.wait_for(|count| *count >= wanted).await.is_err() {
            // The channel ends only if another task takes over the interrupts.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        *taker() = None;
    }
}

fn taker() -> std::sync::MutexGuard<'static, Option<watch::Sender<u32>>> {
    // The value is consistent after any panic: it is only replaced.
    TAKER
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

pub(crate) fn groups() -> std::sync::MutexGuard<'static, BTreeSet<i32>> {
    // The set is consistent after any panic: it is only inserted into and removed from.
    GROUPS
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn signal_groups(signal: Signal) {
    for group in groups().iter() {
        // A group that no longer exists needs no signal.
        let _ = killpg(Pid::from_raw(*group), signal);
    }
}
