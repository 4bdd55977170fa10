//! The initramfs: a tree of files as a `newc` archive, compressed with zstd.
//!
//! The same tree gives the same bytes: entries are sorted, numbered from 1, owned by root and dated 1970. Parent
//! directories are created implicitly, before their entries. The archive starts with `/dev/console` and `/dev/null`:
//! the kernel opens the former for init before anything is mounted, and a program that starts with closed standard
//! descriptors can fail in obscure ways.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use cpio::newc::{self, ModeFileType};

use crate::closure::{self, ClosureError};

/// zstd's level. For a node's binary, 3 takes a quarter of the time and gives 11 % more; 19 takes 20 times as long for 11 %
/// less.
const LEVEL: i32 = 9;

/// Archives begin at multiples of four; those in front of others are padded to a block, as `cpio` does.
const EARLY_ALIGNMENT: usize = 512;

/// Why an initramfs could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum InitramfsError {
    #[error("invalid initramfs path {path:?}: {reason}")]
    Path { path: String, reason: &'static str },
    #[error("{0} was added to the initramfs twice, with different content")]
    Conflict(String),
    #[error("{0} is 4 GiB or more, which exceeds the limit of the cpio format")]
    TooLarge(String),
    #[error("cannot collect the libraries of {path}")]
    Program { path: String, source: ClosureError },
    #[error("cannot compress the initramfs")]
    Compress(#[source] io::Error),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Node {
    Directory,
    File { mode: u32, bytes: Vec<u8> },
    Symlink { target: String },
    Device { mode: u32, major: u32, minor: u32 },
}

/// Files by absolute path in the running system.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: BTreeMap<String, Node>,
}

impl Default for Tree {
    fn default() -> Self {
        Tree::new()
    }
}

impl Tree {
    /// A tree with nothing in it.
    fn empty() -> Tree {
        Tree {
            nodes: BTreeMap::new(),
        }
    }

    /// A tree with `/dev/console` and `/dev/null`.
    pub fn new() -> Tree {
        let device = |mode, major, minor| Node::Device { mode, major, minor };
        let nodes = [
            ("/dev", Node::Directory),
            ("/dev/console", device(0o600, 5, 1)),
            ("/dev/null", device(0o666, 1, 3)),
        ];
        Tree {
            nodes: nodes.map(|(path, node)| (path.to_owned(), node)).into(),
        }
    }

    /// Adds an empty directory, mode 0755. Not an error if it exists.
    pub fn directory(&mut self, path: &str) -> Result<(), InitramfsError> {
        self.insert(path, Node::Directory)
    }

    /// Adds a file; `mode` is its permission bits. Adding the same file twice is not an error.
    pub fn file(&mut self, path: &str, mode: u32, bytes: Vec<u8>) -> Result<(), InitramfsError> {
        self.insert(
            path,
            Node::File {
                mode: mode & 0o7777,
                bytes,
            },
        )
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) -> Result<(), InitramfsError> {
        self.insert(
            path,
            Node::Symlink {
                target: target.to_owned(),
            },
        )
    }

    /// Adds the program at `source` as `path`, with its interpreter and shared libraries at the paths that the loader
    /// searches.
    pub fn program(&mut self, source: &Path, path: &str) -> Result<(), InitramfsError> {
        let objects = closure::closure(source, path).map_err(|source| InitramfsError::Program {
            path: path.to_owned(),
            source,
        })?;
        for (path, object) in objects {
            self.file(&path, 0o755, object.bytes)?;
        }
        Ok(())
    }

