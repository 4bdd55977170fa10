//! Control groups, version 2: who may use how much, and who belongs together.
//!
//! One tree for all controllers. A group with groups below it that have
//! controllers has no processes of its own, except for the root; so whoever
//! wants to divide the machine puts its own processes into a leaf first
//! ([`Group::enter`]) and then passes controllers down
//! ([`Group::pass_controllers_down`]).
//!
//! A group is also the only handle that nothing escapes by forking: what was
//! started in it can be killed as one ([`Group::kill`]).

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::time::{Instant, sleep};

/// Where the tree is mounted.
pub const ROOT: &str = "/sys/fs/cgroup";
/// How often an emptying group is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What went wrong with a group.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} the control group {group}")]
pub struct CgroupError {
    /// The step, as a verb.
    pub step: &'static str,
    /// The group's directory.
    pub group: PathBuf,
    /// The cause.
    pub source: io::Error,
}

/// One group. It need not exist.
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

    /// Makes it. One that is there is fine.
    pub fn make(&self) -> Result<(), CgroupError> {
        match fs::create_dir(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(self.failed("make")(error))
            }
            _ => Ok(()),
        }
    }

    /// Moves this process into it, with all its threads. Children that it has
    /// already stay where they are.
    pub fn enter(&self) -> Result<(), CgroupError> {
        self.write("cgroup.procs", "0", "enter")
    }

    /// Sets a controller's value, e.g. `cpu.weight`.
    pub fn set(&self, file: &str, value: &str) -> Result<(), CgroupError> {
        self.write(file, value, "set a value of")
    }

    /// Lets the groups below use every controller that this one has.
    pub fn pass_controllers_down(&self) -> Result<(), CgroupError> {
        let path = self.path.join("cgroup.controllers");
        let controllers = fs::read_to_string(path).map_err(self.failed("read controllers of"))?;
        for controller in controllers.split_whitespace() {
            // One by one: written together, one that is refused holds back
            // the others.
            self.write(
                "cgroup.subtree_control",
                &format!("+{controller}"),
                "pass down the controllers of",
            )?;
        }
        Ok(())
    }

    /// Kills all that is in it and below it. None there is fine.
    pub fn kill(&self) -> Result<(), CgroupError> {
        if !self.path.exists() {
            return Ok(());
        }
        self.write("cgroup.kill", "1", "kill")
    }

    /// Waits until nothing runs in it and below it; false if that is not so
    /// after `bound`.
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

    /// Removes it and all groups below it, which must be empty. None there is
    /// fine.
    pub fn remove(&self) -> Result<(), CgroupError> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed("look into")(error)),
        };
        for entry in entries {
            let entry = entry.map_err(self.failed("look into"))?;
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
            Err(error) => Err(self.failed("look at")(error)),
        }
    }

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

    /// A group for a test, or `None`, and says so, where none can be made.
    fn group(name: &str) -> Option<Group> {
        let root = Group::root();
        // Beside version 1 it is mounted one deeper.
        let roots = [root.child("unified"), root];
        let root = roots
            .into_iter()
            .find(|r| r.path.join("cgroup.procs").exists());
        let name = format!("hearth-test-{}-{name}", std::process::id());
        let group = root.map(|root| root.child(&name));
        let group = group.filter(|group| group.make().is_ok());
        if group.is_none() {
            eprintln!("skipped: this needs the right to make control groups");
        }
        group
    }

    #[tokio::test]
    async fn what_is_in_a_group_is_killed_as_one() {
        let Some(group) = group("kill") else { return };
        let below = group.child("below");
        below.make().unwrap();
        // It enters before it forks: what is forked before stays outside.
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
        // A file keeps the last write only; the kernel's takes each.
        let written = fs::read_to_string(directory.path().join("cgroup.subtree_control"));
        assert_eq!(written.unwrap(), "+memory");
    }

    #[test]
    fn an_error_names_step_and_group() {
        let directory = tempfile::tempdir().unwrap();
        let error = Group::at(&directory.path().join("a/b")).make().unwrap_err();
        assert!(error.to_string().contains("make the control group"));
        assert!(error.to_string().ends_with("a/b"), "{error}");
    }
}
