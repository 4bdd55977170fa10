//! External commands: announced, and never left running.
//!
//! Every command is a process group of its own. Three things can end a task early, and none of them leaves a process
//! running. On an interrupt, the handler of [`crate::interrupt`] signals all groups, and the rest of a group that
//! outlives its leader is killed before the leader is reaped. A panic or an early return drops `Running`, which does
//! the same. When this process is killed, the kernel sends SIGTERM to the leaders (parent-death signal); make then ends
//! its own children.
//!
//! After an interrupt the waiting task gets [`Interrupted`] and returns through its callers, so that temporary files
//! are removed as usual.
#![allow(unsafe_code)] // one pre_exec hook, see `parent_death_signal`

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getpid, getppid};

use crate::interrupt::{self, Interrupted, check_interrupt};
use crate::progress::Progress;

/// Number of lines of a failed command's output that are shown.
const SHOWN_LINES: usize = 25;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// Interrupted, or not started because of an interrupt; no process of it remains.
    #[error("interrupted")]
    Interrupted(#[from] Interrupted),
    /// The pipe for its output could not be created.
    #[error("cannot create a pipe")]
    Pipe(#[source] io::Error),
    /// The program did not start.
    #[error("cannot start `{line}`")]
    Start {
        /// The command line.
        line: String,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// Its output could not be read.
    #[error("cannot read the output of `{line}`")]
    Output {
        /// The command line.
        line: String,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// The consumer of its output lines returned an error.
    #[error(transparent)]
    Taker(io::Error),
    /// Its exit status could not be read.
    #[error("cannot wait for a child process")]
    Wait(#[source] io::Error),
    /// It printed nothing for as long as it may; it was killed.
    #[error("`{line}` printed nothing for {} s", bound.as_secs())]
    Silent {
        /// The command line.
        line: String,
        /// For how long it may print nothing.
        bound: Duration,
    },
    /// It exited with a failure.
    #[error("`{line}` failed: {status}\n{output}")]
    Failed {
        /// The command line.
        line: String,
        /// Its exit status.
        status: ExitStatus,
        /// The last lines of its output.
        output: String,
    },
}

/// An external command.
pub struct Cmd {
    command: Command,
    shielded: bool,
    silence: Option<Duration>,
}

impl Cmd {
    /// A command without arguments, its standard input closed.
    pub fn new(program: impl AsRef<OsStr>) -> Cmd {
        let mut command = Command::new(program);
        command.stdin(Stdio::null());
        Cmd {
            command,
            shielded: false,
            silence: None,
        }
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Cmd {
        self.command.arg(arg);
        self
    }

    /// Adds arguments.
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Cmd {
        self.command.args(args);
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Cmd {
        self.command.env(name, value);
        self
    }

    /// Removes an environment variable that would otherwise be inherited.
    pub fn env_remove(mut self, name: &str) -> Cmd {
        self.command.env_remove(name);
        self
    }

    /// Removes all environment variables but these.
    pub fn env_only(mut self, names: &[&str]) -> Cmd {
        self.command.env_clear();
        for name in names {
            if let Some(value) = std::env::var_os(name) {
                self.command.env(name, value);
            }
        }
        self
    }

    /// Removes the inherited environment variables whose name the predicate accepts.
    pub fn env_remove_if(mut self, is_unwanted: impl Fn(&str) -> bool) -> Cmd {
        for (name, _) in std::env::vars_os() {
            if is_unwanted(&name.to_string_lossy()) {
                self.command.env_remove(name);
            }
        }
        self
    }

    /// Sets the working directory.
    pub fn dir(mut self, dir: impl AsRef<Path>) -> Cmd {
        self.command.current_dir(dir);
        self
    }

    /// Lets the command finish whatever happens to this process; an interrupt takes effect afterwards. For commands
    /// that change the machine.
    pub fn shielded(mut self) -> Cmd {
        self.shielded = true;
        self
    }

    /// Kills the command when it prints nothing for this long, in the functions that pass on its lines.
    pub fn silent_at_most(mut self, bound: Duration) -> Cmd {
        self.silence = Some(bound);
        self
    }

    /// The command as a shell command line.
    pub fn line(&self) -> String {
        let mut words = Vec::new();
        if let Some(dir) = self.command.get_current_dir() {
            words.push(format!("cd {} &&", quoted(dir.as_os_str())));
        }
        for (name, value) in self.command.get_envs() {
            if let Some(value) = value {
                words.push(format!("{}={}", name.to_string_lossy(), quoted(value)));
            }
        }
        words.push(quoted(self.command.get_program()));
        words.extend(self.command.get_args().map(quoted));
        words.join(" ")
    }

    /// Runs the command to its end; its output is shown if it fails.
    pub fn run(self, progress: &dyn Progress) -> Result<(), CommandError> {
        self.stream(progress, |_| Ok(()))
    }

    /// Runs the command; returns its standard output.
    pub fn output(self, progress: &dyn Progress) -> Result<String, CommandError> {
        self.output_and(progress, |_| Ok(()))
    }

    /// The same; `each` gets every line of standard error as it is written, without the line end.
    pub fn output_and(
        mut self,
        progress: &dyn Progress,
        each: impl FnMut(&str) -> io::Result<()>,
    ) -> Result<String, CommandError> {
        let line = self.announce(progress);
        let (errors, writer) = io::pipe().map_err(CommandError::Pipe)?;
        self.command.stdout(Stdio::piped()).stderr(writer);
        let mut running = self.spawn(&line)?;
        let silence = self.silence;
        drop(self); // our copy of the pipe's writing end
        let stdout = running.child.stdout.take();
        let output = std::thread::spawn(move || {
            let mut text = String::new();
            stdout
                .map_or(Ok(0), |mut stdout| stdout.read_to_string(&mut text))
                .map(|_| text)
        });
        let last = each_line(errors, &running, (&line, silence), each)?;
        let status = running.wait()?;
        if !status.success() {
            return Err(failed(line, status, last));
        }
        let output = output
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        output.map_err(|source| unreadable(&line, source))
    }

    /// Runs the command; `each` gets every line of standard output and standard error, in the order written, without
    /// the line end. If the command fails, the error has the last lines.
    pub fn stream(
        mut self,
        progress: &dyn Progress,
        each: impl FnMut(&str) -> io::Result<()>,
    ) -> Result<(), CommandError> {
        let line = self.announce(progress);
        let (reader, writer) = io::pipe().map_err(CommandError::Pipe)?;
        let second = writer.try_clone().map_err(CommandError::Pipe)?;
        self.command.stdout(writer).stderr(second);
        let running = self.spawn(&line)?;
        let silence = self.silence;
        drop(self); // our copies of the pipe's writing end, or the reading below never ends
        let last = each_line(reader, &running, (&line, silence), each)?;
        let status = running.wait()?;
        if !status.success() {
            return Err(failed(line, status, last));
        }
        Ok(())
    }

    fn announce(&self, progress: &dyn Progress) -> String {
        let line = self.line();
        progress.detail(&format!("$ {line}"));
        line
    }

    fn spawn(&mut self, line: &str) -> Result<Running, CommandError> {
        check_interrupt()?;
        if !self.shielded {
            parent_death_signal(&mut self.command);
        }
        self.command.process_group(0);
        let child = self.command.spawn().map_err(|source| CommandError::Start {
            line: line.to_owned(),
            source,
        })?;
        let running = Running {
            child,
            shielded: self.shielded,
            reaped: false,
        };
        if !self.shielded {
            interrupt::groups().insert(running.pid().as_raw());
            // The interrupt may have arrived between the check above and the insertion into the set.
            check_interrupt()?;
        }
        Ok(running)
    }
}

/// Interval of the question whether a command has ended whose output is silent.
const SILENCE: u16 = 100;

/// Reads the output of a command until its end; returns the last lines.
///
/// Its end, not that of the pipe: what the command left running may hold the pipe for ever.
fn each_line(
    mut reader: PipeReader,
    running: &Running,
    (line, silence): (&str, Option<Duration>),
    mut each: impl FnMut(&str) -> io::Result<()>,
) -> Result<VecDeque<String>, CommandError> {
    let mut last = VecDeque::with_capacity(SHOWN_LINES);
    let mut pending: Vec<u8> = Vec::new();
    let mut block = vec![0; 1 << 16];
    let mut heard = Instant::now();
    loop {
        // Asked first: what was written before the end is in the pipe.
        let has_ended = running.has_ended()?;
        let ready = poll(
            &mut [PollFd::new(reader.as_fd(), PollFlags::POLLIN)],
            if has_ended { 0 } else { SILENCE },
        );
        let length = match ready {
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(unreadable(line, errno.into())),
            Ok(0) if has_ended => 0,
            Ok(0) => match silence {
                Some(bound) if heard.elapsed() > bound => {
                    let line = line.to_owned();
                    return Err(CommandError::Silent { line, bound });
                }
                _ => continue,
            },
            Ok(_) => reader
                .read(&mut block)
                .map_err(|source| unreadable(line, source))?,
        };
        heard = Instant::now();
        pending.extend_from_slice(&block[..length]);
        let end = match (length, pending.iter().rposition(|byte| *byte == b'\n')) {
            (0, _) => pending.len(),
            (_, Some(end)) => end + 1,
            (_, None) => 0,
        };
        for text in pending[..end].split_inclusive(|byte| *byte == b'\n') {
            let text = String::from_utf8_lossy(text);
            let text = text.trim_end_matches(['\n', '\r']);
            each(text).map_err(CommandError::Taker)?;
            if last.len() == SHOWN_LINES {
                last.pop_front();
            }
            last.push_back(text.to_owned());
        }
        pending.drain(..end);
        if length == 0 {
            return Ok(last);
        }
    }
}

fn failed(line: String, status: ExitStatus, last: VecDeque<String>) -> CommandError {
    let output = Vec::from(last).join("\n");
    CommandError::Failed {
        line,
        status,
        output,
    }
}

fn unreadable(line: &str, source: io::Error) -> CommandError {
    CommandError::Output {
        line: line.to_owned(),
        source,
    }
}

/// A started command. Dropping it kills its whole group, or waits for it if it is shielded.
struct Running {
    child: Child,
    shielded: bool,
    reaped: bool,
}

impl Running {
    fn pid(&self) -> Pid {
        // Linux process IDs are far below 2^31.
        Pid::from_raw(self.child.id() as i32)
    }

    /// Whether the leader has ended; it is not reaped.
    fn has_ended(&self) -> Result<bool, CommandError> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        match waitid(Id::Pid(self.pid()), flags) {
            Ok(status) => Ok(status != WaitStatus::StillAlive),
            Err(Errno::EINTR) => Ok(false),
            Err(errno) => Err(CommandError::Wait(errno.into())),
        }
    }

    fn wait(mut self) -> Result<ExitStatus, CommandError> {
        loop {
            // The leader is not reaped here, so that its process ID keeps naming this group and no other.
            match waitid(
                Id::Pid(self.pid()),
                WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT,
            ) {
                Ok(_) => break,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(CommandError::Wait(errno.into())),
            }
        }
        let status = self.reap().map_err(CommandError::Wait)?;
        check_interrupt()?;
        Ok(status)
    }

    fn reap(&mut self) -> io::Result<ExitStatus> {
        self.reaped = true;
        if self.shielded {
            return self.child.wait();
        }
        let mut groups = interrupt::groups();
        // What the command left running is not needed.
        let _ = killpg(self.pid(), Signal::SIGKILL);
        groups.remove(&self.pid().as_raw());
        self.child.wait()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.reaped {
            // Its group is killed first, unless it is shielded.
            let _ = self.reap();
        }
    }
}

/// The child gets SIGTERM when the thread that started it ends. Every such thread waits for its command, so this means:
/// when this process ends.
fn parent_death_signal(command: &mut Command) {
    let parent = getpid();
    // SAFETY: the hook runs between fork and exec, where only async-signal-safe calls are allowed: prctl and getppid are
    // plain system calls, and neither allocates nor locks. Building an `io::Error` from an errno does not allocate.
    unsafe {
        command.pre_exec(move || {
            nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
            // If the parent died before the call above, the signal would never arrive.
            if getppid() != parent {
                return Err(io::Error::from_raw_os_error(nix::libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// A word quoted for a shell.
fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%^".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The path of a program, by PATH and the system's administrative folders, which an ordinary user's PATH lacks.
pub fn find_program(name: &str) -> Option<std::path::PathBuf> {
    let path: OsString = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|file| {
            nix::unistd::access(file, nix::unistd::AccessFlags::X_OK).is_ok() && file.is_file()
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    fn sh(script: &str) -> Cmd {
        Cmd::new("sh").arg("-c").arg(script)
    }

    #[test]
    fn what_a_command_leaves_running_does_not_delay_its_end() {
        let mut lines = Vec::new();
        let leaves = sh("setsid sleep 1000 & echo $!; printf end");
        let result = leaves.stream(&Silent, |line| {
            lines.push(line.to_owned());
            Ok(())
        });
        result.unwrap();
        assert_eq!(lines[1..], ["end"]);
        let left = Pid::from_raw(lines[0].parse().unwrap());
        nix::sys::signal::kill(left, Signal::SIGKILL).expect("it still runs");
    }

    #[test]
    fn only_the_named_variables_are_inherited() {
        let env = Cmd::new("env").env_only(&["PATH"]).env("X", "y");
        let seen = env.output(&Silent).unwrap();
        let mut names: Vec<&str> = seen
            .lines()
            .filter_map(|l| Some(l.split_once('=')?.0))
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["PATH", "X"]);
    }

    #[test]
    fn line_can_be_given_to_a_shell() {
        let cmd = Cmd::new("make")
            .dir("/a b")
            .env("X", "it's")
            .arg("-j2")
            .arg("");
        assert_eq!(cmd.line(), r"cd '/a b' && X='it'\''s' make -j2 ''");
    }

    #[test]
    fn lines_come_in_order_from_both_streams() {
        let mut lines = Vec::new();
        let each = |line: &str| {
            lines.push(line.to_owned());
            Ok(())
        };
        sh("echo one; echo two >&2; printf three")
            .stream(&Silent, each)
            .unwrap();
        assert_eq!(lines, ["one", "two", "three"]);
    }

    #[test]
    fn failure_carries_the_last_lines() {
        let error = sh("echo reason; exit 3")
            .run(&Silent)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("exit status: 3") && error.ends_with("reason"),
            "{error}"
        );
        let error = sh("echo reason >&2; exit 3")
            .output(&Silent)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("exit status: 3") && error.ends_with("reason"),
            "{error}"
        );
    }

    #[test]
    fn output_is_standard_output_alone() {
        assert_eq!(
            sh("echo out; echo err >&2").output(&Silent).unwrap(),
            "out\n"
        );
    }

    #[test]
    fn what_a_command_left_running_is_killed() {
        let text = sh("sleep 1000 >/dev/null 2>&1 & echo $!")
            .output(&Silent)
            .unwrap();
        assert_gone(text.trim().parse().unwrap());
    }

    #[test]
    fn an_error_of_the_reader_kills_the_command() {
        let mut child = None;
        let each = |line: &str| {
            child = Some(line.parse().unwrap());
            Err(io::Error::other("enough"))
        };
        let error = sh("echo $$; sleep 1000").stream(&Silent, each).unwrap_err();
        assert_eq!(error.to_string(), "enough");
        assert_gone(child.unwrap());
    }

    #[test]
    fn a_command_that_is_silent_for_too_long_is_killed() {
        let mut child = None;
        let each = |line: &str| {
            child = Some(line.parse().unwrap());
            Ok(())
        };
        let bound = Duration::from_millis(200);
        let hung = sh("echo $$; sleep 1000").silent_at_most(bound);
        let error = hung.stream(&Silent, each).unwrap_err();
        assert!(matches!(error, CommandError::Silent { .. }), "{error}");
        assert_gone(child.unwrap());
        // Each line counts anew.
        let bound = Duration::from_secs(60);
        sh("echo 1; echo 2")
            .silent_at_most(bound)
            .run(&Silent)
            .unwrap();
    }

    /// Asserts that the process is gone, or dead and not reaped by its new parent.
    fn assert_gone(pid: i32) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let state = stat
                .rsplit(')')
                .next()
                .unwrap_or_default()
                .trim_start()
                .chars()
                .next();
            if matches!(state, None | Some('Z' | 'X')) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "process {pid} still runs: {stat}"
            );
            std::thread::yield_now();
        }
    }
}
