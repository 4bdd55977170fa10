//! A process, identified even if its process ID is reused.
//!
//! Process IDs are reused. A machine that was left running is found later by process ID *and* start time *and* boot of
//! the host, and everything after that (signals, waiting) goes through a process file descriptor, which refers to this
//! one process forever.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::readiness::readable;

/// Identifies a process among all others, earlier and later.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    /// Its process ID.
    pub pid: i32,
    /// When it started, in clock ticks since the host's boot.
    pub started: u64,
    /// The boot ID of the host.
    pub boot_id: String,
}

/// The resource usage of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Peak resident memory, in bytes.
    pub peak_rss: u64,
    /// CPU time of all its threads.
    pub cpu: Duration,
    /// CPU time of the virtual CPUs' threads: under TCG, the translation of the guest's code and its execution.
    pub guest_cpu: Duration,
}

/// A process that is running or has ended.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Process {
    /// A child that has not been waited for: its process ID cannot have been reused.
    pub fn of_child(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(ErrorKind::InvalidInput)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid, pidfd })
    }

    /// The process of this identity; `None` if it has ended, even if its process ID has been reused.
    pub fn find(identity: &Identity) -> io::Result<Option<Self>> {
        if boot_id()? != identity.boot_id {
            return Ok(None);
        }
        let Some(pid) = Pid::from_raw(identity.pid) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Read after the descriptor was opened: if the start time matches, the descriptor cannot refer to a later
        // process.
        match Stat::read(pid, None) {
            Ok(stat) if stat.started == identity.started && stat.state != 'Z' => {
                Ok(Some(Self { pid, pidfd }))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Its process ID.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Its identity.
    ///
    /// # Errors
    /// If it has ended.
    pub fn identity(&self) -> io::Result<Identity> {
        Ok(Identity {
            pid: self.pid(),
            started: Stat::read(self.pid, None)?.started,
            boot_id: boot_id()?,
        })
    }

    /// When it started.
    pub fn started(&self) -> io::Result<Instant> {
        let started = Stat::read(self.pid, None)?.started;
        let started =
            Duration::from_millis(started * 1000 / rustix::param::clock_ticks_per_second());
        let uptime = fs::read_to_string("/proc/uptime")?;
        let uptime = uptime
            .split_whitespace()
            .next()
            .and_then(|seconds| seconds.parse().ok())
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "cannot parse /proc/uptime"))?;
        let now = Instant::now();
        Ok(now
            .checked_sub(uptime.saturating_sub(started))
            .unwrap_or(now))
    }

    /// Kills it. Not an error if it has ended already.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until it has ended.
    pub async fn ended(&self) -> io::Result<()> {
        // A separate descriptor: the runtime registers each only once, and there may be several waiters.
        let fd = readable(self.pidfd.try_clone()?)?;
        fd.readable().await?.retain_ready();
        Ok(())
    }

    /// Blocks until it has ended, at most for this long; returns whether it has.
    pub fn ended_within(&self, bound: Duration) -> bool {
        let bound = Timespec {
            tv_sec: bound.as_secs().cast_signed(),
            tv_nsec: bound.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&bound)), Ok(1))
    }

    /// Its resource usage so far.
    pub fn usage(&self) -> io::Result<Usage> {
        let pid = self.pid();
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let mut guest_cpu = Duration::ZERO;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?.file_name();
            // Threads may end while they are counted.
            let Some(stat) = task
                .to_str()
                .and_then(|task| Stat::read(self.pid, Some(task)).ok())
            else {
                continue;
            };
            if is_virtual_cpu(&stat.name) {
                guest_cpu += stat.cpu;
            }
        }
        Ok(Usage {
            peak_rss: peak_rss(&status).ok_or_else(|| {
                io::Error::new(
                    ErrorKind::InvalidData,
                    "no VmHWM in the status of the process",
                )
            })?,
            cpu: Stat::read(self.pid, None)?.cpu,
            guest_cpu,
        })
    }
}

