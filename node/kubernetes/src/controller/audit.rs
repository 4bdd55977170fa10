//! The audit log of the API server: who asked for what, and what came of it.
//!
//! The API server writes it, one JSON object per line, to files on the data partition, of which it keeps
//! [`FILES`] of [`FILE_MEGABYTES`]; nothing is written to etcd. What is written last is copied into the
//! node's log, under the name of this runnable, so that `hearthctl node logs` shows it as any other log; after a
//! boot, too.
//!
//! The policy leaves out what programs of the cluster itself read, and what they report all the time:
//! leases, events, the status of nodes and pods. Of secrets, config maps and tokens the content is never
//! recorded, whatever the level.
//!
//! A user who can reach the files of the node is not one of those that this log is about: it does not protect
//! itself against root of the machine. Whoever needs that collects it from there.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_api::v1::AuditLevel;
use hearth_base::logtree::{LogTree, Severity};
use hearth_base::supervisor::{Context, Outcome};
use hearth_sys::files::{self, FileError};
use serde_json::{Value, json};
use tokio::time::sleep;

/// Size of a file at which the API server begins another one, in MB.
const FILE_MEGABYTES: u32 = 16;
/// Number of files, the current one included.
const FILES: u32 = 4;
/// How much of the current file is copied at first, in bytes: as much as the log keeps of one name.
const COPIED_AT_FIRST: u64 = 1 << 20;
/// Interval between two looks at the file. Writers notify nobody.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Flags of the API server for this log; none if nothing is recorded.
pub(super) fn flags(
    level: AuditLevel,
    policy: PathBuf,
    file: PathBuf,
) -> Vec<(&'static str, PathBuf)> {
    if level == AuditLevel::None {
        return Vec::new();
    }
    vec![
        ("audit-policy-file", policy),
        ("audit-log-path", file),
        ("audit-log-maxsize", FILE_MEGABYTES.to_string().into()),
        ("audit-log-maxbackup", (FILES - 1).to_string().into()),
    ]
}

/// The level of a setting; a cluster that was founded before there was the setting has the default.
pub(super) fn level(setting: AuditLevel) -> AuditLevel {
    match setting {
        AuditLevel::Unspecified => AuditLevel::Metadata,
        level => level,
    }
}

/// The audit policy: `level` is that of requests that change something.
pub(super) fn policy(level: AuditLevel) -> Value {
    let level = match level {
        AuditLevel::Request => "Request",
        AuditLevel::RequestResponse => "RequestResponse",
        AuditLevel::None | AuditLevel::Unspecified | AuditLevel::Metadata => "Metadata",
    };
    let reads = json!(["get", "list", "watch"]);
    let of_core = |resources: &[&str]| json!([{ "group": "", "resources": resources }]);
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "omitManagedFields": true,
        "rules": [
            { "level": "None", "nonResourceURLs": [
                "/healthz*", "/livez*", "/readyz*", "/version", "/openapi*", "/metrics",
            ] },
            { "level": "None", "resources": [
                { "group": "coordination.k8s.io", "resources": ["leases"] },
                { "group": "", "resources": ["events"] },
                { "group": "events.k8s.io", "resources": ["events"] },
            ] },
            { "level": "None", "verbs": reads, "users": [
                "system:apiserver", "system:kube-controller-manager", "system:kube-scheduler",
                "system:kube-proxy", "hearth:reconciler",
            ] },
            { "level": "None", "verbs": reads, "userGroups": ["system:serviceaccounts:kube-system"] },
            { "level": "Metadata", "resources": [
                { "group": "", "resources": ["secrets", "configmaps", "serviceaccounts/token"] },
                { "group": "authentication.k8s.io", "resources": ["tokenreviews"] },
            ] },
            { "level": "None", "verbs": reads, "userGroups": ["system:nodes", "hearth:nodes"] },
            { "level": "None", "userGroups": ["system:nodes"],
              "resources": of_core(&["nodes/status", "pods/status"]) },
            { "level": "Metadata", "verbs": reads },
            { "level": level },
        ],
    })
}

/// Where the log is, and where it is copied to.
pub(super) struct Worker {
    pub file: PathBuf,
    /// Whose the directory is; `None`: of this process.
    pub user: Option<u32>,
    pub log_tree: LogTree,
}

impl Worker {
    /// Creates the directory for the API server.
    pub(super) fn prepare(&self) -> Result<(), AuditError> {
        let Some(directory) = self.file.parent() else {
            return Ok(());
        };
        files::create_dir_durably(directory, 0o700)?;
        std::os::unix::fs::chown(directory, self.user, self.user).map_err(AuditError::Owner)
    }
}

