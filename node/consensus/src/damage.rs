//! What etcd's last words say of the data on the disk.
//!
//! etcd checks its log by checksums and its database by the structure of its pages, when it starts. It repairs a log whose
//! last record was torn by a power cut, and makes a database that is missing or truncated from the log, as far as that
//! reaches back. Of anything else it only says what it came upon, and it says that again after each start. A changed
//! value in the database is noticed by nobody.
//!
//! The words are those of etcd 3.7 and bbolt 1.5 after single bits were changed. Where they are not recognised, etcd's end
//! is reported as any other.

use std::fmt;

/// What is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The write-ahead log.
    Log,
    /// The database.
    Database,
}

/// Parts of fatal log lines. protobuf writes one of two kinds of spaces after its name.
const WORDS: [(&str, Damage); 5] = [
    ("walpb: crc mismatch", Damage::Log),
    ("cannot parse invalid wire-format data", Damage::Log),
    ("failed to open database", Damage::Database),
    ("assertion failed: page ", Damage::Database),
    ("failed to get all reachable pages", Damage::Database),
];

impl Damage {
    /// Recognises a fatal log line.
    pub(crate) fn of(line: &str) -> Option<Self> {
        let found = WORDS.iter().find(|(words, _)| line.contains(words));
        found.map(|(_, damage)| *damage)
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Damage::Log => "log",
            Damage::Database => "database",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_names_the_data_is_damage() {
        for (line, damage) in [
            (
                "discovery failed error=walpb: crc mismatch: expected: 65acdfa8 computed: 11a230aa: in file \
                 '0000000000000000-0000000000000000.wal' at position: 58688",
                Some(Damage::Log),
            ),
            (
                "discovery failed error=proto:\u{a0}cannot parse invalid wire-format data",
                Some(Damage::Log),
            ),
            (
                "failed to open database error=version mismatch path=/member/snap/db",
                Some(Damage::Database),
            ),
            (
                "panic: assertion failed: page 10: has unexpected type/flags: 3",
                Some(Damage::Database),
            ),
            ("panic: runtime error: invalid memory address", None),
            ("discovery failed error=permission denied", None),
        ] {
            assert_eq!(Damage::of(line), damage, "{line}");
        }
    }
}
