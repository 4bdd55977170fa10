//! The cache outside the checkout: results that are expensive to make and depend on nothing but their key.
//!
//! `$XDG_CACHE_HOME/hearth` (or `~/.cache/hearth`) holds one folder per kind, with one folder per key. An entry is
//! built in a scratch folder next to its final path and renamed, so an entry that exists is complete; it is never
//! written again. One lock per kind keeps builders from doing the same work twice; readers take no lock.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ring::digest::{Context as Digest, SHA256};
use tempfile::TempDir;

use crate::files::{self, FileError, failed};
use crate::interrupt::{Interrupted, check_interrupt};
use crate::progress::{Length, Progress};

/// Name prefix of scratch folders. One that exists while the lock is free was left by a builder that was killed.
const SCRATCH: &str = ".scratch-";

/// Why a cache operation failed.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Neither HOME nor XDG_CACHE_HOME is an absolute path.
    #[error("cannot determine the cache folder: set HOME or XDG_CACHE_HOME to an absolute path")]
    NoPlace,
    /// make and tar do not handle such a path.
    #[error("cache folder: expected a path without blanks and colons, got {}; set XDG_CACHE_HOME", .0.display())]
    Malformed(PathBuf),
    /// Interrupted while waiting for another builder.
    #[error("interrupted")]
    Interrupted(#[from] Interrupted),
    /// A finished entry could not be synced to the disk.
    #[error("cannot sync {} to disk", folder.display())]
    Sync {
        /// The entry, still in its scratch folder.
        folder: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Hearth's folder in the user's cache. It is not created.
pub fn dir() -> Result<PathBuf, CacheError> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    usable(cache.ok_or(CacheError::NoPlace)?.join("hearth"))
}

/// Refuses a path in which the builders would fail, before anything is downloaded.
fn usable(folder: PathBuf) -> Result<PathBuf, CacheError> {
    let is_odd = |c: char| c.is_whitespace() || c == ':';
    if folder.to_str().is_none_or(|path| path.contains(is_odd)) {
        return Err(CacheError::Malformed(folder));
    }
    Ok(folder)
}

/// The key of an entry that depends on these parts alone. Each part is hashed with its length, so that no two lists of
/// parts have the same key.
pub fn key<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Digest::new(&SHA256);
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex::encode(&hash.finish().as_ref()[..16])
}

/// Locks the file at `path` until the returned file is dropped; creates the file if it is absent, and waits for other
/// holders.
pub fn lock_file(progress: &dyn Progress, path: &Path) -> Result<File, CacheError> {
    let file = File::create(path).map_err(failed("create", path))?;
    let mut waiting = None;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                waiting.get_or_insert_with(|| {
                    progress.start(&format!("waiting for {}", path.display()), Length::Unknown)
                });
                // Polls: flock() gives no notification when a lock becomes free, and a wait in it could not be
                // interrupted.
                check_interrupt()?;
                std::thread::sleep(Duration::from_millis(200));
            }
            Err(TryLockError::Error(error)) => {
                return Err(failed("lock", path)(error).into());
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
    pub fn of_user(kind: &str) -> Result<Cache, CacheError> {
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

    /// The folder of an entry, if the entry exists.
    pub fn get(&self, key: &str) -> Option<PathBuf> {
        let entry = self.dir.join(key);
        entry.is_dir().then_some(entry)
    }

    /// The folder of an entry. If it does not exist, `build` makes it as the only builder: it gets an empty folder to
    /// work in, and returns the finished folder inside it.
    pub fn ensure<E: From<CacheError>>(
        &self,
        progress: &dyn Progress,
        key: &str,
        build: impl FnOnce(&Builder<'_>, &Path) -> Result<PathBuf, E>,
    ) -> Result<PathBuf, E> {
        if let Some(entry) = self.get(key) {
            return Ok(entry);
        }
        let builder = self.lock(progress)?;
        // The previous lock holder may have built this entry.
        if let Some(entry) = self.get(key) {
            return Ok(entry);
        }
        let scratch = builder.scratch()?;
        let finished = build(&builder, scratch.path())?;
        let entry = builder.publish(&finished, key)?;
        let _task = progress.start("removing the build tree", Length::Moment);
        // On failure a scratch folder remains, which the next build removes.
        let _ = scratch.close();
        Ok(entry)
    }

    /// Becomes the only builder of this kind on this machine; waits for another builder to finish.
    pub fn lock(&self, progress: &dyn Progress) -> Result<Builder<'_>, CacheError> {
        std::fs::create_dir_all(&self.dir).map_err(failed("create the cache folder", &self.dir))?;
        let file = lock_file(progress, &self.dir.join("lock"))?;
        let builder = Builder {
            cache: self,
            _lock: file,
        };
        builder.sweep()?;
        Ok(builder)
    }
}

/// The right to add entries. The lock is released with the process, however it ends.
pub struct Builder<'a> {
    cache: &'a Cache,
    _lock: File,
}

