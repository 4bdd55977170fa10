//! Mounts made by other programs: reads the kernel's mount table, and changes mounts that
//! containers need or leave behind.
//!
//! Container runtimes create mounts below their directories. If they exit without cleaning up, the
//! mounts remain, and removing such a directory recursively would delete the content of what is
//! mounted in it: somebody's data. So [`unmount_below`] either leaves nothing mounted below a path,
//! or returns an error.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

use super::mounts::{self, MountError};

/// The mount table of this thread.
const TABLE: &str = "/proc/thread-self/mountinfo";
/// Unmounting may uncover another mount below, so unmounting is repeated.
const MAX_UNMOUNT_ROUNDS: usize = 16;

/// The mount points at or below `path`, in mount order; a path occurs twice if one mount covers
/// another one.
pub fn mounts_below(path: &Path) -> Result<Vec<PathBuf>, MountError> {
    let table = fs::read(TABLE).map_err(|source| MountError::Target {
        step: "read",
        target: TABLE.into(),
        source,
    })?;
    let places = table.split(|byte| *byte == b'\n').filter_map(place);
    Ok(places.filter(|place| place.starts_with(path)).collect())
}

/// The fifth field of a line, the mount point.
fn place(line: &[u8]) -> Option<PathBuf> {
    let word = line.split(|byte| *byte == b' ').nth(4)?;
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, after)) = rest.split_first() {
        // Blanks and backslashes are escaped as three octal digits.
        match after.get(..3).filter(|_| byte == b'\\').and_then(octal) {
            Some(escaped) => {
                plain.push(escaped);
                rest = &after[3..];
            }
            None => {
                plain.push(byte);
                rest = after;
            }
        }
    }
    Some(PathBuf::from(OsString::from_vec(plain)))
}

fn octal(digits: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(digits).ok()?;
    u8::from_str_radix(text, 8).ok()
}

/// Unmounts everything at or below `path`, the latest mount first. Processes that use a mount keep
/// it, but it is no longer reachable by its path.
///
/// When this returns without an error, nothing is mounted there.
pub fn unmount_below(path: &Path) -> Result<(), MountError> {
    for _ in 0..MAX_UNMOUNT_ROUNDS {
        let places = mounts_below(path)?;
        if places.is_empty() {
            return Ok(());
        }
        for place in places.iter().rev() {
            let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
            // A mount may be gone together with another one; one that remains is found in the next
            // round.
            let _ = rustix::mount::unmount(place.as_path(), flags);
        }
    }
    Err(MountError::Unmount {
        target: mounts_below(path)?.pop().unwrap_or_else(|| path.to_owned()),
        source: io::ErrorKind::ResourceBusy.into(),
    })
}

/// Unmounts everything below `path`, the latest mount first, but not a mount at `path` itself.
/// Fails if a mount is in use.
pub fn unmount_inside(path: &Path) -> Result<(), MountError> {
    for place in mounts_below(path)?.iter().rev() {
        if place != path {
            mounts::unmount(place)?;
        }
    }
    Ok(())
}

/// Bind-mounts a directory, elsewhere or onto itself, with flags of its own, so that it can be used in other ways
/// than the rest of its file system. Mounts in one are not visible in the other. Idempotent.
pub fn bind_with_flags(from: &Path, to: &Path, flags: MountFlags) -> Result<(), MountError> {
    let refused = |errno: rustix::io::Errno| MountError::Mount {
        source_name: from.to_owned(),
        kind: "bind".to_owned(),
        target: to.to_owned(),
        source: errno.into(),
    };
    if !mounts_below(to)?.iter().any(|place| place == to) {
        rustix::mount::mount_bind(from, to).map_err(refused)?;
        // The bind of a shared mount is a peer of it.
        rustix::mount::mount_change(to, MountPropagationFlags::PRIVATE).map_err(refused)?;
    }
    // A bind mount has the flags of its source until it is remounted.
    rustix::mount::mount_remount(to, MountFlags::BIND | flags, c"").map_err(refused)
}