/// QEMU names these threads `CPU 0/TCG`, `CPU 1/KVM` with `debug-threads=on`.
fn is_virtual_cpu(name: &str) -> bool {
    name.starts_with("CPU ")
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// The value of `VmHWM:    12345 kB` in bytes.
fn peak_rss(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// The used fields of `/proc/PID/stat`.
#[derive(Debug, PartialEq)]
struct Stat {
    name: String,
    state: char,
    cpu: Duration,
    started: u64,
}

impl Stat {
    fn read(pid: Pid, task: Option<&str>) -> io::Result<Self> {
        let pid = pid.as_raw_nonzero();
        let path = match task {
            Some(task) => format!("/proc/{pid}/task/{task}/stat"),
            None => format!("/proc/{pid}/stat"),
        };
        let text = fs::read(path)?;
        Self::parse(
            &String::from_utf8_lossy(&text),
            rustix::param::clock_ticks_per_second(),
        )
        .ok_or_else(|| {
            io::Error::new(
                ErrorKind::InvalidData,
                "cannot parse the stat of the process",
            )
        })
    }

    /// `1234 (name) S …`: the name may contain spaces and parentheses, so the fields are counted from the last
    /// parenthesis.
    fn parse(text: &str, ticks: u64) -> Option<Self> {
        let (head, tail) = text.rsplit_once(')')?;
        let (_, name) = head.split_once('(')?;
        let fields: Vec<&str> = tail.split_whitespace().collect();
        // By proc(5) these are fields 3, 14, 15 and 22, counted from 1; the
        // first of `tail` is 3.
        let field = |number: usize| fields.get(number - 3).copied();
        let ticks_of = |number: usize| field(number)?.parse::<u64>().ok();
        let used = ticks_of(14)?.checked_add(ticks_of(15)?)?;
        Some(Self {
            name: name.to_owned(),
            state: field(3)?.chars().next()?,
            cpu: Duration::from_millis(used.checked_mul(1000)?.checked_div(ticks)?),
            started: ticks_of(22)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_stat_line_is_parsed_whatever_the_name() {
        let text =
            "42 (CPU 0/TCG) (x)) S 1 42 42 0 -1 4194304 1 0 0 0 150 50 0 0 20 0 1 0 987 1 1 0\n";
        let stat = Stat::parse(text, 100).expect("parsed");
        assert_eq!(stat.name, "CPU 0/TCG) (x)");
        assert!(is_virtual_cpu(&stat.name));
        assert_eq!((stat.state, stat.started), ('S', 987));
        assert_eq!(stat.cpu, Duration::from_secs(2));
        for cut in 0..text.find("987").expect("the start time") {
            assert_eq!(Stat::parse(&text[..cut], 100), None, "{cut}");
        }
    }

    #[test]
    fn peak_memory_is_in_bytes() {
        assert_eq!(peak_rss("Name:\tx\nVmHWM:\t  2048 kB\n"), Some(2 << 20));
        assert_eq!(peak_rss("VmRSS:\t  2048 kB\n"), None);
    }

    #[tokio::test]
    async fn a_process_is_found_by_its_whole_identity() {
        let mut child = Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep starts");
        let process = Process::of_child(child.id()).expect("its descriptor");
        let identity = process.identity().expect("its identity");
        let age = process.started().expect("its start").elapsed();
        assert!(age < Duration::from_secs(60), "{age:?}");
        let usage = process.usage().expect("its usage");
        assert!(usage.peak_rss > 0);
        assert_eq!(usage.guest_cpu, Duration::ZERO);

        let found = Process::find(&identity)
            .expect("looked for")
            .expect("there");
        assert_eq!(found.pid(), identity.pid);
        for other in [
            Identity {
                started: identity.started + 1,
                ..identity.clone()
            },
            Identity {
                boot_id: "another".to_owned(),
                ..identity.clone()
            },
        ] {
            assert!(
                Process::find(&other).expect("looked for").is_none(),
                "{other:?}"
            );
        }

        assert!(!process.ended_within(Duration::ZERO));
        found.kill().expect("killed");
        process.ended().await.expect("ended");
        assert!(process.ended_within(Duration::ZERO));
        // A dead process that has not been waited for counts as ended.
        assert!(Process::find(&identity).expect("looked for").is_none());
        child.wait().expect("waited for");
        assert!(Process::find(&identity).expect("looked for").is_none());
        process.kill().expect("killing the dead is no error");
    }
}
