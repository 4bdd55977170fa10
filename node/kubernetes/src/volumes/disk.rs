//! The directories of volumes, and their quotas.
//!
//! ```text
//! volumes/             mode 0700: pods access their volumes through the kubelet's mounts
//! volumes/pvc-UUID     a volume, mode 0777: pods run as any user
//! volumes/.new-NAME    a volume that is being created
//! volumes/.old-NAME    a volume that has been removed, and whose content is being deleted
//! ```
//!
//! A directory is renamed to its final name after its quota has been set, and renamed again before
//! anything in it is deleted; so after a power cut a final name means a complete volume, and names
//! that begin with a dot can be deleted.
//!
//! A volume is removed when it has been renamed, which is fast. Deleting its content takes long if
//! there are many files; nothing waits for that ([`Disk::sweep`]). The quota is kept to the end,
//! because a pod whose object has been deleted may still run, and write, for a while.
//!
//! The quota limits bytes, and files to one per block. Inodes are not counted as bytes, so without
//! a limit empty files in one volume could fill the disk.
//!
//! Quotas are XFS project quotas: the directory has a project ID, everything created in it inherits
//! the ID, and the file system counts the usage. The ID is stored nowhere else: a new volume gets
//! the lowest ID that no directory has, whatever its name. The owner of a directory, such as root
//! in a pod, can set the ID of another volume. Then it is unknown whose quota it is, and the limit
//! is not changed.
//!
//! If the file system has no quotas, volumes are created without, and the node logs a warning.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_sys::files::{self, FileError};
use hearth_sys::quota::{self, Amount, QuotaError};
use hearth_sys::tree;
use tokio::sync::Notify;

use super::VolumeName;

/// The first project ID of volumes; lower ones are not used.
const FIRST_PROJECT: u32 = 1000;
/// Block size of the file system: a file that is not empty uses at least one block.
const BLOCK_BYTES: u64 = 4096;
/// XFS allocates inodes in chunks of this number.
const MIN_INODES: u64 = 64;
const PRIVATE_DIRECTORY: u32 = 0o700;
/// Pods run as any user.
const OPEN_DIRECTORY: u32 = 0o777;
const NEW_PREFIX: &str = ".new-";
const OLD_PREFIX: &str = ".old-";

/// Why a volume cannot be created or removed.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Creating or deleting directories has failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A step has failed.
    #[error("cannot {step} {path}")]
    Step {
        /// The step, as a verb.
        step: &'static str,
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The quota cannot be read or set.
    #[error("cannot set the quota of {path}")]
    Quota {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: QuotaError,
    },
    /// Another directory has the same project ID.
    #[error("cannot set the quota of {path}: another directory has the same project ID {project}")]
    Shared {
        /// The directory.
        path: PathBuf,
        /// The project ID.
        project: u32,
    },
}

fn failed<'a>(step: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> DiskError + 'a {
    move |source| DiskError::Step {
        step,
        path: path.to_owned(),
        source,
    }
}

/// Held while a directory is renamed, and while a project ID is searched, assigned or limited. It
/// is global, because a thread may still be working on a [`Disk`] that has been dropped.
static NAMING: Mutex<()> = Mutex::new(());

fn naming() -> MutexGuard<'static, ()> {
    NAMING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The directory of all volumes.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    /// Why there are no quotas.
    without: Option<QuotaError>,
    /// A volume has been removed, and its content has to be deleted.
    removed: Notify,
}

impl Disk {
    /// Creates the directory if it is missing, and deletes volumes whose creation was interrupted.
    pub fn open(path: &Path) -> Result<Self, DiskError> {
        files::create_dir_durably(path, PRIVATE_DIRECTORY)?;
        let directory = File::open(path).map_err(failed("open", path))?;
        let disk = Self {
            path: path.to_owned(),
            without: quota::available(&directory).err(),
            removed: Notify::new(),
        };
        disk.clear_all(NEW_PREFIX, &|| false)?;
        Ok(disk)
    }

    /// Why volumes have no quotas on this node; `None` if they have.
    pub fn without_quotas(&self) -> Option<&QuotaError> {
        self.without.as_ref()
    }

    /// The existing volumes.
    pub fn list(&self) -> Result<Vec<VolumeName>, DiskError> {
        let names = self.names()?;
        Ok(names
            .iter()
            .filter_map(|name| VolumeName::parse(name))
            .collect())
    }

