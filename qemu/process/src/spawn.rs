//! Starts processes that do not outlive this one.
//!
//! A machine that stays behind when its launcher is killed keeps its ports
//! and its disk, and swallows the next one's connections. Handlers and
//! destructors do not run under SIGKILL, so the kernel is asked: with a
//! parent-death signal it kills the child itself.
//!
//! The signal has a catch: "parent" means the *thread* that made the child,
//! and the threads of an asynchronous runtime come and go. So every such
//! child is made by one thread, which is started at the first use and never
//! ends before the process does.

// The hook between fork and exec is unsafe to set.
#![allow(unsafe_code)]

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{self, Child, Command},
    sync::{Arc, OnceLock, mpsc},
    thread,
};

use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::{Pid, Signal, getppid, set_parent_process_death_signal, setsid},
};
use tokio::sync::oneshot;

/// How long a process may live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// As long as this process, whatever ends it.
    Tied,
    /// As long as it likes: the handle's drop kills it, but it can be
    /// detached, and then nothing but an order ends it.
    Detachable,
}

struct Order {
    command: Command,
    reply: oneshot::Sender<io::Result<Child>>,
}

/// Spawns `command`, which inherits the descriptors `inherited` under the
/// numbers that they have here.
///
/// It is not in the terminal's foreground: Ctrl-C reaches this process, which
/// decides what becomes of the child.
pub async fn spawn(
    mut command: Command,
    lifetime: Lifetime,
    inherited: Arc<[OwnedFd]>,
) -> io::Result<Child> {
    if lifetime == Lifetime::Tied {
        // A detachable one gets a session of its own below, which is a group
        // of its own, too.
        command.process_group(0);
    }
    let parent = Pid::from_raw(process::id().cast_signed());
    let hook = move || {
        match lifetime {
            Lifetime::Tied => {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have died before the signal was asked for.
                if getppid() != parent {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
            }
            // The terminal's end must not end it.
            Lifetime::Detachable => {
                setsid()?;
            }
        }
        for fd in inherited.iter() {
            fcntl_setfd(fd.as_fd(), FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe work is allowed.
    // The hook makes plain system calls (prctl, getppid, setsid, fcntl), takes
    // no lock and allocates nothing: it reads what was moved into it before
    // the fork, and its errors are bare codes.
    unsafe { command.pre_exec(hook) };
    let (reply, child) = oneshot::channel();
    if spawner().send(Order { command, reply }).is_err() {
        return Err(io::Error::other("the thread that starts processes is gone"));
    }
    child
        .await
        .map_err(|_| io::Error::other("the thread that starts processes is gone"))?
}

/// The one thread that starts processes.
fn spawner() -> &'static mpsc::Sender<Order> {
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (sender, orders) = mpsc::channel::<Order>();
        let run = move || {
            // Ends never: the sender is static.
            for mut order in orders {
                if let Err(Ok(mut orphan)) = order.reply.send(order.command.spawn()) {
                    // Whoever ordered it has gone away in the meantime.
                    let _ = orphan.kill();
                    let _ = orphan.wait();
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("spawner".to_owned()).spawn(run) {
            // The receiver is gone with the closure, so orders fail.
            tracing::error!(%error, "cannot start the thread that starts processes");
        }
        sender
    })
}
