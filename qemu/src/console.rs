//! A machine's serial console: its log file, read as it grows.
//!
//! QEMU writes the console to a file only. This module follows the file: woken by inotify, it splits new content into
//! lines, dates them, finds the lines for programs ([`hearth_api::console::Report`]) and keeps a bounded number of both
//! for any number of readers. A file rather than a socket: nothing is lost while there is no reader, the guest never
//! blocks, and a machine that is attached to later (one that was left running by another process) is read in the same
//! way.

mod strip;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_api::console::Report;
use hearth_process::readiness::readable;
use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

use crate::journal::{Cursor, Journal, Limits, Weigh, Writer, journal};
use strip::Splitter;

/// A boot writes some hundred lines.
const LINES: Limits = Limits {
    entries: 20_000,
    weight: 8 << 20,
};

/// A boot makes some twenty reports. They have a list of their own so that a verbose guest does not displace them.
const REPORTS: Limits = Limits {
    entries: 2_000,
    weight: 1 << 20,
};

/// One line of the console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// When it was read, since QEMU's start.
    pub at: Duration,
    /// Its text, without control sequences and line end.
    pub text: Arc<str>,
}

/// One report of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    /// When it was read, since QEMU's start.
    pub at: Duration,
    /// The report.
    pub report: Report,
}

impl Weigh for Line {
    fn weight(&self) -> usize {
        self.text.len() + size_of::<Self>()
    }
}

impl Weigh for Reported {
    fn weight(&self) -> usize {
        self.report.to_string().len() + size_of::<Self>()
    }
}

/// A machine's console. Clones refer to the same console.
#[derive(Clone, Debug)]
pub struct Console {
    lines: Journal<Line>,
    reports: Journal<Reported>,
}

/// A subscription to the lines, from the first that is kept.
#[derive(Debug)]
pub struct Lines(Cursor<Line>);

/// A subscription to the reports, from the first that is kept.
#[derive(Debug)]
pub struct Reports(Cursor<Reported>);

impl Lines {
    /// The next line; `None` when QEMU has ended and everything was read. Cancel safe.
    pub async fn next(&mut self) -> Option<Line> {
        self.0.next().await
    }

    /// Number of lines that were dropped because this reader was too slow.
    pub fn missed(&self) -> u64 {
        self.0.missed()
    }
}

impl Reports {
    /// The next report; `None` when QEMU has ended and everything was read. Cancel safe.
    pub async fn next(&mut self) -> Option<Reported> {
        self.0.next().await
    }

    /// Number of reports that were dropped because this reader was too slow.
    pub fn missed(&self) -> u64 {
        self.0.missed()
    }
}

impl Console {
    /// All lines that are kept, from the machine's start.
    pub fn lines(&self) -> Lines {
        Lines(self.lines.read())
    }

    /// Only future lines.
    pub fn new_lines(&self) -> Lines {
        Lines(self.lines.read_new())
    }

    /// All reports that are kept, from the machine's start.
    pub fn reports(&self) -> Reports {
        Reports(self.reports.read())
    }

    /// Only future reports.
    pub fn new_reports(&self) -> Reports {
        Reports(self.reports.read_new())
    }

    /// The last lines, oldest first.
    pub fn last(&self, count: usize) -> Vec<Line> {
        self.lines.last(count)
    }

    /// Waits until QEMU has ended and all of its output was read.
    pub(crate) async fn ended(&self) {
        self.lines.ended().await;
    }
}

/// Follows the log at `path` until `ended` is cancelled, and then to its end.
///
/// The log must exist. Lines that it already has come first, dated with the time of reading.
pub(crate) fn follow(
    path: &Path,
    started: Instant,
    ended: CancellationToken,
) -> io::Result<(Console, impl Future<Output = ()> + Send + 'static)> {
    let file = File::open(path)?;
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    inotify::add_watch(&watch, path, inotify::WatchFlags::MODIFY)?;
    let (lines, read_lines) = journal(LINES);
    let (reports, read_reports) = journal(REPORTS);
    let console = Console {
        lines: read_lines,
        reports: read_reports,
    };
    let follower = Follower {
        file,
        started,
        splitter: Splitter::default(),
        sink: Sink { lines, reports },
    };
    Ok((console, follower.run(readable(watch)?, ended)))
}

