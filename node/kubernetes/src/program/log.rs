//! Parses the log lines of the bundle's programs.
//!
//! | format | example |
//! |---|---|
//! | klog | `W1121 19:20:00.123456    1234 file.go:56] message` |
//! | logrus | `time="…" level=warning msg="message" key=value` |
//!
//! Kubernetes logs warnings about many temporary conditions, above all while its components are
//! starting. So the severity is reduced by one step: "error" becomes a warning of the node, "info"
//! becomes debug. Only messages with which a program exits are errors. A line in another format
//! (the trace of a crash, the output of a library) is kept unchanged.

use hearth_base::logtree::Severity;

/// The log format of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// klog, of the Kubernetes programs.
    Klog,
    /// logrus, of containerd.
    Logrus,
}

/// A parsed line.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// Severity in the node's log.
    pub severity: Severity,
    /// The message, without time and source.
    pub message: String,
    /// Whether the program exits because of it.
    pub fatal: bool,
}

impl LogFormat {
    /// Parses one line. Any text is accepted.
    pub fn parse(self, line: &str) -> Line {
        let line = line.trim_end();
        let known = match self {
            Self::Klog => klog(line),
            Self::Logrus => logrus(line),
        };
        let crash = || line.starts_with("panic:") || line.starts_with("fatal error:");
        let (severity, message, fatal) = known.unwrap_or_else(|| {
            // Errors before the logger is set up, such as of the command line, are plain text.
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
            LogFormat::Klog.parse("W1121 19:20:00.123456    1234 server.go:56] it is slow [1] x");
        assert_eq!(line.severity, Severity::Info);
        assert_eq!(line.message, "it is slow [1] x");
        let line = LogFormat::Klog.parse("F1121 19:20:00.123456       1 a.go:1] no such flag");
        assert_eq!((line.severity, line.fatal), (Severity::Error, true));
    }

    #[test]
    fn a_logrus_line_keeps_its_fields() {
        let line = LogFormat::Logrus.parse(
            r#"time="2026-11-21T19:20:00Z" level=error msg="no network" error="cni: empty""#,
        );
        assert_eq!(line.severity, Severity::Warning);
        assert_eq!(line.message, r#"msg="no network" error="cni: empty""#);
    }

    #[test]
    fn what_is_no_log_line_stays_whole() {
        for log_format in [LogFormat::Klog, LogFormat::Logrus] {
            let line = log_format.parse("panic: runtime error: index out of range");
            assert!(line.fatal);
            let line = log_format.parse("Flag --port has been deprecated, see [docs] for why");
            assert_eq!(line.severity, Severity::Info);
            assert_eq!(
                line.message,
                "Flag --port has been deprecated, see [docs] for why"
            );
        }
        assert!(LogFormat::Klog.parse("Error: unknown flag: --x").fatal);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn any_text_is_a_line(text: String) {
            for log_format in [LogFormat::Klog, LogFormat::Logrus] {
                prop_assert!(log_format.parse(&text).message.len() <= text.len());
            }
        }
    }
}
