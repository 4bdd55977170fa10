//! The clock of a node.

use hearth_api::v1::{TimeSource, TimeStatus};
use serde::Serialize;

use super::{rfc3339, word};

/// The state of a node's clock, as it last reported it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Clock {
    source: String,
    servers: Vec<String>,
    synchronized: bool,
    /// Source minus clock, in microseconds. Null if it was never measured.
    offset_us: Option<i64>,
    /// Unix time in seconds.
    measured_at: Option<i64>,
    steps: u64,
    problem: String,
}

impl From<&TimeStatus> for Clock {
    fn from(time: &TimeStatus) -> Self {
        let is_measured = time.measured_at != 0;
        Self {
            source: word(time.source, TimeSource::as_str_name, "TIME_SOURCE_"),
            servers: time.servers.clone(),
            synchronized: time.synchronized,
            offset_us: is_measured.then_some(time.offset_us),
            measured_at: is_measured.then_some(time.measured_at),
            steps: time.steps,
            problem: time.problem.clone(),
        }
    }
}

impl Clock {
    /// Names and values for people.
    pub(super) fn rows(&self) -> [(&'static str, String); 3] {
        let state = match self.synchronized {
            true => "synchronized",
            false => "not synchronized",
        };
        let source = match self.servers.is_empty() {
            true => self.source.clone(),
            false => format!("{}: {}", self.source, self.servers.join(", ")),
        };
        let measured = self.offset_us.zip(self.measured_at).map(|(offset, at)| {
            let milliseconds = offset as f64 / 1000.0;
            let at = rfc3339(at.saturating_mul(1000));
            format!(", {milliseconds:+.3} ms at {at}")
        });
        let clock = format!("{state} ({source}){}", measured.unwrap_or_default());
        let steps = match self.steps {
            0 => String::new(),
            1 => "once in this boot".to_owned(),
            steps => format!("{steps} times in this boot"),
        };
        [
            ("clock", clock),
            ("clock was set", steps),
            ("clock problem", self.problem.clone()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(time: &TimeStatus) -> Vec<String> {
        let rows = Clock::from(time).rows().into_iter();
        let rows = rows.filter(|(_, value)| !value.is_empty());
        rows.map(|(name, value)| format!("{name}: {value}"))
            .collect()
    }

    #[test]
    fn a_clock_is_shown_with_its_source_and_what_is_wrong() {
        let good = TimeStatus {
            source: TimeSource::Dhcp.into(),
            servers: vec!["192.0.2.1".into(), "192.0.2.2".into()],
            synchronized: true,
            offset_us: -1500,
            measured_at: 1_700_000_000,
            steps: 1,
            problem: String::new(),
        };
        assert_eq!(
            rows(&good),
            [
                "clock: synchronized (DHCP: 192.0.2.1, 192.0.2.2), -1.500 ms at \
                 2023-11-14T22:13:20.000Z",
                "clock was set: once in this boot",
            ]
        );
        let none = TimeStatus {
            source: TimeSource::None.into(),
            problem: "nobody".into(),
            ..TimeStatus::default()
        };
        assert_eq!(
            rows(&none),
            ["clock: not synchronized (NONE)", "clock problem: nobody"]
        );
    }
}