struct Follower {
    file: File,
    started: Instant,
    splitter: Splitter,
    sink: Sink,
}

struct Sink {
    lines: Writer<Line>,
    reports: Writer<Reported>,
}

impl Sink {
    fn push(&self, at: Duration, text: String) {
        let report = Report::parse(&text);
        self.lines.push(Line {
            at,
            text: text.into(),
        });
        if let Some(report) = report {
            self.reports.push(Reported { at, report });
        }
    }
}

impl Follower {
    async fn run(mut self, watch: AsyncFd<OwnedFd>, ended: CancellationToken) {
        // The watch was set before the first read, so a change between a read and the next wait is not missed.
        let result = loop {
            // Checked before reading, so that everything written before the end is read.
            let last = ended.is_cancelled();
            if let Err(error) = self.read_new() {
                break Err(error);
            }
            if last {
                break Ok(());
            }
            tokio::select! {
                changed = changed(&watch) => if let Err(error) = changed { break Err(error) },
                () = ended.cancelled() => {}
            }
        };
        let at = self.started.elapsed();
        if let Some(line) = self.splitter.finish() {
            self.sink.push(at, line);
        }
        if let Err(error) = result {
            // Readers get it in place of the next line.
            self.sink
                .push(at, format!("(cannot read the console log: {error})"));
        }
    }

    /// Reads to the file's present end. These are short reads from the page cache, so they are not moved to another
    /// thread.
    fn read_new(&mut self) -> io::Result<()> {
        let mut buffer = [0; 16384];
        loop {
            let count = self.file.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            let at = self.started.elapsed();
            let Self { splitter, sink, .. } = self;
            splitter.feed(&buffer[..count], |line| sink.push(at, line));
        }
    }
}

/// Waits for a change of the watched file and consumes all its notifications.
async fn changed(watch: &AsyncFd<OwnedFd>) -> io::Result<()> {
    loop {
        let mut ready = watch.readable().await?;
        let mut buffer = [0; 1024];
        match ready.try_io(|watch| rustix::io::read(watch, &mut buffer).map_err(io::Error::from)) {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use hearth_api::console::Milestone;

    use super::*;

    #[tokio::test]
    async fn a_growing_file_is_followed_to_its_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("serial.log");
        std::fs::write(&path, "before\r\n").expect("a log");
        let mut log = File::options().append(true).open(&path).expect("a log");
        let ended = CancellationToken::new();
        let (console, follower) = follow(&path, Instant::now(), ended.clone()).expect("followed");
        let follower = tokio::spawn(follower);

        let mut lines = console.lines();
        let mut reports = console.reports();
        assert_eq!(&*lines.next().await.expect("a line").text, "before");
        log.write_all(b"\x1b[1mhearth: reached net")
            .expect("written");
        log.write_all(b"work 10.0.2.15/24\r\nunfinished")
            .expect("written");
        let reported = reports.next().await.expect("a report");
        assert_eq!(
            reported.report,
            Report::Reached(Milestone::Network, "10.0.2.15/24".to_owned())
        );
        let line = lines.next().await.expect("a line");
        assert_eq!(&*line.text, "hearth: reached network 10.0.2.15/24");
        assert_eq!(line.at, reported.at);
        ended.cancel();
        assert_eq!(&*lines.next().await.expect("the rest").text, "unfinished");
        assert_eq!(lines.next().await, None);
        assert_eq!(reports.next().await, None);
        follower.await.expect("no panic");
        assert_eq!(console.last(2).len(), 2);
        // Subscribed after the end, and still gets everything.
        let mut late = console.lines();
        assert_eq!(&*late.next().await.expect("a line").text, "before");
    }

    #[tokio::test]
    async fn what_was_written_just_before_the_end_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("serial.log");
        std::fs::write(&path, "").expect("a log");
        let ended = CancellationToken::new();
        let (console, follower) = follow(&path, Instant::now(), ended.clone()).expect("followed");
        std::fs::write(&path, "last words\n").expect("written");
        ended.cancel();
        follower.await;
        assert_eq!(&*console.last(1)[0].text, "last words");
    }
}
