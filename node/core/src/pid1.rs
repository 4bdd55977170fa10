//! PID 1: a small synchronous program around the node core.
//!
//! It makes the root a mount that containers can pivot from, starts the core
//! as a child in a session of its own, reaps every orphan, forwards signals,
//! and ends the machine when the core has ended: in order when the core asked
//! for that by its exit code, otherwise after saying why on the console and
//! in pstore.
//!
//! Why a process of its own: reaping orphans needs `waitpid(-1)`, which would
//! steal the exit codes of children that the core waits for itself; and
//! whatever happens to the core, somebody must be left to report it. So this
//! part does nothing that can fail in an interesting way: no threads, no
//! runtime, no allocation to speak of, and it never returns; the kernel would
//! panic. What goes wrong here is printed and leads on to the reboot.

use std::fs;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use hearth_api::console::{Milestone, Report};
use hearth_host::layout;
use hearth_host::power::Ending;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot, set_cad_enabled};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, chdir, chroot, sync};

/// How long what was killed may take to end. A process that waits for a dead
/// disk does not end at all.
const KILLED_BOUND: Duration = Duration::from_secs(10);

/// Runs as PID 1 until the machine goes down.
pub fn run() -> ! {
    say(&Report::Reached(Milestone::Kernel, kernel_release()));
    if let Err(errno) = make_root_mount() {
        // Containers will fail to start; the node itself does not need it.
        complain(format_args!("the root stays the kernel's own: {errno}"));
    }
    let ending = match supervise() {
        Ok(status) => Ending::of(status).ok_or_else(|| describe(status)),
        Err(error) => Err(format!("it could not be started: {error}")),
    };
    match ending {
        Ok(ending) => finish(ending),
        Err(why) => {
            report_death(&why);
            // Before the wait: a watchdog that nobody feeds any more may cut
            // it short.
            settle();
            std::thread::sleep(reboot_delay());
            finish(Ending::Reboot)
        }
    }
}

// The standard macros panic when the console cannot be written to, and a panic
// here is the kernel's.

fn say(report: &Report) {
    let _ = writeln!(io::stdout(), "{report}");
}

fn complain(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "pid1: {what}");
}

fn kernel_release() -> String {
    let uname = nix::sys::utsname::uname();
    uname
        .map(|uname| uname.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// The initramfs is mounted as the absolute root, from which nothing can
/// pivot. Bound over itself it is a mount like any other, without copying a
/// byte.
fn make_root_mount() -> Result<(), Errno> {
    const STAGE: &str = "/.root";
    fs::create_dir_all(STAGE)
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))?;
    mount(
        Some("/"),
        STAGE,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )?;
    chdir(STAGE)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)?;
    chroot(".")?;
    chdir("/")
}

/// Starts the core and does PID 1's duties until it ends.
fn supervise() -> io::Result<ExitStatus> {
    // They are waited for below, so none is lost between two waits. Signals
    // without a name are not among them; the kernel keeps those from PID 1.
    let signals: SigSet = Signal::iterator().collect();
    signals.thread_block()?;
    // Ctrl-Alt-Del becomes a SIGINT to us instead of a reset.
    if let Err(errno) = set_cad_enabled(false) {
        complain(format_args!("Ctrl-Alt-Del stays a reset: {errno}"));
    }
    // It inherits the blocked signals, and begins by unblocking them.
    let core = Command::new("/init").arg0("hearth-core").spawn()?;
    let core = Pid::from_raw(core.id().cast_signed());
    loop {
        match signals.wait()? {
            Signal::SIGCHLD => {
                if let Some(status) = reap(core) {
                    return Ok(status);
                }
            }
            other => forward(core, other),
        }
    }
}

/// Collects every child that has ended; the core's status if it is among
/// them. Signals coalesce, so one may stand for many.
fn reap(core: Pid) -> Option<ExitStatus> {
    let mut ended = None;
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, code)) if pid == core => {
                ended = Some(ExitStatus::from_raw(code << 8));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == core => {
                ended = Some(ExitStatus::from_raw(signal as i32));
            }
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return ended,
            Err(Errno::EINTR) | Ok(_) => {}
            Err(errno) => {
                complain(format_args!("waiting for children: {errno}"));
                return ended;
            }
        }
    }
}

/// What the core listens to. Any other would end it by its default action,
/// which nobody can have wanted of the machine.
fn forward(core: Pid, signal: Signal) {
    if !matches!(signal, Signal::SIGTERM | Signal::SIGINT) {
        complain(format_args!("{signal} means nothing here"));
        return;
    }
    if let Err(errno) = kill(core, signal) {
        complain(format_args!("{signal} could not be forwarded: {errno}"));
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("killed by {signal}"),
            Err(_) => format!("killed by signal {signal}"),
        },
        (None, None) => "for no known reason".to_owned(),
    }
}

fn report_death(why: &str) {
    let report = Report::CoreEnded(why.to_owned());
    say(&report);
    // What is written here survives a warm reboot, where the machine can.
    if let Ok(mut pstore) = fs::OpenOptions::new().write(true).open("/dev/pmsg0") {
        let _ = writeln!(pstore, "{report}");
    }
}

/// The core reckons it from how often the machine has died of late; PID 1
/// itself remembers nothing across boots.
fn reboot_delay() -> Duration {
    const UNKNOWN: Duration = Duration::from_secs(5);
    let text = fs::read_to_string(layout::REBOOT_DELAY).unwrap_or_default();
    text.trim().parse().map_or(UNKNOWN, Duration::from_secs)
}

/// Ends whatever still runs and writes back what is dirty.
fn settle() {
    // To all processes but PID 1; ESRCH means there are none.
    let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    reap_the_killed(KILLED_BOUND);
    sync();
}

/// Lets go of the machine.
fn finish(ending: Ending) -> ! {
    settle();
    let mode = match ending {
        Ending::PowerOff => RebootMode::RB_POWER_OFF,
        Ending::Reboot => RebootMode::RB_AUTOBOOT,
    };
    let Err(errno) = reboot(mode);
    complain(format_args!("{mode:?}: {errno}"));
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Waits until no child is left, but for no longer than this.
fn reap_the_killed(bound: Duration) {
    const LOOK_AGAIN: Duration = Duration::from_millis(10);
    let begin = Instant::now();
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) if begin.elapsed() >= bound => {
                complain(format_args!("some processes do not end; going on"));
                return;
            }
            Ok(WaitStatus::StillAlive) => std::thread::sleep(LOOK_AGAIN),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exited(code: u8) -> ExitStatus {
        ExitStatus::from_raw(i32::from(code) << 8)
    }

    #[test]
    fn only_the_agreed_codes_end_the_machine_in_order() {
        assert_eq!(
            Ending::of(exited(Ending::PowerOff.exit_code())),
            Some(Ending::PowerOff)
        );
        assert_eq!(
            Ending::of(exited(Ending::Reboot.exit_code())),
            Some(Ending::Reboot)
        );
        for code in [0, 1, 101] {
            assert_eq!(Ending::of(exited(code)), None);
        }
        assert_eq!(Ending::of(ExitStatus::from_raw(9)), None);
    }

    #[test]
    fn a_death_says_how() {
        assert_eq!(describe(exited(3)), "exit code 3");
        assert_eq!(describe(ExitStatus::from_raw(6)), "killed by SIGABRT");
    }
}
