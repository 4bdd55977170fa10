//! Parses etcd's log lines.
//!
//! etcd writes one JSON object per line. Its "info" lines report every step of every component and
//! only help with debugging, so they become "debug" here; otherwise the node's log would consist of
//! them. A line that is not a JSON object (the trace of a crash) is kept whole, as a warning.
//!
//! While a member is away etcd says so many times a second, in several ways. A message that repeats
//! within [`REPEAT_INTERVAL`] becomes "debug", too, and the next one that is shown has the count:
//! the console is for what is new.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use hearth_base::logtree::Severity;
use serde_json::{Map, Value};

/// Fields that the log tree has itself, or that are not useful.
const DROPPED_FIELDS: [&str; 5] = ["level", "ts", "caller", "msg", "stacktrace"];
/// Maximum length of a field in characters; longer ones are truncated.
const LONGEST_FIELD: usize = 512;

/// Errors that belong to every start or shutdown: the message, and the end of the field `error`. etcd reports the end of
/// a server like a failure to start it, and tries to note the store's version, which it repeats until it succeeds,
/// before a new store has its first entry.
const EXPECTED: [(&str, &str); 4] = [
    (SERVING, "http: Server closed"),
    (SERVING, "mux: server closed"),
    (SERVING, "use of closed network connection"),
    (
        "failed to update storage version",
        "missing term information",
    ),
];
const SERVING: &str = "setting up serving from embedded etcd failed.";

/// A repetition within this time after a shown message is suppressed.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of remembered messages. etcd's are constants of its source.
const MOST_MESSAGE_KINDS: usize = 256;

/// One parsed line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// Severity in the log tree.
    pub severity: Severity,
    /// The message, then the fields as `name=value`.
    pub message: String,
    /// The message alone, which identifies repetitions; `None` for a line that is not etcd's JSON.
    kind: Option<String>,
    /// Whether etcd exits because of it.
    pub fatal: bool,
}

/// Parses one line. Accepts any text.
pub(crate) fn parse(line: &str) -> Line {
    let line = line.trim_end();
    let Ok(fields) = serde_json::from_str::<Map<String, Value>>(line) else {
        return Line {
            severity: Severity::Warning,
            message: line.to_owned(),
            kind: None,
            fatal: line.starts_with("panic:") || line.starts_with("fatal error:"),
        };
    };
    let level = fields.get("level").and_then(Value::as_str).unwrap_or("");
    let (severity, fatal) = match level {
        "debug" | "info" => (Severity::Debug, false),
        "error" if is_expected(&fields) => (Severity::Debug, false),
        "error" => (Severity::Error, false),
        "dpanic" | "panic" | "fatal" => (Severity::Error, true),
        _ => (Severity::Warning, false),
    };
    let mut message = match fields.get("msg") {
        Some(Value::String(text)) => text.clone(),
        _ => String::new(),
    };
    let kind = Some(message.clone());
    for (name, value) in &fields {
        if DROPPED_FIELDS.contains(&name.as_str()) {
            continue;
        }
        // Writing to a string does not fail.
        let _ = match value {
            Value::String(text) => write!(message, " {name}={}", cut(text)),
            other => write!(message, " {name}={}", cut(&other.to_string())),
        };
    }
    Line {
        severity,
        message: message.trim_start().to_owned(),
        kind,
        fatal,
    }
}

/// Whether this is the usual course of things, which etcd reports as an error ([`EXPECTED`]).
fn is_expected(fields: &Map<String, Value>) -> bool {
    let text = |name: &str| fields.get(name).and_then(Value::as_str).unwrap_or("");
    let (message, error) = (text("msg"), text("error"));
    let is_it = |(of, end): &(&str, &str)| *of == message && error.ends_with(end);
    EXPECTED.iter().any(is_it)
}

/// The messages that were shown recently.
#[derive(Debug, Default)]
pub(crate) struct Shown(HashMap<String, Kind>);

#[derive(Debug)]
struct Kind {
    last: Instant,
    held_back: u64,
}

