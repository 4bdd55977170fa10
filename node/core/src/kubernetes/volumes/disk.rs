//! The directories of volumes, and their limits.
//!
//! ```text
//! volumes/             root alone: pods see theirs through the kubelet's mounts
//! volumes/pvc-UUID     a volume, anybody's: whoever sees it may use it
//! volumes/.new-NAME    one that is being made
//! volumes/.old-NAME    one that is being removed
//! ```
//!
//! A directory has its name only when its quota is set, and loses it before
//! anything in it is removed; so after a power cut a name that is there means a
//! whole volume, and what begins with a dot is rubbish.
//!
//! Limits are XFS project quotas: the directory bears a project's number, what
//! is made in it inherits the number, and the file system counts. The number is
//! kept nowhere else: that of a new volume is the lowest that no directory
//! bears. Where the file system has no quotas, volumes are made all the same,
//! and the node says that they have no limits.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use hearth_base::sys::files::{self, FileError};
use hearth_base::sys::quota::{self, QuotaError};
use hearth_base::sys::tree;

use super::VolumeName;

/// The first project of a volume; those before it are nobody's.
const FIRST_PROJECT: u32 = 1000;
const PRIVATE: u32 = 0o700;
/// Pods run as anybody.
const ANYBODY: u32 = 0o777;
const NEW: &str = ".new-";
const OLD: &str = ".old-";

/// Why a volume is not on the disk, or not gone.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The directory of all volumes.
    #[error(transparent)]
    File(#[from] FileError),
    /// One step failed.
    #[error("{step} {path}")]
    Step {
        /// As a verb.
        step: &'static str,
        /// What it was done to.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The limit.
    #[error("limit {path}")]
    Quota {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: QuotaError,
    },
}

fn failed<'a>(step: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> DiskError + 'a {
    move |source| DiskError::Step {
        step,
        path: path.to_owned(),
        source,
    }
}

/// The directory of all volumes.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    /// Why there are no quotas.
    without: Option<QuotaError>,
    /// Numbers of projects are given one after the other.
    giving: Mutex<()>,
}

impl Disk {
    /// Makes it if there is none, and clears away what was left half done.
    pub fn open(path: &Path) -> Result<Self, DiskError> {
        files::create_dir_durably(path, PRIVATE)?;
        let directory = File::open(path).map_err(failed("open", path))?;
        let disk = Self {
            path: path.to_owned(),
            without: quota::available(&directory).err(),
            giving: Mutex::new(()),
        };
        for name in disk.names()? {
            if name.starts_with(NEW) || name.starts_with(OLD) {
                disk.clear(&path.join(name))?;
            }
        }
        Ok(disk)
    }

    /// Why volumes have no limits here; `None` if they have.
    pub fn without_quotas(&self) -> Option<&QuotaError> {
        self.without.as_ref()
    }

    /// The volumes that are there.
    pub fn list(&self) -> Result<Vec<VolumeName>, DiskError> {
        let names = self.names()?;
        Ok(names
            .iter()
            .filter_map(|name| VolumeName::parse(name))
            .collect())
    }

    /// Makes a volume of so many bytes; tells whether there was none yet. The
    /// limit of one that is there is set again.
    pub fn ensure(&self, name: &VolumeName, size: u64) -> Result<bool, DiskError> {
        let path = self.path.join(name.as_str());
        if path.is_dir() {
            self.limit(&path, size)?;
            return Ok(false);
        }
        let new = self.path.join(format!("{NEW}{}", name.as_str()));
        self.clear(&new)?;
        let made = DirBuilder::new().mode(PRIVATE).create(&new);
        made.map_err(failed("make", &new))?;
        self.limit(&new, size)?;
        // Whatever the mask of this process is.
        let open = fs::Permissions::from_mode(ANYBODY);
        fs::set_permissions(&new, open).map_err(failed("open to all", &new))?;
        fs::rename(&new, &path).map_err(failed("name", &path))?;
        self.sync()?;
        Ok(true)
    }

