//! What is damaged of etcd's data on the disk.
//!
//! etcd checks its log by checksums and its database by the structure of its pages, when it starts. It repairs a log whose
//! last record was torn by a power cut (what only looks like that is found before it starts, see
//! [`log_lengths`](super::log_lengths)), and makes a database that is missing or truncated from the log, as far as that
//! reaches back. Of anything else it only says what it came upon, and it says that again after each start. These words are
//! those of etcd 3.7 and bbolt 1.5 after single bits were changed. Where they are not recognised, etcd's end is reported as
//! any other.
//!
//! A changed value in the database is nothing that one member could notice. Members notice it together, see
//! [`corruption`](super::corruption).

use std::fmt;

/// What is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The write-ahead log.
    Log,
    /// The structure of the database.
    Database,
    /// Values in the database.
    Values,
}

/// Parts of fatal log lines. protobuf writes one of two kinds of spaces after its name.
const WORDS: [(&str, Damage); 7] = [
    ("walpb: crc mismatch", Damage::Log),
    ("cannot parse invalid wire-format data", Damage::Log),
    ("failed to read WAL, cannot be repaired", Damage::Log),
    // The leader knows that this member has acknowledged more.
    (
        "Was the raft log corrupted, truncated, or lost?",
        Damage::Log,
    ),
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

    /// In CamelCase, for programs.
    pub const fn reason(self) -> &'static str {
        match self {
            Damage::Log => "LogDamaged",
            Damage::Database => "DatabaseDamaged",
            Damage::Values => "ValuesDamaged",
        }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Damage::Log => "etcd's log is damaged",
            Damage::Database => "etcd's database is damaged",
            Damage::Values => "values in etcd's database are damaged",
        })
    }
}

/// Why etcd does not run on this node: what on its disk is damaged, in whose words, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{damage}: {words}. While other consensus members have a quorum, remove the role consensus-member from this node and \
     add it again"
)]
pub struct Damaged {
    /// What of it.
    pub damage: Damage,
    /// What was noticed.
    pub words: String,
}

/// A damage of etcd's data, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataReport {
    /// This node's data are damaged, and its etcd does not run.
    Damaged(Damaged),
    /// The members have different data, no majority of them agrees, and all of them run.
    Undecided,
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
                "failed to read WAL, cannot be repaired error=unexpected block type 258",
                Some(Damage::Log),
            ),
            (
                "tocommit(812) is out of range [lastIndex(790)]. Was the raft log corrupted, truncated, or lost?",
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