impl Shown {
    /// Lowers the severity of a line that repeats one shown recently.
    pub(crate) fn weigh(&mut self, line: &mut Line, now: Instant) {
        let Some(name) = line.kind.as_ref().filter(|_| !line.fatal) else {
            return;
        };
        if line.severity == Severity::Debug {
            return;
        }
        if let Some(kind) = self.0.get_mut(name) {
            if now.saturating_duration_since(kind.last) < REPEAT_INTERVAL {
                kind.held_back += 1;
                line.severity = Severity::Debug;
                return;
            }
            if kind.held_back > 0 {
                // Writing to a string does not fail.
                let _ = write!(
                    line.message,
                    " ({} more since the last one)",
                    kind.held_back
                );
            }
        }
        if self.0.len() >= MOST_MESSAGE_KINDS {
            let is_recent =
                |kind: &Kind| now.saturating_duration_since(kind.last) < REPEAT_INTERVAL;
            self.0.retain(|_, kind| is_recent(kind));
        }
        if self.0.len() < MOST_MESSAGE_KINDS {
            let kind = Kind {
                last: now,
                held_back: 0,
            };
            self.0.insert(name.clone(), kind);
        }
    }
}

fn cut(text: &str) -> &str {
    match text.char_indices().nth(LONGEST_FIELD) {
        Some((at, _)) => &text[..at],
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_keeps_what_matters() {
        let line = parse(
            r#"{"level":"warn","ts":"2026-11-20T22:39:20.362Z","caller":"auth/store.go:1380","msg":"slow","took":"1s","count":3}"#,
        );
        assert_eq!(line.severity, Severity::Warning);
        assert_eq!(line.message, "slow count=3 took=1s");
        assert!(!line.fatal);
    }

    #[test]
    fn what_happens_at_every_start_and_shutdown_is_no_error() {
        let severity = |message: &str, error: &str| {
            let line = format!(r#"{{"level":"error","msg":"{message}","error":"{error}"}}"#);
            parse(&line).severity
        };
        for (message, error) in EXPECTED {
            assert_eq!(severity(message, error), Severity::Debug);
            assert_eq!(severity("something else", error), Severity::Error);
        }
        assert_eq!(
            severity(
                SERVING,
                "accept unix client:0: use of closed network connection"
            ),
            Severity::Debug
        );
        assert_eq!(
            severity(SERVING, "bind: address already in use"),
            Severity::Error
        );
    }

    #[test]
    fn etcd_info_is_detail_here_and_its_end_is_an_error() {
        assert_eq!(
            parse(r#"{"level":"info","msg":"x"}"#).severity,
            Severity::Debug
        );
        let fatal = parse(r#"{"level":"fatal","msg":"no space","error":"ENOSPC"}"#);
        assert_eq!((fatal.severity, fatal.fatal), (Severity::Error, true));
        assert_eq!(fatal.message, "no space error=ENOSPC");
        assert!(parse("panic: runtime error: index out of range\n").fatal);
    }

    #[test]
    fn what_repeats_itself_is_shown_once_in_a_while() {
        let mut shown = Shown::default();
        let begin = Instant::now();
        let mut told = |text: &str, seconds| {
            let mut line = parse(text);
            shown.weigh(&mut line, begin + Duration::from_secs(seconds));
            (line.severity, line.message)
        };
        let slow = r#"{"level":"warn","msg":"slow","took":"1s"}"#;
        let slower = r#"{"level":"warn","msg":"slow","took":"2s"}"#;
        let warning = |text: &str| (Severity::Warning, text.to_owned());
        assert_eq!(told(slow, 0), warning("slow took=1s"));
        for second in 1..10 {
            assert_eq!(
                told(slower, second),
                (Severity::Debug, "slow took=2s".to_owned())
            );
        }
        let other = r#"{"level":"error","msg":"other"}"#;
        assert_eq!(told(other, 9).0, Severity::Error);
        assert_eq!(
            told(slower, 10),
            warning("slow took=2s (9 more since the last one)")
        );
        assert_eq!(told(slow, 20), warning("slow took=1s"));

        // Fatal lines and traces are always shown.
        for line in [r#"{"level":"fatal","msg":"end"}"#, "goroutine 1"] {
            for _ in 0..3 {
                assert_ne!(told(line, 21).0, Severity::Debug);
            }
        }
        // The number of remembered messages is bounded.
        for kind in 0..1000 {
            told(&format!(r#"{{"level":"warn","msg":"{kind}"}}"#), 22);
        }
        assert_eq!(told(slow, 40), warning("slow took=1s"));
        assert!(shown.0.len() <= MOST_MESSAGE_KINDS);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_text_is_a_line(text: String, field in "\\PC{0,2000}") {
            parse(&text);
            let json = serde_json::json!({ "level": text, "msg": [1], "f": field });
            let line = parse(&json.to_string());
            prop_assert!(line.message.len() < 4 * LONGEST_FIELD + 100);
        }
    }
}
