//! The log of a node: entries addressed by the dotted names of runnables.
//!
//! Everything in the node logs through `tracing`; [`LogTree::layer`] stores it here. The name comes
//! from the event's own `dn` field, else from the nearest span that has one (the supervisor gives
//! each runnable such a span), else it is [`Options::outside`]. Lines of child processes are stored
//! by [`LogTree::append_raw`]. A reader asks for one name or the subtree below it.
//!
//! Invariants:
//! - Memory is bounded whatever is logged: entries and bytes, per name and in total, each single
//!   message, and each reader's queue. The oldest entry is dropped first; a name that logs a lot
//!   can displace entries of others only within the total limit.
//! - Logging never waits for a reader or a console. A reader that is too slow is told how many
//!   entries it missed, at the point where they are missing.
//! - Between backlog and stream of one reader no entry is lost or duplicated.
//! - An entry of several lines stays one entry.
//! - Filters apply to the backlog and the stream alike.
//!
//! There is one journal with an index by name, not one journal per name: reading a subtree in the
//! order of events is the usual query, and the total limit needs the oldest entry of all.

mod console;
mod entry;
mod journal;
mod layer;
mod stream;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

pub use console::{Console, console};
pub use entry::{Entry, Severity};
pub use layer::LogLayer;
pub use stream::{Item, LogStream};

use journal::Journal;
use stream::Queue;

/// Longer names are cut, in bytes.
const MAX_DN: usize = 512;

/// Whether a dotted name is `ancestor` or below it. Everything is below the empty name.
pub fn is_within(name: &str, ancestor: &str) -> bool {
    match name.strip_prefix(ancestor) {
        Some(rest) => rest.is_empty() || ancestor.is_empty() || rest.starts_with('.'),
        None => false,
    }
}

/// Returns the current wall-clock time and the time since boot.
pub type Clock = Arc<dyn Fn() -> (SystemTime, Duration) + Send + Sync>;

/// Limits and settings of a log tree.
#[derive(Clone)]
pub struct Options {
    /// Entries below this severity are not stored.
    pub keep: Severity,
    /// The name of entries logged outside of any runnable.
    pub outside: Arc<str>,
    /// Maximum number of entries in total.
    pub max_entries: usize,
    /// Maximum bytes in total, including the overhead of each entry.
    pub max_bytes: usize,
    /// Maximum number of entries per name.
    pub max_entries_per_dn: usize,
    /// Maximum bytes per name.
    pub max_bytes_per_dn: usize,
    /// Maximum bytes of one message; a longer one is cut and marked.
    pub max_message: usize,
    /// Maximum entries queued for one reader.
    pub stream_entries: usize,
    /// Maximum bytes queued for one reader.
    pub stream_bytes: usize,
    /// Source of the entries' times.
    pub clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            keep: Severity::Info,
            outside: "init".into(),
            max_entries: 32_768,
            max_bytes: 8 << 20,
            max_entries_per_dn: 4096,
            max_bytes_per_dn: 1 << 20,
            max_message: 16 << 10,
            stream_entries: 1024,
            stream_bytes: 1 << 20,
            clock: Arc::new(system_clock),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("keep", &self.keep)
            .field("outside", &self.outside)
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the clock that the caller may replace"
)]
fn system_clock() -> (SystemTime, Duration) {
    let since_boot = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    // The call cannot fail for this clock; zero would show if it did.
    let since_boot = since_boot.map(Duration::from).unwrap_or_default();
    (SystemTime::now(), since_boot)
}

/// How many of the stored entries a reader wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backlog {
    /// None.
    None,
    /// This many of the newest entries that pass the filter.
    Count(usize),
    /// All stored entries.
    All,
}

/// What a reader asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    /// Dotted name.
    pub dn: String,
    /// Whether to include everything below the name. (The subtree of the empty name is everything.)
    pub subtree: bool,
    /// The minimum severity.
    pub min_severity: Severity,
    /// How many stored entries to return.
    pub backlog: Backlog,
    /// Whether to follow new entries.
    pub follow: bool,
}

impl Query {
    /// All stored entries of one name.
    pub fn exact(dn: impl Into<String>) -> Query {
        Query {
            dn: dn.into(),
            subtree: false,
            min_severity: Severity::Trace,
            backlog: Backlog::All,
            follow: false,
        }
    }

    /// All stored entries of a name and of everything below it.
    pub fn subtree(dn: impl Into<String>) -> Query {
        Query {
            subtree: true,
            ..Query::exact(dn)
        }
    }
}

