//! The directories of volumes, and their limits.
//!
//! ```text
//! volumes/             root alone: pods see theirs through the kubelet's mounts
//! volumes/pvc-UUID     a volume, anybody's: whoever sees it may use it
//! volumes/.new-NAME    one that is being made
//! volumes/.old-NAME    one that has been removed, and is being emptied
//! ```
//!
//! A directory has its name only when its quota is set, and loses it before
//! anything in it is removed; so after a power cut a name that is there means a
//! whole volume, and what begins with a dot is rubbish.
//!
//! A volume is removed when it has lost its name, which is a matter of a moment.
//! Emptying it takes as long as its files are many, which was up to whoever had
//! it; nobody waits for that ([`Disk::sweep`]). It keeps its limit to the end,
//! for a pod whose object is gone may run, and write there, for a while.
//!
//! A volume may have its bytes and one file for each block of them. Inodes are
//! not counted among the bytes, and files with nothing in them have no others:
//! unlimited, they would fill the disk from within any volume.
//!
//! Limits are XFS project quotas: the directory bears a project's number, what
//! is made in it inherits the number, and the file system counts. The number is
//! kept nowhere else: that of a new volume is the lowest that no directory
//! bears, whatever its name. Who owns a directory, as root in a pod does, can
//! give it another's number. Whose limit that is cannot be told then, and it is
//! left as it was set for the one that had it alone.
//!
//! Where the file system has no quotas, volumes are made all the same, and the
//! node says that they have no limits.

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

/// The first project of a volume; those before it are nobody's.
const FIRST_PROJECT: u32 = 1000;
/// The file system's: a file that is not empty has one at least.
const BLOCK_BYTES: u64 = 4096;
/// So many inodes XFS makes room for at once.
const MIN_INODES: u64 = 64;
const PRIVATE_DIRECTORY: u32 = 0o700;
/// Pods run as anybody.
const OPEN_DIRECTORY: u32 = 0o777;
const NEW_PREFIX: &str = ".new-";
const OLD_PREFIX: &str = ".old-";

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
    /// Its project is not its own.
    #[error("limit {path}: another directory bears its project {project}, too")]
    Shared {
        /// The directory.
        path: PathBuf,
        /// The number.
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

/// Held while a directory gets its name or loses it, and while a number of a
/// project is looked for among them, given or limited. It is the process's:
/// when a [`Disk`] has been dropped, a thread may still be at work on it.
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
    /// Something is to be emptied.
    removed: Notify,
}

impl Disk {
    /// Makes it if there is none, and clears away what was left half made.
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
        let new = self.path.join(format!("{NEW_PREFIX}{}", name.as_str()));
        self.clear(&new, &|| false)?;
        let made = DirBuilder::new().mode(PRIVATE_DIRECTORY).create(&new);
        made.map_err(failed("make", &new))?;
        self.limit(&new, size)?;
        // Whatever the mask of this process is.
        let open = fs::Permissions::from_mode(OPEN_DIRECTORY);
        fs::set_permissions(&new, open).map_err(failed("open to all", &new))?;
        rename(&new, &path).map_err(failed("name", &path))?;
        self.sync()?;
        Ok(true)
    }

    /// Takes a volume's name, durably: from then on nobody finds it. Its limit
    /// and what is in it go by [`Self::sweep`]. Nothing if there is none.
    pub fn remove(&self, name: &VolumeName) -> Result<(), DiskError> {
        let path = self.path.join(name.as_str());
        let old = self.path.join(format!("{OLD_PREFIX}{}", name.as_str()));
        match rename(&path, &old) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed.map_err(failed("take the name of", &path))?,
        }
        self.sync()?;
        self.removed.notify_one();
        Ok(())
    }

    /// Empties what has been removed, until that is `stopped`, which is an
    /// error. May take long.
    pub fn sweep(&self, stopped: &dyn Fn() -> bool) -> Result<(), DiskError> {
        self.clear_all(OLD_PREFIX, stopped)
    }

    /// Waits for a removal since the last time.
    pub async fn removed(&self) {
        self.removed.notified().await;
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

    /// What cannot be cleared away does not stop the rest; the first failure is
    /// told.
    fn clear_all(&self, prefix: &str, stopped: &dyn Fn() -> bool) -> Result<(), DiskError> {
        let names = self.names()?;
        let rubbish = names.iter().filter(|name| name.starts_with(prefix));
        let cleared = rubbish.map(|name| self.clear(&self.path.join(name), stopped));
        cleared.fold(Ok(()), Result::and)
    }

    /// Removes a directory that has no volume's name (any more), and its limit
    /// if it is nobody else's: who owns a directory can give it any number.
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

    /// Gives the directory a project if it has none, and limits the project if
    /// that is its own.
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

    /// The numbers that the directories bear, but for this one.
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

/// What may be in a volume of so many bytes.
fn of_size(bytes: u64) -> Amount {
    Amount {
        bytes,
        inodes: bytes.div_ceil(BLOCK_BYTES).max(MIN_INODES),
    }
}

/// The project of a directory that bears this number, beside others that bear
/// those: the lowest that is free if it has none yet, and none if it has one of
/// theirs.
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
        // The one before it has not gone yet: nothing is mixed, and nothing lost.
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
        // An earlier attempt may have ended before its word.
        disk.remove(&name('1')).unwrap();
        disk.removed().await;
        assert!(disk.removed().now_or_never().is_none());
    }

    #[test]
    fn what_cannot_be_emptied_does_not_stop_the_rest() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("volumes");
        let disk = Disk::open(&path).unwrap();
        // A file in place of a directory, before and after one by any order.
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