impl Builder<'_> {
    /// An empty folder on the cache's file system; removed with its content when dropped.
    pub fn scratch(&self) -> Result<TempDir, CacheError> {
        let scratch = tempfile::Builder::new()
            .prefix(SCRATCH)
            .tempdir_in(&self.cache.dir)
            .map_err(failed("create a folder in", &self.cache.dir))?;
        Ok(scratch)
    }

    /// The path of the builder's log.
    pub fn log(&self) -> PathBuf {
        self.cache.dir.join("build.log")
    }

    /// Turns the finished folder, which is inside a scratch folder, into the entry of this key. All of it is synced
    /// first, so an entry that exists is complete, even after a power failure.
    fn publish(&self, finished: &Path, key: &str) -> Result<PathBuf, CacheError> {
        let entry = self.cache.dir.join(key);
        File::open(finished)
            .and_then(|folder| Ok(nix::unistd::syncfs(&folder)?))
            .map_err(|source| CacheError::Sync {
                folder: finished.to_owned(),
                source,
            })?;
        std::fs::rename(finished, &entry).map_err(failed("move the result to", &entry))?;
        Ok(entry)
    }

    fn sweep(&self) -> Result<(), CacheError> {
        let dir = &self.cache.dir;
        for entry in files::entries(dir)? {
            if entry.file_name().to_string_lossy().starts_with(SCRATCH) {
                std::fs::remove_dir_all(entry.path()).map_err(failed("clean", dir))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn a_folder_in_which_builds_would_fail_is_refused() {
        for odd in ["/home/a b/.cache/hearth", "/home/a:b/hearth"] {
            let error = usable(PathBuf::from(odd)).unwrap_err().to_string();
            assert!(error.contains(odd), "{error}");
        }
        assert!(usable(PathBuf::from("/root/.cache/hearth")).is_ok());
    }

    #[test]
    fn an_entry_appears_whole_and_scratch_goes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("kind"));
        let builder = cache.lock(&Silent).unwrap();
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

    /// Entries of earlier builders are found by these keys.
    #[test]
    fn keys_are_what_they_have_always_been() {
        assert_eq!(key(["1", "linux", ""]), "b9b7ff9348dd71078638f69e6b3670f1");
        assert_ne!(key(["ab", "c"]), key(["a", "bc"]));
        assert_ne!(key(["a"]), key(["a", ""]));
    }

    #[test]
    fn the_next_builder_removes_what_a_killed_one_left() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path());
        let left = cache.lock(&Silent).unwrap().scratch().unwrap().keep();
        std::fs::create_dir(dir.path().join("key")).unwrap();
        drop(cache.lock(&Silent).unwrap());
        assert!(!left.exists());
        assert!(cache.get("key").is_some());
    }

    #[test]
    fn there_is_one_builder_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path());
        let first = cache.lock(&Silent).unwrap();
        let other = File::open(dir.path().join("lock")).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(first);
        other.try_lock().unwrap();
    }
}
