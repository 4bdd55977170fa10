//! Dates in messages, in UTC.

use std::time::SystemTime;

use time::OffsetDateTime;

/// The date in UTC, as `2026-11-28`.
pub fn date(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    let seconds = since.unwrap_or_default().as_secs();
    let known = i64::try_from(seconds).map(OffsetDateTime::from_unix_timestamp);
    match known {
        Ok(Ok(time)) => time.date().to_string(),
        // After the year 9999.
        _ => format!("{seconds} seconds after 1970"),
    }
}

/// Date and time in UTC, as `2026-11-28T06:12:53Z`.
pub fn date_and_time(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    let of_day = since.unwrap_or_default().as_secs() % (24 * 3600);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{}T{hour:02}:{minute:02}:{second:02}Z", date(time))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_date_is_one() {
        assert_eq!(date(at(0)), "1970-01-01");
        assert_eq!(date(at(2_840_140_800)), "2060-01-01");
        assert_eq!(date_and_time(at(1_795_846_373)), "2026-11-28T06:12:53Z");
        assert_eq!(
            date(at(u64::MAX >> 1)),
            "9223372036854775807 seconds after 1970"
        );
    }
}
