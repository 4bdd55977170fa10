//! Prints the log on a console, from a thread of its own.
//!
//! A serial line is slow and a terminal may be stopped, so logging only puts the entry into a
//! bounded queue, and this thread writes it. It is a thread and not a runnable because the console
//! must exist before the supervisor, and report why the supervisor has failed.

use std::io::Write;
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::stream::Queue;
use super::{Backlog, Entry, Item, LogStream, LogTree, Query};

/// A running console. When it is dropped, the thread writes what is queued and ends.
#[derive(Debug)]
pub struct Console {
    queue: Arc<Queue>,
    /// Number of items stored before the queue was created.
    backlog: u64,
    progress: Arc<Progress>,
    thread: Thread,
}

#[derive(Debug, Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default, Clone, Copy)]
struct State {
    /// Items written, or lost to write errors.
    written: u64,
    closing: bool,
}

/// Selects the entries that a console shows.
pub(crate) type Wanted = fn(&Entry) -> bool;

/// Starts to print every entry that `wanted` selects, stored entries first, in lines of at most
/// `width` columns (0: unlimited). Write errors are ignored: there is nowhere to report them.
pub fn console<W: Write + Send + 'static>(
    log_tree: &LogTree,
    writer: W,
    wanted: Wanted,
    width: usize,
) -> std::io::Result<Console> {
    let reader = log_tree.read(Query {
        backlog: Backlog::All,
        follow: true,
        ..Query::subtree("")
    });
    let Some(stream) = reader.stream else {
        unreachable!("the query follows");
    };
    let queue = stream.queue.clone();
    let progress = Arc::new(Progress::default());
    let backlog: Vec<Item> = reader.backlog.into_iter().map(Item::Entry).collect();
    let backlog_items = backlog.len() as u64;
    let printer = Printer {
        writer,
        wanted,
        width,
        stream,
        progress: progress.clone(),
    };
    let thread = thread::Builder::new()
        .name("console".into())
        .spawn(move || printer.run(backlog))?
        .thread()
        .clone();
    Ok(Console {
        queue,
        backlog: backlog_items,
        progress,
        thread,
    })
}

impl Console {
    /// Waits until everything logged before this call is written, at most for `bound`; returns
    /// whether it is.
    pub fn flush(&self, bound: Duration) -> bool {
        let wanted = self.backlog + self.queue.put();
        let until = Instant::now() + bound;
        let mut state = self.progress.lock();
        while state.written < wanted {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.progress.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.progress.lock().closing = true;
        self.thread.unpark();
    }
}

impl Progress {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Printer<W> {
    writer: W,
    wanted: Wanted,
    width: usize,
    stream: LogStream,
    progress: Arc<Progress>,
}

impl<W: Write> Printer<W> {
    fn run(mut self, backlog: Vec<Item>) {
        for item in backlog {
            self.print(&item);
        }
        while let Some(item) = self.next() {
            self.print(&item);
        }
    }

    /// Waits for an item; `None` when the log has ended, or when the console is closing and the
    /// queue is empty.
    fn next(&mut self) -> Option<Item> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            let mut next = pin!(self.stream.next());
            if let Poll::Ready(item) = next.as_mut().poll(&mut context) {
                return item;
            }
            if self.progress.lock().closing {
                return None;
            }
            thread::park();
        }
    }

    fn print(&mut self, item: &Item) {
        let text = match item {
            Item::Entry(entry) => (self.wanted)(entry).then(|| entry.concise(self.width)),
            Item::Missed(count) => Some(format!("... {count} log entries not shown here")),
        };
        if let Some(mut text) = text {
            text.push('\n');
            // One write per entry, so that output of others does not tear it apart.
            let _ = self.writer.write_all(text.as_bytes());
            let _ = self.writer.flush();
        }
        self.progress.lock().written += 1;
        self.progress.changed.notify_all();
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