/// Makes mounts below `path` visible in mount namespaces derived from this one, as volumes of
/// containers require.
pub fn share(path: &Path) -> Result<(), MountError> {
    let flags = MountPropagationFlags::SHARED | MountPropagationFlags::REC;
    rustix::mount::mount_change(path, flags).map_err(|errno| MountError::Target {
        step: "share the mounts below",
        target: path.to_owned(),
        source: errno.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::super::mounts::mount;
    use super::super::mounts::tests::with_own_mounts;
    use super::*;

    #[test]
    fn a_line_names_its_place() {
        let line = br"36 35 98:0 / /mnt/a\040b\134c rw,noatime - ext3 /dev/root rw";
        assert_eq!(place(line), Some(PathBuf::from(r"/mnt/a b\c")));
        assert_eq!(place(b"36 35 98:0 / /x\\0"), Some(PathBuf::from("/x\\0")));
        assert_eq!(place(b""), None);
        let bytes = place(b"1 2 3 4 /\xff").unwrap();
        assert_eq!(bytes.as_os_str().as_bytes(), b"/\xff");
    }

    #[test]
    fn nothing_stays_mounted_and_nothing_mounted_is_touched() {
        let done = with_own_mounts(|| {
            let directory = tempfile::tempdir().unwrap();
            let data = directory.path().join("data");
            let pods = directory.path().join("pods");
            fs::create_dir(&data).unwrap();
            fs::write(data.join("precious"), b"x").unwrap();
            let tmpfs = |target: &Path| {
                let flags = MountFlags::empty();
                mount(Path::new("tmpfs"), target, "tmpfs", flags, "size=1m").unwrap();
            };
            tmpfs(&pods);
            let volume = pods.join("volume");
            fs::create_dir(&volume).unwrap();
            rustix::mount::mount_bind(&data, &volume).unwrap();
            unmount_inside(&pods).unwrap();
            assert_eq!(mounts_below(&pods).unwrap(), std::slice::from_ref(&pods));
            rustix::mount::mount_bind(&data, &volume).unwrap();
            // Removing a directory does not descend into mounts, unlike the caller described above.
            for mounted in [&pods, &volume] {
                crate::tree::remove(mounted).unwrap_err();
            }
            // Covers the previous mount.
            tmpfs(&pods);
            assert_eq!(mounts_below(&pods).unwrap().len(), 3);
            // Not below: only its name has the same prefix.
            let other = directory.path().join("pods2");
            tmpfs(&other);
            unmount_below(&pods).unwrap();
            unmount_below(&pods).unwrap();
            assert_eq!(mounts_below(&pods).unwrap(), [] as [PathBuf; 0]);
            assert_eq!(mounts_below(&other).unwrap(), std::slice::from_ref(&other));
            crate::tree::remove(&pods).unwrap();
            assert_eq!(fs::read(data.join("precious")).unwrap(), b"x");
            unmount_below(&other).unwrap();
        });
        if !done {
            eprintln!("skipped: mounting is not permitted");
        }
    }

    #[test]
    fn a_directory_gets_flags_of_its_own() {
        let done = with_own_mounts(|| {
            let directory = tempfile::tempdir().unwrap();
            let whole = directory.path().join("whole");
            let flags = MountFlags::NOEXEC | MountFlags::NODEV;
            mount(Path::new("tmpfs"), &whole, "tmpfs", flags, "size=1m").unwrap();
            let part = whole.join("part");
            fs::create_dir(&part).unwrap();
            let flags = |path: &Path| rustix::fs::statvfs(path).unwrap().f_flag;
            let noexec = rustix::fs::StatVfsMountFlags::NOEXEC;
            for _ in 0..2 {
                bind_with_flags(&part, &part, MountFlags::NODEV).unwrap();
                assert!(!flags(&part).contains(noexec));
                assert!(flags(&whole).contains(noexec));
            }
            assert_eq!(mounts_below(&part).unwrap().len(), 1);
            unmount_below(&part).unwrap();
            // Again, when the whole is shared.
            share(&whole).unwrap();
            bind_with_flags(&part, &part, MountFlags::NODEV).unwrap();
            share(&whole).unwrap();
            let deep = part.join("deep");
            mount(
                Path::new("tmpfs"),
                &deep,
                "tmpfs",
                MountFlags::NODEV,
                "size=1m",
            )
            .unwrap();
            assert_eq!(mounts_below(&deep).unwrap().len(), 1);
            unmount_below(&whole).unwrap();
        });
        if !done {
            eprintln!("skipped: mounting is not permitted");
        }
    }
}