/// Why there can be no audit log.
#[derive(Debug, thiserror::Error)]
pub(super) enum AuditError {
    #[error("cannot create the directory of the audit log")]
    Directory(#[from] FileError),
    #[error("cannot give the directory of the audit log to the API server")]
    Owner(#[source] io::Error),
}

/// Copies the file into the node's log.
pub(super) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let name = ctx.name().to_owned();
    let mut follower = Follower::new(&worker.file);
    ctx.healthy();
    ctx.until_cancelled(async {
        loop {
            follower.read(|line| worker.log_tree.append_raw(&name, Severity::Info, line))?;
            sleep(LOOK_EVERY).await;
        }
    })
    .await
}

/// Reads a file that somebody else appends to, and now and then replaces by a new one.
struct Follower {
    path: PathBuf,
    open: Option<File>,
    /// The beginning of a line whose end is not written yet.
    rest: Vec<u8>,
}

impl Follower {
    fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            open: None,
            rest: Vec::new(),
        }
    }

    /// Passes the complete lines that have been written since the last call.
    fn read(&mut self, mut line: impl FnMut(&str)) -> io::Result<()> {
        loop {
            if self.open.is_none() && !self.begin()? {
                return Ok(());
            }
            if let Some(file) = &mut self.open {
                file.read_to_end(&mut self.rest)?;
            }
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                line(&String::from_utf8_lossy(&self.rest[..end]));
                self.rest.drain(..=end);
            }
            if !self.is_replaced()? {
                return Ok(());
            }
            // Nothing is appended to the old one any more, and all of it has been read.
            self.open = None;
            self.rest.clear();
        }
    }

    /// Opens the file, at a line not too far from its end. Returns false if there is none.
    fn begin(&mut self) -> io::Result<bool> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let skipped = file.metadata()?.len().saturating_sub(COPIED_AT_FIRST);
        if skipped > 0 {
            file.seek(SeekFrom::Start(skipped))?;
            let mut part = Vec::new();
            file.read_to_end(&mut part)?;
            let line = part.iter().position(|byte| *byte == b'\n');
            self.rest = part.split_off(line.map_or(part.len(), |end| end + 1));
        }
        self.open = Some(file);
        Ok(true)
    }

    /// Whether there is another file at the path than the open one.
    fn is_replaced(&self) -> io::Result<bool> {
        let Some(open) = &self.open else {
            return Ok(false);
        };
        match std::fs::metadata(&self.path) {
            Ok(found) => Ok(found.ino() != open.metadata()?.ino()),
            // Renamed; the new one is about to be created.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_replaced_file_is_read_to_its_end_and_the_next_from_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let mut follower = Follower::new(&path);
        let seen = |follower: &mut Follower| {
            let mut lines = Vec::new();
            follower.read(|line| lines.push(line.to_owned())).unwrap();
            lines
        };
        assert!(seen(&mut follower).is_empty());
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\ntw").unwrap();
        assert_eq!(seen(&mut follower), ["one"]);
        assert!(seen(&mut follower).is_empty());
        file.write_all(b"o\n").unwrap();
        std::fs::rename(&path, folder.path().join("audit-1.log")).unwrap();
        assert_eq!(seen(&mut follower), ["two"]);
        file.write_all(b"three\n").unwrap();
        std::fs::write(&path, "four\nfive\n").unwrap();
        assert_eq!(seen(&mut follower), ["three", "four", "five"]);
    }

    #[test]
    fn of_a_large_file_the_last_lines_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let lines: Vec<String> = (0..30_000).map(|n| format!("{n:0>63}")).collect();
        std::fs::write(&path, lines.join("\n") + "\n").unwrap();
        let mut seen = Vec::new();
        let mut follower = Follower::new(&path);
        follower.read(|line| seen.push(line.to_owned())).unwrap();
        let expected = COPIED_AT_FIRST as usize / 64 - 1;
        assert_eq!(seen, lines[lines.len() - expected..]);
    }

    #[test]
    fn no_level_records_what_is_secret() {
        for level in [AuditLevel::Request, AuditLevel::RequestResponse] {
            let policy = policy(level);
            let rules = policy["rules"].as_array().unwrap();
            let of_secrets = rules.iter().position(|rule| {
                let resources = rule["resources"].to_string();
                rule["level"] == "Metadata" && resources.contains("\"secrets\"")
            });
            let with_content = rules.iter().position(|rule| {
                let level = rule["level"].as_str().unwrap();
                level.starts_with("Request")
            });
            assert!(of_secrets.unwrap() < with_content.unwrap());
        }
        let none = flags(AuditLevel::None, PathBuf::new(), PathBuf::new());
        assert!(none.is_empty());
    }
}
