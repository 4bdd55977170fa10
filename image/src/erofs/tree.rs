//! The content of a file system: files, directories and symbolic links by name.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use ring::digest::{Context, SHA256, digest};

use super::ErofsError;
use super::format::{INLINE, Kind};
use crate::content::Content;

/// The kernel's limit for a name, in bytes.
const LONGEST_NAME: usize = 255;
/// The target of a symbolic link is stored inline; the kernel accepts twice this length.
const LONGEST_TARGET: usize = INLINE as usize;
/// A directory's link count, which includes its subdirectories, has 16 bits.
const MOST_DIRECTORIES: usize = 60_000;

/// A tree of files. Paths are relative, with slashes between their parts.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    root: Directory,
}

#[derive(Debug, Clone, Default)]
struct Directory {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone)]
enum Entry {
    Directory(Directory),
    File { content: Content, executable: bool },
    Symlink { target: String },
}

impl Tree {
    /// Everything in a folder. Of a file's mode, only the owner's execute bit is used.
    pub fn of_folder(folder: &Path) -> Result<Tree, ErofsError> {
        let mut tree = Tree::default();
        tree.take_in(folder, "")?;
        Ok(tree)
    }

    fn take_in(&mut self, folder: &Path, prefix: &str) -> Result<(), ErofsError> {
        use std::os::unix::fs::PermissionsExt;
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| ErofsError::Read { path, source }
        };
        for entry in std::fs::read_dir(folder).map_err(failed(folder))? {
            let entry = entry.map_err(failed(folder))?;
            let path = entry.path();
            let name = entry.file_name().into_string().map_err(|name| {
                let path = name.to_string_lossy().into_owned();
                let reason = "its name is not UTF-8";
                ErofsError::Path { path, reason }
            })?;
            let inside = format!("{prefix}{name}");
            let metadata = entry.metadata().map_err(failed(&path))?;
            if metadata.is_dir() {
                self.directory(&inside)?;
                self.take_in(&path, &format!("{inside}/"))?;
            } else if metadata.is_symlink() {
                let target = std::fs::read_link(&path).map_err(failed(&path))?;
                let target = target.to_str().ok_or_else(|| ErofsError::Path {
                    path: inside.clone(),
                    reason: "its target is not UTF-8",
                })?;
                self.symlink(&inside, target)?;
            } else if metadata.is_file() {
                let content = Content::of_file(&path).map_err(failed(&path))?;
                self.file(&inside, content, metadata.permissions().mode() & 0o100 != 0)?;
            } else {
                return Err(ErofsError::Special(path));
            }
        }
        Ok(())
    }

    /// Adds a directory. Not an error if it exists.
    pub fn directory(&mut self, path: &str) -> Result<(), ErofsError> {
        self.root.descend(path, path.split('/')).map(drop)
    }

    /// Adds a file; its mode is 0755 if it is executable, otherwise 0644.
    pub fn file(
        &mut self,
        path: &str,
        content: Content,
        executable: bool,
    ) -> Result<(), ErofsError> {
        let found = content.length();
        let most = u64::from(u32::MAX);
        if found > most {
            let path = path.to_owned();
            return Err(ErofsError::TooLarge { path, found, most });
        }
        self.insert(
            path,
            Entry::File {
                content,
                executable,
            },
        )
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) -> Result<(), ErofsError> {
        if target.is_empty() || target.len() > LONGEST_TARGET || target.contains('\0') {
            let path = path.to_owned();
            let reason = "its target is empty, too long or has a NUL character";
            return Err(ErofsError::Path { path, reason });
        }
        let target = target.to_owned();
        self.insert(path, Entry::Symlink { target })
    }

    /// Total bytes of all files.
    pub fn length(&self) -> u64 {
        let flat = self.flatten();
        flat.iter()
            .filter_map(Flat::content)
            .map(Content::length)
            .sum()
    }

    /// SHA-256 over everything that goes into a file system of this tree.
    pub fn digest(&self) -> Result<[u8; 32], ErofsError> {
        let mut whole = Context::new(&SHA256);
        for flat in self.flatten() {
            let content = match flat.what {
                What::Directory => digest(&SHA256, b""),
                What::Symlink(target) => digest(&SHA256, target.as_bytes()),
                What::File(content, _) => {
                    let mut hash = Hash(Context::new(&SHA256));
                    let path = || flat.path.clone().into();
                    content
                        .copy_to(&mut hash)
                        .map_err(|source| ErofsError::Read {
                            path: path(),
                            source,
                        })?;
                    hash.0.finish()
                }
            };
            whole.update(&(flat.path.len() as u64).to_le_bytes());
            whole.update(flat.path.as_bytes());
            whole.update(&flat.mode().to_le_bytes());
            whole.update(content.as_ref());
        }
        let mut bytes = [0; 32];
        bytes.copy_from_slice(whole.finish().as_ref());
        Ok(bytes)
    }

    fn insert(&mut self, path: &str, entry: Entry) -> Result<(), ErofsError> {
        let (parents, name) = match path.rsplit_once('/') {
            Some((parents, name)) => (Some(parents), name),
            None => (None, path),
        };
        let parts = parents.iter().flat_map(|parents| parents.split('/'));
        let directory = self.root.descend(path, parts)?;
        check_name(path, name)?;
        match directory.entries.insert(name.to_owned(), entry) {
            None => Ok(()),
            Some(_) => Err(ErofsError::Conflict(path.to_owned())),
        }
    }

    /// All nodes, the root first and each directory before its entries.
    pub(super) fn flatten(&self) -> Vec<Flat<'_>> {
        let mut flat = vec![Flat {
            path: "/".to_owned(),
            what: What::Directory,
            names: Vec::new(),
            directories: 0,
        }];
        self.root.flatten_into(&mut flat, 0, 0);
        flat
    }
}