    /// Removes a volume with all that is in it, and its limit; nothing if
    /// there is none.
    pub fn remove(&self, name: &VolumeName) -> Result<(), DiskError> {
        let path = self.path.join(name.as_str());
        let old = self.path.join(format!("{OLD}{}", name.as_str()));
        self.clear(&old)?;
        match fs::rename(&path, &old) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed.map_err(failed("take the name of", &path))?,
        }
        self.sync()?;
        self.clear(&old)
    }

    fn sync(&self) -> Result<(), DiskError> {
        let directory = File::open(&self.path);
        let synced = directory.and_then(|directory| directory.sync_all());
        synced.map_err(failed("write", &self.path))
    }

    fn names(&self) -> Result<Vec<String>, DiskError> {
        let read = || -> io::Result<Vec<String>> {
            let entries = fs::read_dir(&self.path)?;
            entries
                .map(|entry| Ok(entry?.file_name().into_string().unwrap_or_default()))
                .collect()
        };
        read().map_err(failed("list", &self.path))
    }

    /// Removes a directory that has no volume's name (any more).
    fn clear(&self, path: &Path) -> Result<(), DiskError> {
        let project = match File::open(path) {
            Ok(directory) if self.without.is_none() => quota::project(&directory).ok(),
            _ => None,
        };
        tree::remove(path)?;
        match project.filter(|project| *project >= FIRST_PROJECT) {
            Some(project) => self.set_limit(project, 0),
            None => Ok(()),
        }
    }

    /// Gives the directory a project if it has none, and limits the project.
    fn limit(&self, path: &Path, size: u64) -> Result<(), DiskError> {
        if self.without.is_some() {
            return Ok(());
        }
        let wrong = |source| DiskError::Quota {
            path: path.to_owned(),
            source,
        };
        let directory = File::open(path).map_err(failed("open", path))?;
        let mut project = quota::project(&directory).map_err(wrong)?;
        if project < FIRST_PROJECT {
            let giving = self.giving.lock();
            let _giving = giving.unwrap_or_else(std::sync::PoisonError::into_inner);
            project = self.free_project()?;
            quota::set_project(&directory, project).map_err(wrong)?;
        }
        self.set_limit(project, size)
    }

    /// Bytes; 0 for none.
    fn set_limit(&self, project: u32, size: u64) -> Result<(), DiskError> {
        let directory = File::open(&self.path).map_err(failed("open", &self.path))?;
        quota::limit(&directory, project, size).map_err(|source| DiskError::Quota {
            path: self.path.clone(),
            source,
        })
    }

    fn free_project(&self) -> Result<u32, DiskError> {
        let mut taken = BTreeSet::new();
        for name in self.names()? {
            let path = self.path.join(name);
            let directory = File::open(&path).map_err(failed("open", &path))?;
            let project = quota::project(&directory);
            taken.insert(project.map_err(|source| DiskError::Quota { path, source })?);
        }
        let free = (FIRST_PROJECT..).find(|project| !taken.contains(project));
        Ok(free.unwrap_or(FIRST_PROJECT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(digit: char) -> VolumeName {
        let uid = "xxxxxxxx-xxxx-4xxx-8xxx-xxxxxxxxxxxx".replace('x', &digit.to_string());
        VolumeName::of_claim(&uid).unwrap()
    }

    #[test]
    fn volumes_come_and_go_and_both_can_be_repeated() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("volumes");
        let disk = Disk::open(&path).unwrap();
        assert!(disk.ensure(&name('1'), 1 << 20).unwrap());
        assert!(!disk.ensure(&name('1'), 1 << 20).unwrap());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let volume = path.join(name('1').as_str());
        assert_eq!((mode(&path), mode(&volume)), (PRIVATE, ANYBODY));

        fs::create_dir(volume.join("deep")).unwrap();
        fs::write(volume.join("deep/file"), "content").unwrap();
        assert!(!disk.ensure(&name('1'), 1 << 20).unwrap());
        assert_eq!(fs::read(volume.join("deep/file")).unwrap(), b"content");
        assert_eq!(disk.list().unwrap(), [name('1')]);

        disk.remove(&name('1')).unwrap();
        disk.remove(&name('1')).unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    }

    #[test]
    fn what_was_left_half_done_is_cleared_away_and_nothing_else() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("volumes");
        let disk = Disk::open(&path).unwrap();
        disk.ensure(&name('1'), 1 << 20).unwrap();
        for half in [".new-", ".old-"] {
            let half = path.join(format!("{half}{}", name('2').as_str()));
            fs::create_dir(&half).unwrap();
            fs::write(half.join("file"), "rubbish").unwrap();
        }
        fs::create_dir(path.join("somebodys")).unwrap();
        drop(disk);
        let disk = Disk::open(&path).unwrap();
        assert_eq!(disk.list().unwrap(), [name('1')]);
        assert!(path.join("somebodys").exists());
        assert_eq!(fs::read_dir(&path).unwrap().count(), 2);
    }

    #[test]
    fn a_link_in_a_volume_leads_nowhere_when_it_is_removed() {
        let base = tempfile::tempdir().unwrap();
        let outside = base.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "stays").unwrap();
        let disk = Disk::open(&base.path().join("volumes")).unwrap();
        disk.ensure(&name('1'), 1 << 20).unwrap();
        let volume = base.path().join("volumes").join(name('1').as_str());
        std::os::unix::fs::symlink(&outside, volume.join("link")).unwrap();
        disk.remove(&name('1')).unwrap();
        assert!(outside.join("file").exists());
    }
}