    /// Creates a volume of this size if it does not exist, and returns whether it was created. The
    /// quota of an existing one is set again.
    pub fn ensure(&self, name: &VolumeName, size: u64) -> Result<bool, DiskError> {
        let path = self.path.join(name.as_str());
        if path.is_dir() {
            self.limit(&path, size)?;
            return Ok(false);
        }
        let new = self.path.join(format!("{NEW_PREFIX}{}", name.as_str()));
        self.clear(&new, &|| false)?;
        let made = DirBuilder::new().mode(PRIVATE_DIRECTORY).create(&new);
        made.map_err(failed("create", &new))?;
        self.limit(&new, size)?;
        // Independent of the process's umask.
        let open = fs::Permissions::from_mode(OPEN_DIRECTORY);
        fs::set_permissions(&new, open).map_err(failed("set the mode of", &new))?;
        rename(&new, &path).map_err(failed("rename to", &path))?;
        self.sync()?;
        Ok(true)
    }

    /// Removes a volume by renaming it, durably. Its quota and its content are deleted by
    /// [`Self::sweep`]. Does nothing if it does not exist.
    pub fn remove(&self, name: &VolumeName) -> Result<(), DiskError> {
        let path = self.path.join(name.as_str());
        let old = self.path.join(format!("{OLD_PREFIX}{}", name.as_str()));
        match rename(&path, &old) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed.map_err(failed("rename", &path))?,
        }
        self.sync()?;
        self.removed.notify_one();
        Ok(())
    }

    /// Deletes removed volumes. May take long; fails if `stopped` returns true.
    pub fn sweep(&self, stopped: &dyn Fn() -> bool) -> Result<(), DiskError> {
        self.clear_all(OLD_PREFIX, stopped)
    }

    /// Waits until a volume has been removed since the last call.
    pub async fn removed(&self) {
        self.removed.notified().await;
    }

    fn sync(&self) -> Result<(), DiskError> {
        let directory = File::open(&self.path);
        let synced = directory.and_then(|directory| directory.sync_all());
        synced.map_err(failed("sync", &self.path))
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

    /// Deletes all directories with this prefix. Continues after errors, and returns the first one.
    fn clear_all(&self, prefix: &str, stopped: &dyn Fn() -> bool) -> Result<(), DiskError> {
        let names = self.names()?;
        let rubbish = names.iter().filter(|name| name.starts_with(prefix));
        let cleared = rubbish.map(|name| self.clear(&self.path.join(name), stopped));
        cleared.fold(Ok(()), Result::and)
    }

    /// Deletes a directory that is not a volume (any more), and its quota, unless another directory
    /// has the same project ID: the owner of a directory can set any ID.
    fn clear(&self, path: &Path, stopped: &dyn Fn() -> bool) -> Result<(), DiskError> {
        tree::empty(path, stopped)?;
        let _naming = naming();
        let project = match File::open(path) {
            Ok(directory) if self.without.is_none() => quota::project(&directory).ok(),
            _ => None,
        };
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            removed => removed.map_err(failed("remove", path))?,
        }
        match project.filter(|project| *project >= FIRST_PROJECT) {
            Some(project) if !self.projects_but(path)?.contains(&project) => {
                self.set_limit(project, Amount::NONE)
            }
            _ => Ok(()),
        }
    }

    /// Assigns a project ID to the directory if it has none, and sets the quota, unless another
    /// directory has the same ID.
    fn limit(&self, path: &Path, size: u64) -> Result<(), DiskError> {
        if self.without.is_some() {
            return Ok(());
        }
        let wrong = |source| DiskError::Quota {
            path: path.to_owned(),
            source,
        };
        let _naming = naming();
        let directory = File::open(path).map_err(failed("open", path))?;
        let borne = quota::project(&directory).map_err(wrong)?;
        let others = self.projects_but(path)?;
        let project = project_of_its_own(borne, &others).ok_or_else(|| DiskError::Shared {
            path: path.to_owned(),
            project: borne,
        })?;
        if project != borne {
            quota::set_project(&directory, project).map_err(wrong)?;
        }
        self.set_limit(project, of_size(size))
    }

    fn set_limit(&self, project: u32, limit: Amount) -> Result<(), DiskError> {
        let directory = File::open(&self.path).map_err(failed("open", &self.path))?;
        quota::limit(&directory, project, limit).map_err(|source| DiskError::Quota {
            path: self.path.clone(),
            source,
        })
    }

    /// The project IDs of all directories except this one.
    fn projects_but(&self, one: &Path) -> Result<BTreeSet<u32>, DiskError> {
        let project = |path: PathBuf| {
            let directory = File::open(&path).map_err(failed("open", &path))?;
            let project = quota::project(&directory);
            project.map_err(|source| DiskError::Quota { path, source })
        };
        let paths = self.names()?.into_iter().map(|name| self.path.join(name));
        let others = paths.filter(|path| path != one);
        others.map(project).collect()
    }
}