/// Hashes what is written to it.
struct Hash(Context);

impl io::Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Directory {
    fn descend<'a>(
        &mut self,
        path: &str,
        parts: impl Iterator<Item = &'a str>,
    ) -> Result<&mut Directory, ErofsError> {
        let mut directory = self;
        for part in parts {
            check_name(path, part)?;
            let entry = directory.entries.entry(part.to_owned());
            let entry = entry.or_insert_with(|| Entry::Directory(Directory::default()));
            let Entry::Directory(next) = entry else {
                return Err(ErofsError::Conflict(path.to_owned()));
            };
            directory = next;
        }
        let found = directory.entries.len();
        if found > MOST_DIRECTORIES {
            return Err(ErofsError::TooLarge {
                path: path.to_owned(),
                found: found as u64,
                most: MOST_DIRECTORIES as u64,
            });
        }
        Ok(directory)
    }

    fn flatten_into<'a>(&'a self, flat: &mut Vec<Flat<'a>>, own: usize, parent: usize) {
        let mut names = vec![(".", own), ("..", parent)];
        for (name, entry) in &self.entries {
            let number = flat.len();
            names.push((name, number));
            let above = flat[own].path.trim_end_matches('/');
            let path = format!("{above}/{name}");
            let (what, inner) = match entry {
                Entry::Directory(directory) => (What::Directory, Some(directory)),
                Entry::File {
                    content,
                    executable,
                } => (What::File(content, *executable), None),
                Entry::Symlink { target } => (What::Symlink(target), None),
            };
            flat.push(Flat {
                path,
                what,
                names: Vec::new(),
                directories: 0,
            });
            if let Some(directory) = inner {
                flat[own].directories += 1;
                directory.flatten_into(flat, number, own);
            }
        }
        // In byte order, as the kernel searches; some names sort before the dots.
        names.sort_unstable();
        flat[own].names = names;
    }
}

fn check_name(path: &str, name: &str) -> Result<(), ErofsError> {
    let reason = match name {
        "" | "." | ".." => "it has an empty, \".\" or \"..\" part",
        name if name.contains('\0') => "it has a NUL character",
        name if name.len() > LONGEST_NAME => "a part of it is longer than 255 bytes",
        _ => return Ok(()),
    };
    Err(ErofsError::Path {
        path: path.to_owned(),
        reason,
    })
}

/// One node of a flattened tree.
#[derive(Debug)]
pub(super) struct Flat<'a> {
    /// Path for messages.
    pub(super) path: String,
    pub(super) what: What<'a>,
    /// For a directory: its entries by name, with their indices in the flattened tree.
    names: Vec<(&'a str, usize)>,
    /// For a directory: number of its subdirectories.
    directories: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum What<'a> {
    Directory,
    File(&'a Content, bool),
    Symlink(&'a str),
}

impl<'a> Flat<'a> {
    pub(super) fn names(&self) -> impl Iterator<Item = (&'a str, usize)> {
        self.names.iter().copied()
    }

    pub(super) fn content(&self) -> Option<&'a Content> {
        match self.what {
            What::File(content, _) => Some(content),
            _ => None,
        }
    }

    pub(super) fn kind(&self) -> Kind {
        match self.what {
            What::Directory => Kind::Directory,
            What::File(..) => Kind::File,
            What::Symlink(_) => Kind::Symlink,
        }
    }

    /// Link count of the node, including the `..` of its subdirectories.
    pub(super) fn links(&self) -> u16 {
        match self.what {
            // Limited where directories are added.
            What::Directory => (self.directories + 2) as u16,
            What::File(..) | What::Symlink(_) => 1,
        }
    }

    pub(super) fn mode(&self) -> u16 {
        match self.what {
            What::Directory => 0o040_755,
            What::File(_, true) => 0o100_755,
            What::File(_, false) => 0o100_644,
            What::Symlink(_) => 0o120_777,
        }
    }
}
