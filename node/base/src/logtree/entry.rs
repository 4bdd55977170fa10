//! A log entry and its console format.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Severity of an entry; ordered, `Error` is the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Single steps.
    Trace,
    /// For debugging.
    Debug,
    /// Events of interest to an operator.
    Info,
    /// Something is wrong and is being handled.
    Warning,
    /// Something failed.
    Error,
}

impl Severity {
    /// The severity as one capital letter.
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
    /// Dotted name of the runnable that logged it, or that it is about.
    pub dn: Arc<str>,
    /// Its severity.
    pub severity: Severity,
    /// Wall-clock time, which may have been wrong or set since.
    pub at: SystemTime,
    /// Time since boot.
    pub monotonic: Duration,
    /// Source file and line; `None` for lines of child processes.
    pub place: Option<(&'static str, u32)>,
    /// The text, with the fields of the event; lines are separated by `\n`.
    pub message: Arc<str>,
    /// Position among all entries; increasing.
    pub sequence: u64,
}

/// A console shortens longer names at their beginning.
const CONSOLE_NAME: usize = 28;

impl Entry {
    /// The lines of the message; at least one.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.message.split('\n')
    }

    /// Formats the entry for a console `width` columns wide (0: unlimited), one line for each line
    /// of the message:
    ///
    /// ```text
    /// [   2.345] I root.network  link eth0 is up
    /// [   2.345] |               and has an address
    /// ```
    ///
    /// Control characters are replaced, so that no text can control the terminal; a line that is
    /// too long is cut and ends in `…`.
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

/// Shortens names that are too long for a console to the last parts that fit,
/// `…launcher.consensus.etcd`.
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