/// The quota of a volume of this size.
fn of_size(bytes: u64) -> Amount {
    Amount {
        bytes,
        inodes: bytes.div_ceil(BLOCK_BYTES).max(MIN_INODES),
    }
}

/// The project ID for a directory with ID `borne`: the lowest free one if it has none yet; `None`
/// if another directory has the same.
fn project_of_its_own(borne: u32, others: &BTreeSet<u32>) -> Option<u32> {
    match borne {
        0..FIRST_PROJECT => (FIRST_PROJECT..).find(|free| !others.contains(free)),
        borne => Some(borne).filter(|borne| !others.contains(borne)),
    }
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    let _naming = naming();
    fs::rename(from, to)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn name(digit: char) -> VolumeName {
        let uid = "xxxxxxxx-xxxx-4xxx-8xxx-xxxxxxxxxxxx".replace('x', &digit.to_string());
        VolumeName::of_claim(&uid).unwrap()
    }

    #[test]
    fn a_number_is_one_directorys_or_is_not_limited() {
        let others = BTreeSet::from([0, 1000, 1001, 1003]);
        for (borne, own) in [
            (0, Some(1002)),
            (999, Some(1002)),
            (1002, Some(1002)),
            (7000, Some(7000)),
            (1000, None),
            (1003, None),
        ] {
            assert_eq!(project_of_its_own(borne, &others), own, "{borne}");
        }
    }

    #[test]
    fn a_small_volume_has_room_for_some_files() {
        let inodes = |bytes| of_size(bytes).inodes;
        assert_eq!([1, 1 << 20, 1 << 30].map(inodes), [64, 256, 1 << 18]);
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
        assert_eq!(
            (mode(&path), mode(&volume)),
            (PRIVATE_DIRECTORY, OPEN_DIRECTORY)
        );

        fs::create_dir(volume.join("deep")).unwrap();
        fs::write(volume.join("deep/file"), "content").unwrap();
        assert!(!disk.ensure(&name('1'), 1 << 20).unwrap());
        assert_eq!(fs::read(volume.join("deep/file")).unwrap(), b"content");
        assert_eq!(disk.list().unwrap(), [name('1')]);

        disk.remove(&name('1')).unwrap();
        disk.remove(&name('1')).unwrap();
        assert_eq!(disk.list().unwrap(), []);
        disk.sweep(&|| false).unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    }

    #[test]
    fn a_name_is_free_before_what_it_named_is_emptied() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("volumes");
        let disk = Disk::open(&path).unwrap();
        let volume = path.join(name('1').as_str());
        let fill = || {
            assert!(disk.ensure(&name('1'), 1 << 20).unwrap());
            fs::write(volume.join("file"), "content").unwrap();
            disk.remove(&name('1'))
        };
        fill().unwrap();
        // The content of the previous one has not been deleted yet: nothing is mixed up or lost.
        fill().unwrap_err();
        assert!(volume.join("file").exists());
        disk.sweep(&|| false).unwrap();
        disk.remove(&name('1')).unwrap();
        disk.sweep(&|| false).unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn who_empties_is_told_of_each_removal() {
        let base = tempfile::tempdir().unwrap();
        let disk = Disk::open(&base.path().join("volumes")).unwrap();
        disk.ensure(&name('1'), 1 << 20).unwrap();
        assert!(disk.removed().now_or_never().is_none());
        disk.remove(&name('1')).unwrap();
        disk.removed().await;
        // An earlier attempt may have been interrupted before the notification.
        disk.remove(&name('1')).unwrap();
        disk.removed().await;
        assert!(disk.removed().now_or_never().is_none());
    }

    #[test]
    fn what_cannot_be_emptied_does_not_stop_the_rest() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("volumes");
        let disk = Disk::open(&path).unwrap();
        // A file in place of a directory, before and after a directory in any order.
        for digit in ['1', '3'] {
            fs::write(
                path.join(format!("{OLD_PREFIX}{}", name(digit).as_str())),
                "",
            )
            .unwrap();
        }
        fs::create_dir(path.join(format!("{OLD_PREFIX}{}", name('2').as_str()))).unwrap();
        disk.sweep(&|| false).unwrap_err();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 2);
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
        disk.sweep(&|| false).unwrap();
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
        disk.sweep(&|| false).unwrap();
        assert!(outside.join("file").exists());
        assert_eq!(disk.names().unwrap().len(), 0);
    }
}
