//! PID 1: a small synchronous program that supervises the node core.
//!
//! It makes the root a mount from which containers can `pivot_root`, forks the core as a child,
//! reaps orphans, forwards signals, and powers off or reboots the machine when the core has
//! exited: in order if the core requested it by its exit code, otherwise after reporting the
//! reason on the console and in pstore.
//!
//! Why it is a separate process: reaping orphans needs `waitpid(-1)`, which would take the exit
//! codes of children that the core waits for itself. And however the core fails, PID 1 has to
//! remain to report it. So PID 1 is kept simple: it has no threads and no runtime and allocates
//! little. It can be forked for this reason, and the core does not start the program anew, which takes longer. PID 1 never
//! returns, because the kernel would panic. An error in PID 1 is printed, and the
//! machine still reboots.

use std::fs;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use hearth_api::console::{Milestone, Report};
use hearth_host::layout;
use hearth_host::power::PowerRequest;
use hearth_sys::fork::{Forked, fork};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot, set_cad_enabled};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, chdir, chroot, sync};

/// How long to wait for killed processes to exit. A process that waits for a failed disk never
/// exits.
const KILLED_BOUND: Duration = Duration::from_secs(10);

/// Runs as PID 1 until the machine goes down. Returns in the core.
pub fn run() {
    say(&Report::Reached(Milestone::Kernel, kernel_release()));
    if let Err(errno) = make_root_mount() {
        // Without it containers fail to start; the node itself does not need it.
        complain(format_args!(
            "cannot prepare the root for pivot_root: {errno}"
        ));
    }
    let ending = match supervise() {
        Ok(None) => return,
        Ok(Some(status)) => PowerRequest::of(status).ok_or_else(|| describe(status)),
        Err(error) => Err(format!("cannot start or supervise the core: {error}")),
    };
    match ending {
        Ok(ending) => finish(ending),
        Err(why) => {
            report_death(&why);
            // Before the wait: nothing feeds the watchdog any more, so it may reset the machine
            // during the wait.
            settle();
            std::thread::sleep(reboot_delay());
            finish(PowerRequest::Reboot)
        }
    }
}

// `println!` panics when the console cannot be written to, and a panic of PID 1 is a kernel panic.

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

/// Bind-mounts the root over itself. The initramfs is the kernel's rootfs, from which `pivot_root`
/// does not work; the bind mount is an ordinary mount and copies nothing.
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

/// Starts the core and does PID 1's duties until it ends. Returns nothing in the core.
fn supervise() -> io::Result<Option<ExitStatus>> {
    // Blocked, so that none is lost between two calls of `wait`. Real-time signals are not in the
    // set; the kernel does not deliver those to PID 1.
    let signals: SigSet = Signal::iterator().collect();
    signals.thread_block()?;
    // Ctrl-Alt-Del sends SIGINT to PID 1 instead of resetting the machine.
    if let Err(errno) = set_cad_enabled(false) {
        complain(format_args!(
            "cannot disable the Ctrl-Alt-Del reset: {errno}"
        ));
    }
    // The core inherits the blocked signals and unblocks them when it starts.
    let core = match fork()? {
        Forked::Parent(core) => core,
        Forked::Child => {
            // Its name in lists of processes.
            let _ = nix::sys::prctl::set_name(c"hearth-core");
            return Ok(None);
        }
    };
    loop {
        match signals.wait()? {
            Signal::SIGCHLD => {
                if let Some(status) = reap(core) {
                    return Ok(Some(status));
                }
            }
            other => forward(core, other),
        }
    }
}

/// Reaps every child that has exited. Returns the core's status if it is among them. Signals
/// coalesce, so one SIGCHLD may stand for several children.
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
                complain(format_args!("cannot wait for children: {errno}"));
                return ended;
            }
        }
    }
}

/// Forwards the signals that the core handles. The default action of any other would kill the
/// core and so reboot the machine.
fn forward(core: Pid, signal: Signal) {
    if !matches!(signal, Signal::SIGTERM | Signal::SIGINT) {
        complain(format_args!("ignoring {signal}"));
        return;
    }
    if let Err(errno) = kill(core, signal) {
        complain(format_args!("cannot forward {signal}: {errno}"));
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("killed by {signal}"),
            Err(_) => format!("killed by signal {signal}"),
        },
        (None, None) => "unknown exit status".to_owned(),
    }
}

fn report_death(why: &str) {
    let report = Report::CoreEnded(why.to_owned());
    say(&report);
    // pstore survives a warm reboot if the machine supports it.
    if let Ok(mut pstore) = fs::OpenOptions::new().write(true).open("/dev/pmsg0") {
        let _ = writeln!(pstore, "{report}");
    }
}

/// The delay before the reboot. The core computes it from the number of recent failed boots; PID 1
/// keeps no state across boots.
fn reboot_delay() -> Duration {
    const UNKNOWN: Duration = Duration::from_secs(5);
    let text = fs::read_to_string(layout::REBOOT_DELAY).unwrap_or_default();
    text.trim().parse().map_or(UNKNOWN, Duration::from_secs)
}

/// Kills all remaining processes and syncs file systems.
fn settle() {
    // To all processes but PID 1; ESRCH means there are none.
    let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    reap_the_killed(KILLED_BOUND);
    sync();
}

/// Powers off or reboots the machine.
fn finish(ending: PowerRequest) -> ! {
    settle();
    let mode = match ending {
        PowerRequest::PowerOff => RebootMode::RB_POWER_OFF,
        PowerRequest::Reboot => RebootMode::RB_AUTOBOOT,
    };
    let Err(errno) = reboot(mode);
    complain(format_args!("{mode:?}: {errno}"));
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Waits until no child is left, at most for `bound`.
fn reap_the_killed(bound: Duration) {
    const LOOK_AGAIN: Duration = Duration::from_millis(10);
    let begin = Instant::now();
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) if begin.elapsed() >= bound => {
                complain(format_args!("some processes did not exit; continuing"));
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
            PowerRequest::of(exited(PowerRequest::PowerOff.exit_code())),
            Some(PowerRequest::PowerOff)
        );
        assert_eq!(
            PowerRequest::of(exited(PowerRequest::Reboot.exit_code())),
            Some(PowerRequest::Reboot)
        );
        for code in [0, 1, 101] {
            assert_eq!(PowerRequest::of(exited(code)), None);
        }
        assert_eq!(PowerRequest::of(ExitStatus::from_raw(9)), None);
    }

    #[test]
    fn a_death_says_how() {
        assert_eq!(describe(exited(3)), "exit code 3");
        assert_eq!(describe(ExitStatus::from_raw(6)), "killed by SIGABRT");
    }
}
