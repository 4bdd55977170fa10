//! etcd's log lines, taken apart.
//!
//! etcd writes one JSON object per line. Its own "info" tells every step of
//! every component and is of use to those who look for a fault, so it becomes
//! "debug" here; a node's log would otherwise be etcd's. What is no JSON
//! object (the trace of a crash) is kept whole, as a warning.

use std::fmt::Write as _;

use hearth_base::logtree::Severity;
use serde_json::{Map, Value};

/// Fields of each line that the log tree has of itself, or nobody needs.
const DROPPED: [&str; 5] = ["level", "ts", "caller", "msg", "stacktrace"];
/// A single field longer than this is cut.
const LONGEST_FIELD: usize = 512;

/// One line.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// By our scale.
    pub severity: Severity,
    /// The message, then the fields as `name=value`.
    pub message: String,
    /// Whether etcd gives up because of it.
    pub fatal: bool,
}

/// Takes one line apart. Any text is good.
pub fn parse(line: &str) -> Line {
    let line = line.trim_end();
    let Ok(fields) = serde_json::from_str::<Map<String, Value>>(line) else {
        return Line {
            severity: Severity::Warning,
            message: line.to_owned(),
            fatal: line.starts_with("panic:") || line.starts_with("fatal error:"),
        };
    };
    let level = fields.get("level").and_then(Value::as_str).unwrap_or("");
    let (severity, fatal) = match level {
        "debug" | "info" => (Severity::Debug, false),
        "error" => (Severity::Error, false),
        "dpanic" | "panic" | "fatal" => (Severity::Error, true),
        _ => (Severity::Warning, false),
    };
    let mut message = match fields.get("msg") {
        Some(Value::String(text)) => text.clone(),
        _ => String::new(),
    };
    for (name, value) in &fields {
        if DROPPED.contains(&name.as_str()) {
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
        fatal,
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
