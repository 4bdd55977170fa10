//! The cache outside the checkout: results that are expensive to make and depend on nothing but their key.
//!
//! `$XDG_CACHE_HOME/hearth` (or `~/.cache/hearth`) holds one folder per kind, and in it one per key. An entry is built in
//! a scratch folder beside its place and renamed into it, so that an entry that exists is whole; nothing ever writes to
//! one again. One lock per kind keeps builders from doing the same work twice; readers take none.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::command::check_interrupt;
use crate::ui::Ui;

/// How the scratch folders begin; whatever bears it while nobody holds the lock was left by a builder that was killed.
const SCRATCH: &str = ".scratch-";

/// Hearth's folder in the user's cache. Not created.
pub fn dir() -> Result<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_CACHE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".cache")))
        .map(|cache| cache.join("hearth"))
        .context("no place for the cache: set HOME or XDG_CACHE_HOME to an absolute path")
}

/// Locks the file at `path`, made if it is not there, for as long as what is returned lives; waits for others.
pub fn lock_file(ui: &Ui, path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let mut waiting = None;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                waiting.get_or_insert_with(|| ui.task(format!("waiting for {}", path.display())));
                // A lock tells nobody that it is free, and a wait in flock() could not be interrupted.
                check_interrupt()?;
                std::thread::sleep(Duration::from_millis(200));
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
}

/// The entries of one kind.
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// The user's cache of this kind ("kernel").
    pub fn of_user(kind: &str) -> Result<Cache> {
        Ok(Cache {
            dir: dir()?.join(kind),
        })
    }

    /// A cache in a given folder.
    #[cfg(test)]
    fn at(dir: &Path) -> Cache {
        Cache {
            dir: dir.to_owned(),
        }
    }

    /// The folder of an entry, where it exists.
    pub fn get(&self, key: &str) -> Option<PathBuf> {
        let entry = self.dir.join(key);
        entry.is_dir().then_some(entry)
    }

    /// The folder of an entry. Where it does not exist, `build` makes it, as the only builder: it is given an empty folder to
    /// work in, and returns the finished one in that.
    pub fn ensure(
        &self,
        ui: &Ui,
        key: &str,
        build: impl FnOnce(&Builder<'_>, &Path) -> Result<PathBuf>,
    ) -> Result<PathBuf> {
        if let Some(entry) = self.get(key) {
            return Ok(entry);
        }
        let builder = self.lock(ui)?;
        // Whoever held the lock may have made just this.
        if let Some(entry) = self.get(key) {
            return Ok(entry);
        }
        let scratch = builder.scratch()?;
        let finished = build(&builder, scratch.path())?;
        let entry = builder.publish(&finished, key)?;
        let _task = ui.quiet_task("removing the build tree");
        // Failure leaves a scratch folder, which the next build removes.
        let _ = scratch.close();
        Ok(entry)
    }

    /// Becomes the only builder of this kind on this machine; waits for another to finish.
    pub fn lock(&self, ui: &Ui) -> Result<Builder<'_>> {
        std::fs::create_dir_all(&self.dir)
            .with_context(|| format!("cannot create the cache folder {}", self.dir.display()))?;
        let file = lock_file(ui, &self.dir.join("lock"))?;
        let builder = Builder {
            cache: self,
            _lock: file,
        };
        builder.sweep()?;
        Ok(builder)
    }
}

/// The right to add entries. The lock goes with it, however the process ends.
pub struct Builder<'a> {
    cache: &'a Cache,
    _lock: File,
}

impl Builder<'_> {
    /// An empty folder on the cache's file system; removed with what is in it when dropped.
    pub fn scratch(&self) -> Result<TempDir> {
        tempfile::Builder::new()
            .prefix(SCRATCH)
            .tempdir_in(&self.cache.dir)
            .with_context(|| format!("cannot create a folder in {}", self.cache.dir.display()))
    }

    /// Where a builder may leave its log.
    pub fn log(&self) -> PathBuf {
        self.cache.dir.join("build.log")
    }

    /// Makes the finished folder, from within a scratch folder, the entry of this key. All of it is on the disk before: an
    /// entry that exists is whole, even after a power failure.
    fn publish(&self, finished: &Path, key: &str) -> Result<PathBuf> {
        let entry = self.cache.dir.join(key);
        File::open(finished)
            .map_err(anyhow::Error::from)
            .and_then(|folder| Ok(nix::unistd::syncfs(&folder)?))
            .with_context(|| format!("cannot write {} to the disk", finished.display()))?;
        std::fs::rename(finished, &entry)
            .with_context(|| format!("cannot move the result to {}", entry.display()))?;
        Ok(entry)
    }

    fn sweep(&self) -> Result<()> {
        let context = || format!("cannot clean {}", self.cache.dir.display());
        for entry in self.cache.dir.read_dir().with_context(context)? {
            let entry = entry.with_context(context)?;
            if entry.file_name().to_string_lossy().starts_with(SCRATCH) {
                std::fs::remove_dir_all(entry.path()).with_context(context)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_appears_whole_and_scratch_goes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("kind"));
        let ui = Ui::new(false);
        let builder = cache.lock(&ui).unwrap();
        let scratch = builder.scratch().unwrap();
        let finished = scratch.path().join("finished");
        std::fs::create_dir(&finished).unwrap();
        std::fs::write(finished.join("file"), "content").unwrap();
        assert_eq!(cache.get("key"), None);
        let entry = builder.publish(&finished, "key").unwrap();
        assert_eq!(cache.get("key"), Some(entry.clone()));
        assert_eq!(
            std::fs::read_to_string(entry.join("file")).unwrap(),
            "content"
        );
        let path = scratch.path().to_owned();
        drop(scratch);
        assert!(!path.exists());
    }

    #[test]
    fn the_next_builder_removes_what_a_killed_one_left() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path());
        let ui = Ui::new(false);
        let left = cache.lock(&ui).unwrap().scratch().unwrap().keep();
        std::fs::create_dir(dir.path().join("key")).unwrap();
        drop(cache.lock(&ui).unwrap());
        assert!(!left.exists());
        assert!(cache.get("key").is_some());
    }

    #[test]
    fn there_is_one_builder_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path());
        let ui = Ui::new(false);
        let first = cache.lock(&ui).unwrap();
        let other = File::open(dir.path().join("lock")).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(first);
        other.try_lock().unwrap();
    }
}
