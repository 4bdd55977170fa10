//! One log entry, and how it looks on a console.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How grave an entry is; ordered, `Error` is the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Every step.
    Trace,
    /// For those who look for a fault.
    Debug,
    /// What an operator may want to know.
    Info,
    /// Something is wrong and is being dealt with.
    Warning,
    /// Something failed.
    Error,
}

impl Severity {
    /// One capital letter.
    pub fn letter(self) -> char {
        match self {
            Severity::Trace => 'T',
            Severity::Debug => 'D',
            Severity::Info => 'I',
            Severity::Warning => 'W',
            Severity::Error => 'E',
        }
    }
}

impl From<&tracing::Level> for Severity {
    fn from(level: &tracing::Level) -> Self {
        match *level {
            tracing::Level::TRACE => Severity::Trace,
            tracing::Level::DEBUG => Severity::Debug,
            tracing::Level::INFO => Severity::Info,
            tracing::Level::WARN => Severity::Warning,
            tracing::Level::ERROR => Severity::Error,
        }
    }
}

/// One entry, possibly of several lines. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Dotted name of the runnable that it came from, or that it is about.
    pub dn: Arc<str>,
    /// How grave it is.
    pub severity: Severity,
    /// By the wall clock, which may have been wrong or set since.
    pub at: SystemTime,
    /// Since the start of the machine.
    pub monotonic: Duration,
    /// File and line that logged it; none for lines of child processes.
    pub place: Option<(&'static str, u32)>,
    /// The text, with the fields of the event; lines are separated by `\n`.
    pub message: Arc<str>,
    /// Its place in the order of all entries; grows, with gaps in no journal.
    pub sequence: u64,
}

/// A name longer than this is shortened from its beginning on a console.
const CONSOLE_NAME: usize = 28;

impl Entry {
    /// The lines of the message; at least one.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.message.split('\n')
    }

    /// For a console `width` columns wide (0: no bound), one line for each of
    /// the message's:
    ///
    /// ```text
    /// [   2.345] I root.network  link eth0 is up
    /// [   2.345] |               and has an address
    /// ```
    ///
    /// Control characters are replaced, so that no text can steer the
    /// terminal; what does not fit is cut, with `…` for its last character.
    pub fn concise(&self, width: usize) -> String {
        let time = self.monotonic.as_secs_f64();
        let name = shorten(&self.dn);
        let mut out = String::new();
        for (index, line) in self.lines().enumerate() {
            let mut text = String::new();
            // Writing to a string cannot fail.
            let _ = if index == 0 {
                write!(text, "[{time:8.3}] {} {name}  ", self.severity.letter())
            } else {
                let indent = name.chars().count();
                write!(text, "[{time:8.3}] | {:indent$}  ", "")
            };
            text.extend(line.chars().map(|c| match c {
                '\t' => ' ',
                c if c.is_control() => '\u{fffd}',
                c => c,
            }));
            if index > 0 {
                out.push('\n');
            }
            push_cut(&mut out, text.trim_end(), width);
        }
        out
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.concise(0))
    }
}

/// `…launcher.consensus.etcd` for names that are too long for a console: the
/// last parts that fit.
fn shorten(name: &str) -> String {
    let length = name.chars().count();
    if length <= CONSOLE_NAME {
        return name.to_owned();
    }
    let rest: String = name.chars().skip(length - CONSOLE_NAME + 1).collect();
    match rest.split_once('.') {
        Some((_, whole_parts)) => format!("…{whole_parts}"),
        None => format!("…{rest}"),
    }
}

fn push_cut(out: &mut String, text: &str, width: usize) {
    if width == 0 || text.chars().count() <= width {
        out.push_str(text);
    } else {
        out.extend(text.chars().take(width - 1));
        out.push('…');
    }
}
