//! Control groups, version 2: limit resources and keep track of processes.
//!
//! All controllers share one tree. A group with child groups that use controllers must not contain
//! processes, except for the root. So a process that wants to divide resources first moves itself
//! into a leaf ([`Group::enter`]) and then enables controllers for child groups
//! ([`Group::pass_controllers_down`]).
//!
//! A group is also the only handle from which no process escapes by forking: all processes in it
//! can be killed at once ([`Group::kill`]).

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use tokio::time::{Instant, sleep};

/// The mount point of the tree.
pub const ROOT: &str = "/sys/fs/cgroup";
/// Interval at which a group is polled until it is empty.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// An operation on a group failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} the control group {group}")]
pub struct CgroupError {
    /// The operation, as a verb.
    pub step: &'static str,
    /// The group's directory.
    pub group: PathBuf,
    /// The error of the operating system.
    pub source: io::Error,
}

/// A control group, which need not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    path: PathBuf,
}

impl Group {
    /// The root of the tree.
    pub fn root() -> Self {
        Self::at(Path::new(ROOT))
    }

    /// The group with this directory.
    pub fn at(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    /// A group below this one.
    pub fn child(&self, name: &str) -> Self {
        Self {
            path: self.path.join(name),
        }
    }

    /// Creates the group. Succeeds if it exists.
    pub fn make(&self) -> Result<(), CgroupError> {
        match fs::create_dir(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(self.failed("create")(error))
            }
            _ => Ok(()),
        }
    }

    /// Moves this process with all its threads into the group. Existing children stay in their
    /// group.
    pub fn enter(&self) -> Result<(), CgroupError> {
        self.write("cgroup.procs", "0", "enter")
    }

    /// Sets a value of a controller, e.g. `cpu.weight`.
    pub fn set(&self, file: &str, value: &str) -> Result<(), CgroupError> {
        self.write(file, value, "set a value of")
    }

    /// Enables every controller of this group for its child groups.
    pub fn pass_controllers_down(&self) -> Result<(), CgroupError> {
        let path = self.path.join("cgroup.controllers");
        let controllers =
            fs::read_to_string(path).map_err(self.failed("read the controllers of"))?;
        for controller in controllers.split_whitespace() {
            // One by one: if they were written together, one failure would reject all of them.
            self.write(
                "cgroup.subtree_control",
                &format!("+{controller}"),
                "enable the controllers of",
            )?;
        }
        Ok(())
    }

    /// Kills all processes in the group and below it. Succeeds if the group does not exist.
    pub fn kill(&self) -> Result<(), CgroupError> {
        if !self.path.exists() {
            return Ok(());
        }
        self.write("cgroup.kill", "1", "kill")
    }

    /// Waits until the group and its child groups have no processes; returns false on timeout.
    pub async fn empties_within(&self, bound: Duration) -> Result<bool, CgroupError> {
        let end = Instant::now() + bound;
        while self.is_populated()? {
            if Instant::now() >= end {
                return Ok(false);
            }
            sleep(LOOK_AGAIN).await;
        }
        Ok(true)
    }

    /// Removes the group and its child groups, which must be empty. Succeeds if it does not exist.
    pub fn remove(&self) -> Result<(), CgroupError> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed("list")(error)),
        };
        for entry in entries {
            let entry = entry.map_err(self.failed("list"))?;
            if entry.path().is_dir() {
                Self::at(&entry.path()).remove()?;
            }
        }
        fs::remove_dir(&self.path).map_err(self.failed("remove"))
    }

    fn is_populated(&self) -> Result<bool, CgroupError> {
        match fs::read_to_string(self.path.join("cgroup.events")) {
            Ok(events) => Ok(events.lines().any(|line| line == "populated 1")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.failed("read the state of")(error)),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a control file of the kernel")]
    fn write(&self, file: &str, value: &str, step: &'static str) -> Result<(), CgroupError> {
        fs::write(self.path.join(file), value).map_err(self.failed(step))
    }

    fn failed(&self, step: &'static str) -> impl FnOnce(io::Error) -> CgroupError {
        let group = self.path.clone();
        move |source| CgroupError {
            step,
            group,
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Creates a group for a test; prints a message and returns `None` if that is not possible.
    fn group(name: &str) -> Option<Group> {
        let root = Group::root();
        // On hosts that also use version 1 it is mounted one level deeper.
        let roots = [root.child("unified"), root];
        let root = roots
            .into_iter()
            .find(|r| r.path.join("cgroup.procs").exists());
        let name = format!("hearth-test-{}-{name}", std::process::id());
        let group = root.map(|root| root.child(&name));
        let group = group.filter(|group| group.make().is_ok());
        if group.is_none() {
            eprintln!("skipped: creating control groups is not permitted");
        }
        group
    }

    #[tokio::test]
    async fn what_is_in_a_group_is_killed_as_one() {
        let Some(group) = group("kill") else { return };
        let below = group.child("below");
        below.make().unwrap();
        // It enters the group before it forks: an earlier child would stay outside.
        let enter = below.path.join("cgroup.procs");
        let mut child = Command::new("/bin/sh")
            .args(["-c", "echo $$ > \"$0\"; sleep 1000 & sleep 1000"])
            .arg(&enter)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let entered = async {
            while !group.is_populated().unwrap() {
                sleep(LOOK_AGAIN).await;
            }
        };
        let bound = Duration::from_secs(20);
        tokio::time::timeout(bound, entered).await.unwrap();
        assert!(!group.empties_within(Duration::ZERO).await.unwrap());
        group.kill().unwrap();
        child.wait().unwrap();
        assert!(group.empties_within(Duration::from_secs(20)).await.unwrap());
        group.remove().unwrap();
        assert!(!group.path.exists());
    }

    #[tokio::test]
    async fn a_group_that_is_not_there_is_empty() {
        let directory = tempfile::tempdir().unwrap();
        let group = Group::at(&directory.path().join("none"));
        group.kill().unwrap();
        assert!(group.empties_within(Duration::ZERO).await.unwrap());
        group.remove().unwrap();
    }

    #[test]
    fn every_controller_is_passed_down() {
        let directory = tempfile::tempdir().unwrap();
        let group = Group::at(directory.path());
        fs::write(directory.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        group.pass_controllers_down().unwrap();
        // A file keeps only the last write; the kernel accepts each.
        let written = fs::read_to_string(directory.path().join("cgroup.subtree_control"));
        assert_eq!(written.unwrap(), "+memory");
    }

    #[test]
    fn an_error_names_step_and_group() {
        let directory = tempfile::tempdir().unwrap();
        let error = Group::at(&directory.path().join("a/b")).make().unwrap_err();
        assert!(error.to_string().contains("create the control group"));
        assert!(error.to_string().ends_with("a/b"), "{error}");
    }
}
