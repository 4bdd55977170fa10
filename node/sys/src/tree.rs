//! Removes directories with untrusted content.
//!
//! The depth of a pod's directories is not limited. The standard library removes recursively, with
//! a stack frame and an open file for each level: a few thousand levels crash the process, and with
//! it the node. Here only one directory is open at a time, the way back is `..`, and each level
//! needs sixteen bytes of memory for its identity.
//!
//! No process should use the directory any more, but one may. So symbolic links are not followed,
//! and no other mount is entered, not even one of the same file system. If a process moves
//! directories meanwhile, the result is an error, and the way back never leads elsewhere. What was
//! removed until then remains removed, and the call can be repeated.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::{fs, io};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;

use super::files::{self, FileError};

/// Removes a directory with all its content. Succeeds if it does not exist.
pub fn remove(path: &Path) -> Result<(), FileError> {
    empty(path, &|| false)?;
    match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(FileError::io(path, "remove")),
    }
}

/// Removes the content of a directory. Fails as soon as `stopped` returns true. Succeeds if the
/// directory does not exist.
pub fn empty(path: &Path, stopped: &dyn Fn() -> bool) -> Result<(), FileError> {
    let failed = |step| move |error: Errno| FileError::io(path, step)(error.into());
    let (parent, name) = (files::directory_of(path)?, files::name_of(path)?);
    let parent = match open(parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        parent => parent.map_err(failed("open the parent directory"))?,
    };
    let root = match neighbour(&parent, name) {
        Err(Errno::NOENT) => return Ok(()),
        root => root.map_err(failed("open"))?,
    };
    let emptied = empty_all(root, stopped);
    emptied.map_err(FileError::io(path, "remove the content"))
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Device and inode, which identify a directory.
type Identity = (u64, u64);

fn identity(directory: impl AsFd) -> io::Result<Identity> {
    let stat = fstat(directory)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn empty_all(root: OwnedFd, stopped: &dyn Fn() -> bool) -> io::Result<()> {
    let mut here = root;
    let mut above = Vec::new();
    loop {
        if let Some(below) = next_below(&here, stopped)? {
            above.push(identity(&here)?);
            here = below;
            continue;
        }
        let Some(wanted) = above.pop() else {
            return Ok(());
        };
        here = neighbour(&here, c"..")?;
        if identity(&here)? != wanted {
            return Err(io::Error::other("a directory was moved during the removal"));
        }
    }
}

/// Removes the entries of a directory, up to the first directory that is not empty.
fn next_below(directory: &OwnedFd, stopped: &dyn Fn() -> bool) -> io::Result<Option<OwnedFd>> {
    for entry in Dir::read_from(directory)? {
        if stopped() {
            return Err(io::Error::other("the removal was stopped"));
        }
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if entry.file_type() != FileType::Directory {
            match unlinkat(directory, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => continue,
                // Not every file system reports file types in directory listings.
                Err(Errno::ISDIR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        match unlinkat(directory, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(Some(neighbour(directory, name)?)),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Opens a directory relative to another one, on the same mount.
fn neighbour(directory: &OwnedFd, name: impl Arg) -> Result<OwnedFd, Errno> {
    let here = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    openat2(directory, name, DIRECTORY, Mode::empty(), here)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rustix::fs::{mkdirat, openat};

    use super::*;

    #[test]
    fn everything_goes_and_links_lead_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let outside = directory.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "stays").unwrap();
        let tree = directory.path().join("tree");
        for name in ["a/b/c", "a/d", "e"] {
            fs::create_dir_all(tree.join(name)).unwrap();
            for number in 0..300 {
                fs::write(tree.join(name).join(number.to_string()), "goes").unwrap();
            }
        }
        std::os::unix::fs::symlink(&outside, tree.join("a/link")).unwrap();
        std::os::unix::fs::symlink("nowhere", tree.join("a/broken")).unwrap();
        remove(&tree).unwrap();
        assert!(!tree.exists());
        assert!(outside.join("file").exists());
        remove(&tree).unwrap();

        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        remove(&link).unwrap_err();
        assert!(outside.join("file").exists());
    }

    #[test]
    fn it_stops_when_it_is_told_to_and_can_go_on() {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        fs::create_dir(&tree).unwrap();
        for number in 0..10 {
            fs::write(tree.join(number.to_string()), "goes").unwrap();
        }
        let left = || fs::read_dir(&tree).unwrap().count();
        let looks = Cell::new(0);
        let sixth = || looks.replace(looks.get() + 1) == 5;
        empty(&tree, &sixth).unwrap_err();
        assert!((1..10).contains(&left()), "{} left", left());
        empty(&tree, &|| false).unwrap();
        assert_eq!(left(), 0);
        remove(&tree).unwrap();
        assert!(!tree.exists());
        empty(&tree, &|| false).unwrap();
    }

    #[test]
    fn a_tree_may_be_deeper_than_any_stack_and_any_path() {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        fs::create_dir(&tree).unwrap();
        let mut here = open(&tree, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..20_000 {
            mkdirat(&here, c"deep", Mode::RWXU).unwrap();
            here = openat(&here, c"deep", DIRECTORY, Mode::empty()).unwrap();
        }
        drop(here);
        // Much less stack than recursion would need.
        let small = std::thread::Builder::new().stack_size(128 << 10);
        let removed = small.spawn(move || remove(&tree)).unwrap().join();
        removed.unwrap().unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
