//! Interrupts of this process (SIGINT, SIGTERM, SIGHUP), and how they reach what it has started.
//!
//! The handler that [`handle_interrupts`] installs passes an interrupt on to the groups of all running commands
//! ([`crate::command`]). The second interrupt kills everything at once, and this process with it, unless a task has
//! machines to look after and therefore takes interrupts itself ([`Interrupts`]). The obvious other way, leaving ^C to the
//! terminal, fails for every signal that does not come from a terminal, and gives make's children the time to write
//! half a file.

use std::collections::BTreeSet;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::sync::watch;

/// Exit code of a task that an interrupt ended, as shells have it.
pub const INTERRUPTED_EXIT_CODE: u8 = 130;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static GROUPS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
static TAKER: Mutex<Option<watch::Sender<u32>>> = Mutex::new(None);

/// The task was interrupted; everything it started has ended. Wherever it is passed on within another error it is among
/// that error's causes.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Why interrupts are not handled.
#[derive(Debug, thiserror::Error)]
pub enum HandlerError {
    /// The signals cannot be had.
    #[error("cannot install the handler for interrupts")]
    Install(#[source] io::Error),
    /// Nobody would wait for them.
    #[error("cannot start the thread for interrupts")]
    Thread(#[source] io::Error),
}

/// Installs the handler. To be called once, before the first command. It lives beside other handlers (tokio's).
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

/// Interrupts as they come, for a task that takes them itself. While this lives no interrupt ends the process; commands
/// that run still get theirs.
pub struct Interrupts(watch::Receiver<u32>);

impl Interrupts {
    /// Takes them from now on. One that came before counts as the first.
    pub fn take() -> Interrupts {
        let before = u32::from(INTERRUPTED.load(Ordering::SeqCst));
        let (count, interrupts) = watch::channel(before);
        *taker() = Some(count);
        Interrupts(interrupts)
    }

    /// Waits until there were this many.
    pub async fn come(&self, wanted: u32) {
        let mut count = self.0.clone();
        if count.wait_for(|count| *count >= wanted).await.is_err() {
            // Only another taker ends the channel; the interrupts are its own.
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
    // The value is whole after any panic: it is only replaced.
    TAKER
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

pub(crate) fn groups() -> std::sync::MutexGuard<'static, BTreeSet<i32>> {
    // The set is valid after any panic: insert and remove are all that is done to it.
    GROUPS
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn signal_groups(signal: Signal) {
    for group in groups().iter() {
        // A group that is gone already is what we want.
        let _ = killpg(Pid::from_raw(*group), signal);
    }
}