/// The part of a query that each entry is matched against.
#[derive(Debug, Clone)]
struct Filter {
    dn: String,
    subtree: bool,
    min_severity: Severity,
}

impl Filter {
    fn matches(&self, entry: &Entry) -> bool {
        let named = if self.subtree {
            is_within(&entry.dn, &self.dn)
        } else {
            *entry.dn == *self.dn
        };
        named && entry.severity >= self.min_severity
    }
}

/// The result of a query.
#[derive(Debug)]
pub struct Reader {
    /// The stored entries, oldest first.
    pub backlog: Vec<Entry>,
    /// The entries that follow, if requested.
    pub stream: Option<LogStream>,
}

/// The log. Cheap to clone; all clones share one log.
#[derive(Clone)]
pub struct LogTree {
    inner: Arc<Inner>,
}

struct Inner {
    journal: Mutex<Journal>,
    options: Options,
}

impl LogTree {
    /// An empty log.
    pub fn new(options: Options) -> LogTree {
        LogTree {
            inner: Arc::new(Inner {
                journal: Mutex::new(Journal::new(&options)),
                options,
            }),
        }
    }

    /// The layer for a `tracing_subscriber::Registry`. A filter before it must let the supervisor's
    /// spans pass (target `hearth_base`, level error), otherwise entries lose their names.
    pub fn layer(&self) -> LogLayer {
        LogLayer {
            log_tree: self.clone(),
        }
    }

    /// Stores a line, or several lines as one entry, of a child process or another source that does
    /// not log through `tracing`.
    pub fn append_raw(&self, dn: &str, severity: Severity, line: &str) {
        if severity >= self.inner.options.keep {
            self.append(Some(dn.into()), severity, None, line);
        }
    }

    /// Reads the stored entries and, if requested, follows new ones.
    pub fn read(&self, query: Query) -> Reader {
        let filter = Filter {
            dn: query.dn,
            subtree: query.subtree,
            min_severity: query.min_severity,
        };
        let options = &self.inner.options;
        // Under one lock, so that no entry is lost between the two.
        let mut journal = self.journal();
        let backlog = journal.backlog(&filter, query.backlog);
        let stream = query.follow.then(|| {
            let queue = Queue::new(filter, options.stream_entries, options.stream_bytes);
            journal.followers.push(queue.clone());
            LogStream { queue }
        });
        Reader { backlog, stream }
    }

    fn keeps(&self) -> Severity {
        self.inner.options.keep
    }

    fn append(
        &self,
        dn: Option<Arc<str>>,
        severity: Severity,
        place: Option<(&'static str, u32)>,
        text: &str,
    ) {
        let options = &self.inner.options;
        let (at, monotonic) = (options.clock)();
        let entry = Entry {
            dn: match dn {
                None => options.outside.clone(),
                Some(dn) if dn.is_empty() => options.outside.clone(),
                Some(dn) if dn.len() > MAX_DN => dn[..dn.floor_char_boundary(MAX_DN)].into(),
                Some(dn) => dn,
            },
            severity,
            at,
            monotonic,
            place,
            message: bounded(text.trim_end_matches(['\n', '\r']), options.max_message),
            sequence: 0,
        };
        let mut wakers = Vec::new();
        {
            let mut journal = self.journal();
            let entry = journal.append(entry);
            journal.followers.retain(|queue| !queue.is_abandoned());
            for queue in &journal.followers {
                wakers.extend(queue.offer(&entry));
            }
        }
        // Outside the lock: a waker may run any code.
        wakers.into_iter().for_each(std::task::Waker::wake);
    }

    fn journal(&self) -> MutexGuard<'_, Journal> {
        self.inner
            .journal
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LogTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogTree").finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let journal = self
            .journal
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for queue in &journal.followers {
            if let Some(waker) = queue.end() {
                waker.wake();
            }
        }
    }
}

/// The text, cut at a character boundary if it is too long, with the number of bytes cut.
fn bounded(text: &str, max: usize) -> Arc<str> {
    if text.len() <= max {
        return text.into();
    }
    let kept = &text[..text.floor_char_boundary(max)];
    let cut = text.len() - kept.len();
    format!("{kept}… ({cut} bytes more)").into()
}

/// Logs every panic of the process under the name of the runnable in which it happened. The
/// previous hook runs afterwards: the default one prints to standard error, which still works when
/// nothing else does.
pub fn log_panics() {
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        tracing::error!("{info}");
        previous(info);
    }));
}
