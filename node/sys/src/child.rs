//! Child processes that cannot outlive the node's core.
//!
//! # Invariants
//! - A child leads its own session and process group, so that a signal to the core's group does not
//!   reach it, and a kill reaches its children.
//! - It gets SIGKILL when the core dies for any reason, and when its [`Child`] is dropped.
//! - When it has exited, the rest of its process group gets SIGKILL: what a program has started does
//!   not live on beside the next run of the program. Processes that lead a group of their own, as
//!   containerd's shims do, are not affected.
//! - Its output is passed line by line to a callback, with a limit on the length of a line. A
//!   grandchild that keeps the pipe open delays nothing.
//!
//! The kernel sends the parent-death signal when the *thread* that started the child ends, and
//! threads of a thread pool do end. So one thread that never ends starts all children.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use nix::time::ClockId;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Command;
use tokio::task::JoinSet;

use super::raw;

/// A longer line is passed to the callback in chunks of this many bytes.
pub const MAX_LINE: usize = 8 * 1024;

/// How long the pipes of an exited child are still read.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

/// The stream to which a child wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Why a child cannot be started or waited for.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The program cannot be started.
    #[error("cannot start {program}")]
    Start {
        /// The program.
        program: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Waiting for the process failed.
    #[error("cannot wait for {program}")]
    Wait {
        /// The program.
        program: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Sets the nice value of a command's process and of all processes that it starts: 0 is the
/// default, 19 the lowest priority, -20 the highest.
pub fn nice(command: &mut Command, niceness: i8) {
    raw::nice(command, niceness);
}

/// Sets the nice value of this thread and of all threads and processes that it starts from now on.
pub fn nice_this(niceness: i8) -> io::Result<()> {
    Ok(rustix::process::setpriority_process(None, niceness.into())?)
}

/// Sets the nice value of a running process with all its threads, and of everything they start from
/// now on. Succeeds if the process has exited.
pub fn renice(pid: u32, niceness: i8) -> io::Result<()> {
    // A thread that has not been changed yet may start another one that is not in the list, so the
    // list is read until nothing had to be changed.
    loop {
        let mut changed = false;
        for thread in threads(pid)? {
            match renice_thread(thread, niceness.into()) {
                Ok(was_changed) => changed |= was_changed,
                // The thread has exited.
                Err(Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !changed {
            return Ok(());
        }
    }
}

/// Returns whether the nice value had to be changed.
fn renice_thread(thread: Pid, niceness: i32) -> Result<bool, Errno> {
    let differs = rustix::process::getpriority_process(Some(thread))? != niceness;
    if differs {
        rustix::process::setpriority_process(Some(thread), niceness)?;
    }
    Ok(differs)
}

/// The CPU time of a process, summed over all its threads. An error if the process does not exist.
pub fn processor_time(pid: u32) -> io::Result<Duration> {
    let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
    Ok(ClockId::pid_cpu_clock_id(pid)?.now()?.into())
}

/// The threads of a process; empty if it has exited.
fn threads(pid: u32) -> io::Result<Vec<Pid>> {
    let entries = match std::fs::read_dir(format!("/proc/{pid}/task")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    // The listing is truncated if the process exits meanwhile.
    let names = entries.map_while(|entry| Some(entry.ok()?.file_name()));
    let ids = names.filter_map(|name| name.to_str()?.parse().ok());
    Ok(ids.filter_map(Pid::from_raw).collect())
}

/// A running child. Dropping it kills it and its process group.
#[derive(Debug)]
pub struct Child {
    program: String,
    process: tokio::process::Child,
    pid: Pid,
    readers: JoinSet<()>,
    ended: Option<ExitStatus>,
}

impl Child {
    /// Starts a command. Its standard input is `/dev/null`; its output is passed to `on_line`, line
    /// by line and without line endings.
    ///
    /// Must be called within a tokio runtime.
    pub async fn spawn(
        command: Command,
        on_line: impl FnMut(Stream, &str) + Send + 'static,
    ) -> Result<Self, ChildError> {
        Self::spawn_with_input(command, Stdio::null(), on_line).await
    }

    /// The same with another standard input.
    pub async fn spawn_with_input(
        mut command: Command,
        input: Stdio,
        on_line: impl FnMut(Stream, &str) + Send + 'static,
    ) -> Result<Self, ChildError> {
        let program = command.as_std().get_program().display().to_string();
        let failed = |source| ChildError::Start {
            program: program.clone(),
            source,
        };
        command
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        raw::own_session_and_die_with_parent(&mut command);
        let mut process = start_on_lasting_thread(command).await.map_err(failed)?;
        let pid = process
            .id()
            .and_then(|id| Pid::from_raw(id as i32))
            .ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let on_line = Arc::new(Mutex::new(on_line));
        let mut readers = JoinSet::new();
        if let Some(stdout) = process.stdout.take() {
            readers.spawn(read_lines(stdout, Stream::Stdout, on_line.clone()));
        }
        if let Some(stderr) = process.stderr.take() {
            readers.spawn(read_lines(stderr, Stream::Stderr, on_line));
        }
        Ok(Self {
            program,
            process,
            pid,
            readers,
            ended: None,
        })
    }

    /// The child's process ID, which is also the ID of its group.
    pub fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    /// Waits until the child has exited and its output has been read.
    ///
    /// Cancel safe: may be called again.
    pub async fn wait(&mut self) -> Result<ExitStatus, ChildError> {
        let status = match self.ended {
            Some(status) => status,
            None => {
                let status = self.reap().await.map_err(|source| ChildError::Wait {
                    program: self.program.clone(),
                    source,
                })?;
                self.ended = Some(status);
                status
            }
        };
        let drained = async { while self.readers.join_next().await.is_some() {} };
        if tokio::time::timeout(DRAIN_LIMIT, drained).await.is_err() {
            // Another process keeps the pipe open.
            self.readers.abort_all();
        }
        Ok(status)
    }

    async fn reap(&mut self) -> io::Result<ExitStatus> {
        let process = pidfd_open(self.pid, PidfdFlags::NONBLOCK)?;
        raw::Watched::new(process)?.readable().await?;
        // It has exited and has not been waited for, so its ID still belongs to its group.
        self.kill_group();
        self.process.wait().await
    }

    /// Sends SIGKILL to the child's process group, and waits for the child.
    ///
    /// # Errors
    /// If the child cannot be waited for.
    pub async fn kill(&mut self) -> Result<ExitStatus, ChildError> {
        self.kill_group();
        self.wait().await
    }

    /// Sends SIGTERM to the child, and SIGKILL to its process group if it has not exited after
    /// `bound`.
    pub async fn terminate(&mut self, bound: Duration) -> Result<ExitStatus, ChildError> {
        if self.ended.is_none() {
            self.signal(Signal::TERM);
            if let Ok(status) = tokio::time::timeout(bound, self.wait()).await {
                return status;
            }
            tracing::warn!(program = %self.program, ?bound, "process did not exit after SIGTERM; sending SIGKILL");
            self.kill_group();
        }
        self.wait().await
    }

    /// Sends a signal to the child itself, if it is still running.
    pub fn signal(&self, signal: Signal) {
        // The process ID is not reused before the process has been waited for.
        if self.ended.is_none() {
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }

    fn kill_group(&self) {
        if self.ended.is_none() {
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill_group();
    }
}

async fn read_lines<F: FnMut(Stream, &str)>(
    pipe: impl AsyncRead + Unpin,
    stream: Stream,
    on_line: Arc<Mutex<F>>,
) {
    let tell = |line: &[u8]| {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let mut on_line = on_line.lock().unwrap_or_else(|broken| broken.into_inner());
        on_line(stream, &String::from_utf8_lossy(line));
    };
    let mut pipe = BufReader::with_capacity(MAX_LINE, pipe);
    let mut line = Vec::new();
    // A read error is treated like the end of the stream: no more output follows.
    while let Ok(chunk) = pipe.fill_buf().await {
        if chunk.is_empty() {
            break;
        }
        let room = MAX_LINE - line.len();
        let used = match chunk.iter().take(room).position(|byte| *byte == b'\n') {
            Some(end) => {
                line.extend_from_slice(&chunk[..end]);
                tell(&line);
                line.clear();
                end + 1
            }
            None => {
                let used = chunk.len().min(room);
                line.extend_from_slice(&chunk[..used]);
                if line.len() == MAX_LINE {
                    tell(&line);
                    line.clear();
                }
                used
            }
        };
        pipe.consume(used);
    }
    if !line.is_empty() {
        tell(&line);
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Starts the command on the thread that never ends.
async fn start_on_lasting_thread(mut command: Command) -> io::Result<tokio::process::Child> {
    static STARTER: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    let runtime = tokio::runtime::Handle::current();
    let (answer, answered) = tokio::sync::oneshot::channel();
    let job: Job = Box::new(move || {
        let _runtime = runtime.enter();
        // If the caller is gone, the child is dropped and so killed.
        let _ = answer.send(command.spawn());
    });
    let starter = STARTER.get_or_init(|| {
        let (jobs, queue) = mpsc::channel::<Job>();
        std::thread::spawn(move || queue.iter().for_each(|job| job()));
        Mutex::new(jobs)
    });
    let gone = || io::Error::other("the thread that starts child processes has ended");
    let sent = {
        let jobs = starter.lock().unwrap_or_else(|broken| broken.into_inner());
        jobs.send(job)
    };
    sent.map_err(|_| gone())?;
    answered.await.map_err(|_| gone())?
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    const BOUND: Duration = Duration::from_secs(20);

    async fn shell(script: &str) -> (Child, UnboundedReceiver<(Stream, String)>) {
        let (lines, seen) = unbounded_channel();
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(script);
        let child = Child::spawn(command, move |stream, line| {
            let _ = lines.send((stream, line.to_owned()));
        });
        (child.await.unwrap(), seen)
    }

    async fn collect(mut seen: UnboundedReceiver<(Stream, String)>) -> Vec<(Stream, String)> {
        let mut lines = Vec::new();
        while let Some(line) = seen.recv().await {
            lines.push(line);
        }
        lines
    }

    fn runs(pid: u32) -> bool {
        // A zombie has exited, even if it has not been waited for.
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.contains(") Z "))
    }

    async fn ends(pid: u32) {
        let ended = async {
            while runs(pid) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(BOUND, ended).await.unwrap();
    }

    #[tokio::test]
    async fn lines_and_status_are_told() {
        let (mut child, seen) = shell("printf 'a\\nb\\r\\nlast'; echo e >&2; exit 3").await;
        assert_eq!(child.wait().await.unwrap().code(), Some(3));
        assert_eq!(child.wait().await.unwrap().code(), Some(3));
        let (mut out, mut err) = (vec![], vec![]);
        for (stream, line) in collect(seen).await {
            match stream {
                Stream::Stdout => out.push(line),
                Stream::Stderr => err.push(line),
            }
        }
        assert_eq!(out, ["a", "b", "last"]);
        assert_eq!(err, ["e"]);
    }

    #[tokio::test]
    async fn a_line_without_end_is_cut_and_bytes_are_made_text() {
        let (mut child, seen) = shell("head -c 20000 /dev/zero | tr '\\0' x; printf '\\377'").await;
        child.wait().await.unwrap();
        let lines = collect(seen).await;
        assert!(lines.iter().all(|(_, line)| line.len() <= MAX_LINE + 2));
        let all: String = lines.into_iter().map(|(_, line)| line).collect();
        assert_eq!(all, format!("{}\u{fffd}", "x".repeat(20000)));
    }

    #[test]
    fn a_thread_and_what_it_starts_can_be_nice() {
        let seen = std::thread::spawn(|| {
            nice_this(3).unwrap();
            let shown = std::process::Command::new("nice").output().unwrap();
            String::from_utf8(shown.stdout).unwrap()
        });
        assert_eq!(seen.join().unwrap().trim(), "3");
    }

    #[tokio::test]
    async fn a_nice_one_goes_after_others_with_all_that_it_starts() {
        let mut command = Command::new("/bin/sh");
        // The nice values of the shell and of its child; the fields are those of proc(5).
        command
            .arg("-c")
            .arg("cut -d ' ' -f 19 /proc/$$/stat; nice");
        nice(&mut command, 5);
        let (lines, seen) = unbounded_channel();
        let child = Child::spawn(command, move |stream, line| {
            let _ = lines.send((stream, line.to_owned()));
        });
        assert!(child.await.unwrap().wait().await.unwrap().success());
        let said: Vec<_> = collect(seen)
            .await
            .into_iter()
            .map(|(_, line)| line)
            .collect();
        assert_eq!(said, ["5", "5"]);
    }

    #[test]
    fn whoever_works_has_processors() {
        let own = || processor_time(std::process::id()).unwrap();
        let before = own();
        while own() < before + Duration::from_millis(10) {}
        let mut over = std::process::Command::new("/bin/true").spawn().unwrap();
        over.wait().unwrap();
        processor_time(over.id()).unwrap_err();
    }

    #[tokio::test]
    async fn one_that_runs_changes_with_all_its_threads() {
        let (stop, stopped) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            let _ = stopped.recv();
            rustix::process::getpriority_process(None).unwrap()
        });
        let thread_id = told.recv().unwrap();
        // Changing all threads of this process would outlast the test.
        assert!(threads(std::process::id()).unwrap().contains(&thread_id));
        assert!(renice_thread(thread_id, 7).unwrap());
        assert!(!renice_thread(thread_id, 7).unwrap());
        drop(stop);
        assert_eq!(thread.join().unwrap(), 7);

        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg("read line; nice");
        nice(&mut command, 3);
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = process.id().unwrap();
        renice(pid, 7).unwrap();
        drop(process.stdin.take());
        let output = process.wait_with_output().await.unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), "7");
        renice(pid, 7).unwrap();
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let error = Child::spawn(Command::new("/no/such/program"), |_, _| {}).await;
        assert!(error.unwrap_err().to_string().contains("/no/such/program"));
    }

    #[tokio::test]
    async fn one_that_ignores_the_request_is_killed() {
        let (mut child, mut seen) =
            shell("trap '' TERM; echo ready; while :; do sleep 1; done").await;
        seen.recv().await.unwrap();
        let status = child.terminate(Duration::from_millis(50)).await.unwrap();
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.signal(), Some(9));
    }

    #[tokio::test]
    async fn one_that_listens_ends_by_itself() {
        let (mut child, mut seen) =
            shell("trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done").await;
        seen.recv().await.unwrap();
        assert_eq!(child.terminate(BOUND).await.unwrap().code(), Some(7));
    }

    #[tokio::test]
    async fn dropping_kills_the_whole_group() {
        let (child, mut seen) = shell("sleep 1000 & echo $!; wait").await;
        let grandchild: u32 = seen.recv().await.unwrap().1.parse().unwrap();
        let pid = child.id();
        assert!(runs(pid) && runs(grandchild));
        drop(child);
        ends(pid).await;
        ends(grandchild).await;
    }

    #[tokio::test]
    async fn what_it_has_started_ends_with_it() {
        let (mut child, mut seen) = shell("sleep 1000 & echo $!; exit 0").await;
        let grandchild: u32 = seen.recv().await.unwrap().1.parse().unwrap();
        assert!(child.wait().await.unwrap().success());
        ends(grandchild).await;
    }

    #[tokio::test]
    async fn a_grandchild_that_holds_the_pipe_does_not_delay_the_end() {
        let (mut child, mut seen) = shell("setsid sleep 1000 & echo $!; exit 0").await;
        let holder: i32 = seen.recv().await.unwrap().1.parse().unwrap();
        let ended = tokio::time::timeout(BOUND, child.wait()).await;
        rustix::process::kill_process(Pid::from_raw(holder).unwrap(), Signal::KILL).unwrap();
        assert!(ended.unwrap().unwrap().success());
    }

    #[test]
    fn a_child_survives_the_thread_that_asked_for_it() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        let handle = runtime.handle().clone();
        let mut child = std::thread::spawn(move || handle.block_on(shell("sleep 1000")).0)
            .join()
            .unwrap();
        // If the signal depended on that thread, the child would have been killed.
        let waited = runtime.block_on(async {
            tokio::time::timeout(Duration::from_millis(200), child.wait()).await
        });
        assert!(waited.is_err(), "{waited:?}");
    }
}