    /// The paths in the tree, sorted, with the sizes of files.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.nodes.iter().filter_map(|(path, node)| match node {
            Node::File { bytes, .. } => Some((path.as_str(), bytes.len() as u64)),
            _ => None,
        })
    }

    fn insert(&mut self, path: &str, node: Node) -> Result<(), InitramfsError> {
        let refused = |reason| {
            Err(InitramfsError::Path {
                path: path.to_owned(),
                reason,
            })
        };
        let Some(relative) = path.strip_prefix('/') else {
            return refused("it is not absolute");
        };
        if path.contains('\0') {
            return refused("it has a NUL character");
        }
        if relative
            .split('/')
            .any(|part| matches!(part, "" | "." | ".."))
        {
            return refused("it has an empty, \".\" or \"..\" part");
        }
        // The entry that ends an archive.
        if relative == "TRAILER!!!" {
            return refused("it is the end marker of cpio archives");
        }
        if let Node::File { bytes, .. } = &node
            && u32::try_from(bytes.len()).is_err()
        {
            return Err(InitramfsError::TooLarge(path.to_owned()));
        }
        for (end, _) in relative.match_indices('/') {
            let parent = self
                .nodes
                .entry(path[..=end].to_owned())
                .or_insert(Node::Directory);
            if *parent != Node::Directory {
                return Err(InitramfsError::Conflict(path[..=end].to_owned()));
            }
        }
        match self.nodes.entry(path.to_owned()) {
            std::collections::btree_map::Entry::Occupied(old) if *old.get() != node => {
                Err(InitramfsError::Conflict(path.to_owned()))
            }
            entry => {
                entry.or_insert(node);
                Ok(())
            }
        }
    }

    /// The archive, uncompressed.
    pub fn to_cpio(&self) -> Vec<u8> {
        let size: usize = self
            .files()
            .map(|(path, size)| size as usize + path.len() + 256)
            .sum();
        let mut archive = Vec::with_capacity(size + 4096);
        // A directory sorts before its entries, so the kernel creates each parent first.
        for (index, (path, node)) in self.nodes.iter().enumerate() {
            // Infallible: the sizes were checked when the files were added, and writing to a Vec cannot fail.
            archive = write_node(archive, index as u32 + 1, path, node)
                .expect("writing to memory does not fail");
        }
        newc::trailer(archive).expect("writing to memory does not fail")
    }

    /// The archive under zstd, with a checksum, as kernels with CONFIG_RD_ZSTD read it.
    pub fn to_zstd(&self) -> Result<Vec<u8>, InitramfsError> {
        let compress = || -> io::Result<Vec<u8>> {
            let archive = self.to_cpio();
            let mut encoder = zstd::Encoder::new(Vec::with_capacity(archive.len() / 2), LEVEL)?;
            encoder.include_checksum(true)?;
            encoder.write_all(&archive)?;
            encoder.finish()
        };
        compress().map_err(InitramfsError::Compress)
    }
}

/// An archive that is placed in front of an initramfs: uncompressed, because the kernel reads it (for microcode) before it
/// can decompress anything, and padded so that the next archive begins where the kernel looks for it. No files, no bytes.
pub fn early(files: &BTreeMap<String, Vec<u8>>) -> Result<Vec<u8>, InitramfsError> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let mut tree = Tree::empty();
    for (path, bytes) in files {
        tree.file(path, 0o644, bytes.clone())?;
    }
    let mut archive = tree.to_cpio();
    archive.resize(archive.len().next_multiple_of(EARLY_ALIGNMENT), 0);
    Ok(archive)
}

fn write_node(archive: Vec<u8>, inode: u32, path: &str, node: &Node) -> io::Result<Vec<u8>> {
    let header = newc::Builder::new(&path[1..]).ino(inode);
    let (header, content): (_, &[u8]) = match node {
        Node::Directory => (
            header
                .mode(0o755)
                .set_mode_file_type(ModeFileType::Directory),
            &[],
        ),
        Node::File { mode, bytes } => (
            header.mode(*mode).set_mode_file_type(ModeFileType::Regular),
            bytes,
        ),
        Node::Symlink { target } => (
            header.mode(0o777).set_mode_file_type(ModeFileType::Symlink),
            target.as_bytes(),
        ),
        Node::Device { mode, major, minor } => {
            let header = header.mode(*mode).set_mode_file_type(ModeFileType::Char);
            (header.rdev_major(*major).rdev_minor(*minor), &[])
        }
    };
    let mut writer = header.write(archive, content.len() as u32);
    writer.write_all(content)?;
    writer.finish()
}
