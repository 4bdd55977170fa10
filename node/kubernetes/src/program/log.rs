//! The log lines of the bundle's programs, taken apart.
//!
//! | dialect | a line |
//! |---|---|
//! | klog | `W1121 19:20:00.123456    1234 file.go:56] message` |
//! | logrus | `time="…" level=warning msg="message" key=value` |
//!
//! Kubernetes warns of much that passes by itself, above all while its parts
//! look for each other, so a word of a program weighs one step less here than
//! there: its "error" is a warning of the node, its "info" a detail. Only what
//! makes a program give up is an error. A line of neither form (the trace of a
//! crash, a library's own print) is kept whole.

use hearth_base::logtree::Severity;

/// How a program writes its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Kubernetes' programs.
    Klog,
    /// containerd.
    Logrus,
}

/// One line.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// By our scale.
    pub severity: Severity,
    /// Without time and source.
    pub message: String,
    /// Whether the program gives up because of it.
    pub fatal: bool,
}

impl Dialect {
    /// Takes one line apart. Any text is good.
    pub fn parse(self, line: &str) -> Line {
        let line = line.trim_end();
        let known = match self {
            Self::Klog => klog(line),
            Self::Logrus => logrus(line),
        };
        let crash = || line.starts_with("panic:") || line.starts_with("fatal error:");
        let (severity, message, fatal) = known.unwrap_or_else(|| {
            // Commands that give up before they log say so plainly.
            let fatal = crash() || line.starts_with("Error:") || line.starts_with("error:");
            let severity = if fatal {
                Severity::Error
            } else {
                Severity::Info
            };
            (severity, line, fatal)
        });
        Line {
            severity,
            message: message.to_owned(),
            fatal,
        }
    }
}

fn klog(line: &str) -> Option<(Severity, &str, bool)> {
    let (head, message) = line.split_once("] ")?;
    let mut head = head.chars();
    let (severity, fatal) = match head.next()? {
        'I' => (Severity::Debug, false),
        'W' => (Severity::Info, false),
        'E' => (Severity::Warning, false),
        'F' => (Severity::Error, true),
        _ => return None,
    };
    let date = head.by_ref().take(4);
    let is_date = date.filter(char::is_ascii_digit).count() == 4;
    (is_date && head.next() == Some(' ')).then_some((severity, message, fatal))
}

fn logrus(line: &str) -> Option<(Severity, &str, bool)> {
    let (_, rest) = line.split_once("level=")?;
    let (level, message) = rest.split_once(' ')?;
    let (severity, fatal) = match level {
        "trace" | "debug" | "info" => (Severity::Debug, false),
        "warning" => (Severity::Info, false),
        "error" => (Severity::Warning, false),
        "fatal" | "panic" => (Severity::Error, true),
        _ => return None,
    };
    Some((severity, message, fatal))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_klog_line_keeps_what_matters() {
        let line =
            Dialect::Klog.parse("W1121 19:20:00.123456    1234 server.go:56] it is slow [1] x");
        assert_eq!(line.severity, Severity::Info);
        assert_eq!(line.message, "it is slow [1] x");
        let line = Dialect::Klog.parse("F1121 19:20:00.123456       1 a.go:1] no such flag");
        assert_eq!((line.severity, line.fatal), (Severity::Error, true));
    }

    #[test]
    fn a_logrus_line_keeps_its_fields() {
        let line = Dialect::Logrus.parse(
            r#"time="2026-11-21T19:20:00Z" level=error msg="no network" error="cni: empty""#,
        );
        assert_eq!(line.severity, Severity::Warning);
        assert_eq!(line.message, r#"msg="no network" error="cni: empty""#);
    }

    #[test]
    fn what_is_no_log_line_stays_whole() {
        for dialect in [Dialect::Klog, Dialect::Logrus] {
            let line = dialect.parse("panic: runtime error: index out of range");
            assert!(line.fatal);
            let line = dialect.parse("Flag --port has been deprecated, see [docs] for why");
            assert_eq!(line.severity, Severity::Info);
            assert_eq!(
                line.message,
                "Flag --port has been deprecated, see [docs] for why"
            );
        }
        assert!(Dialect::Klog.parse("Error: unknown flag: --x").fatal);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn any_text_is_a_line(text: String) {
            for dialect in [Dialect::Klog, Dialect::Logrus] {
                prop_assert!(dialect.parse(&text).message.len() <= text.len());
            }
        }
    }
}
