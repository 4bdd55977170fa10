//! The record of a machine between two launches.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use hearth_process::process::Identity;

use super::ClusterError;
use crate::network::PortForward;

const FILE: &str = "machine.json";

/// Version of the format; files with another version are rejected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "u32", into = "u32")]
struct Version;

impl From<Version> for u32 {
    fn from(_: Version) -> Self {
        1
    }
}

impl TryFrom<u32> for Version {
    type Error = String;

    fn try_from(version: u32) -> Result<Self, String> {
        match version {
            1 => Ok(Self),
            other => Err(format!("version: expected 1, got {other}")),
        }
    }
}

/// A machine's record.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    version: Version,
    /// The process of the last start, which may have ended; none while it is being started.
    pub(super) process: Option<Identity>,
    /// The ports of the last start.
    pub(super) forwards: Vec<PortForward>,
}

impl Record {
    /// Reads the record in a machine's folder; `None` if there is none.
    pub(super) fn load(folder: &Path) -> Result<Option<Self>, ClusterError> {
        let path = folder.join(FILE);
        let text = match fs::read(&path) {
            // Not a folder, or one without a record.
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                return Ok(None);
            }
            text => text.map_err(ClusterError::file("read", &path))?,
        };
        let record = serde_json::from_slice(&text)
            .map_err(|source| ClusterError::Record { path, source })?;
        Ok(Some(record))
    }

    /// Writes the record, completely or not at all.
    pub(super) fn save(&self, folder: &Path) -> Result<(), ClusterError> {
        let path = folder.join(FILE);
        let save = || -> io::Result<()> {
            let text = serde_json::to_vec_pretty(self)?;
            let partial = folder.join("machine.partial");
            fs::write(&partial, text)?;
            fs::rename(&partial, &path)
        };
        save().map_err(ClusterError::file("write", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(Record::load(folder.path()).expect("absent"), None);
        let record = Record {
            version: Version,
            process: Some(Identity {
                pid: 42,
                started: u64::MAX,
                boot_id: "x".to_owned(),
            }),
            forwards: vec![PortForward {
                guest: 7835,
                host: "127.0.0.1:40000".parse().expect("an address"),
            }],
        };
        record.save(folder.path()).expect("saved");
        assert_eq!(Record::load(folder.path()).expect("read"), Some(record));
    }

    #[test]
    fn other_versions_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(
            folder.path().join(FILE),
            r#"{"version":2,"process":null,"forwards":[]}"#,
        )
        .expect("a record");
        let error = Record::load(folder.path()).expect_err("version 2");
        assert!(
            error.to_string().contains("version: expected 1, got 2"),
            "{error}"
        );
    }
}
