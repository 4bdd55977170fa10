//! Log entries as they are printed.

use hearth_api::v1::{LogEntry, LogSeverity};
use serde::Serialize;

use super::word;
use crate::table::printable;

/// One entry of a node's log.
#[derive(Debug, Serialize)]
pub(crate) struct LogLine {
    /// RFC 3339, UTC, of the node's clock.
    time: String,
    dn: String,
    severity: String,
    message: String,
}

impl From<&LogEntry> for LogLine {
    fn from(entry: &LogEntry) -> Self {
        Self {
            time: rfc3339(entry.time_ms),
            dn: entry.dn.clone(),
            severity: word(entry.severity, LogSeverity::as_str_name, "LOG_SEVERITY_"),
            message: entry.message.clone(),
        }
    }
}

impl LogLine {
    /// One line of text, for people.
    pub(crate) fn text(&self) -> String {
        format!(
            "{} {:7} {}: {}\n",
            self.time,
            self.severity,
            printable(&self.dn),
            printable(&self.message)
        )
    }
}

/// Formats Unix time in milliseconds as RFC 3339, using the 400-year cycle of the calendar.
pub(crate) fn rfc3339(unix_ms: i64) -> String {
    let (seconds, ms) = (unix_ms.div_euclid(1000), unix_ms.rem_euclid(1000));
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years that begin in March have their leap day at the end. There are 719468 days between
    // 1 March of the year 0 and the epoch.
    let day = days + 719_468;
    let (cycle, day) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = year + 400 * cycle + next;
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{ms:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (951_868_799, "2000-02-29T23:59:59.000Z"),
            (1_709_164_800, "2024-02-29T00:00:00.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
            (-1, "1969-12-31T23:59:59.000Z"),
        ] {
            assert_eq!(rfc3339(seconds * 1000), date);
        }
        assert_eq!(rfc3339(1_234), "1970-01-01T00:00:01.234Z");
        // No number that a node may send overflows.
        for wild in [i64::MIN, i64::MAX] {
            assert!(rfc3339(wild).ends_with('Z'));
        }
    }
}
