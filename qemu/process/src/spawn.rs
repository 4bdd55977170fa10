//! Starts processes that do not outlive this one.
//!
//! A machine that remains when its launcher is killed keeps its ports and its disk, and gets the next machine's
//! connections. Handlers and destructors do not run under SIGKILL, so the kernel has to kill the child: by a
//! parent-death signal.
//!
//! "Parent" of that signal means the *thread* that made the child, and the threads of an asynchronous runtime end at
//! any time. So every such child is made by one thread, which is started at the first use and does not end before the
//! process does.

// The hook between fork and exec is unsafe to set.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{self, Child, Command};
use std::sync::{Arc, OnceLock, mpsc};
use std::{io, thread};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, setsid};
use tokio::sync::oneshot;

/// How long a process may live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// As long as this process, however it ends.
    KillWithParent,
    /// Until it is ended explicitly: dropping the handle kills it, but it can be detached.
    Detachable,
}

struct Order {
    command: Command,
    reply: oneshot::Sender<io::Result<Child>>,
}

/// Spawns `command`, which inherits the descriptors `inherited` under their present numbers.
///
/// It is not in the terminal's foreground group: Ctrl-C reaches this process, which decides what to do with the child.
pub async fn spawn(
    mut command: Command,
    lifetime: Lifetime,
    inherited: Arc<[OwnedFd]>,
) -> io::Result<Child> {
    if lifetime == Lifetime::KillWithParent {
        // A detachable process gets a session of its own below, which implies a group of its own.
        command.process_group(0);
    }
    let parent = Pid::from_raw(process::id().cast_signed());
    let hook = move || {
        match lifetime {
            Lifetime::KillWithParent => {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have died before the signal was requested.
                if getppid() != parent {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
            }
            // A hangup of the terminal must not end it.
            Lifetime::Detachable => {
                setsid()?;
            }
        }
        for fd in inherited.iter() {
            fcntl_setfd(fd.as_fd(), FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. The hook makes plain system calls (prctl,
    // getppid, setsid, fcntl), takes no lock and does not allocate: it reads what was moved into it before the fork,
    // and its errors are bare codes.
    unsafe { command.pre_exec(hook) };
    let (reply, child) = oneshot::channel();
    if spawner().send(Order { command, reply }).is_err() {
        return Err(io::Error::other("the spawner thread has ended"));
    }
    child
        .await
        .map_err(|_| io::Error::other("the spawner thread has ended"))?
}

/// The thread that starts processes.
fn spawner() -> &'static mpsc::Sender<Order> {
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (sender, orders) = mpsc::channel::<Order>();
        let run = move || {
            // Does not end: the sender is static.
            for mut order in orders {
                if let Err(Ok(mut orphan)) = order.reply.send(order.command.spawn()) {
                    // The caller has been dropped in the meantime.
                    let _ = orphan.kill();
                    let _ = orphan.wait();
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("spawner".to_owned()).spawn(run) {
            // The receiver is dropped with the closure, so orders fail.
            tracing::error!(%error, "cannot start the spawner thread");
        }
        sender
    })
}
