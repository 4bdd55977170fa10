//! Read-only file systems: a tree of files as EROFS with zstd, which Linux mounts from 6.10 on.
//!
//! The same tree gives the same bytes: entries are sorted by name, owned by root and dated 1970, a file's mode only
//! depends on whether it is executable, and the results of threads are put together in order. There are no hard links,
//! devices or extended attributes; compressed files with the same content share its blocks.
//!
//! ```text
//! block 0    boot sector (zero) │ super block at 1024 │ zstd's settings │ root directory's inode │ …
//!            … inodes in the order of the paths, each followed by
//!               up to 2 KiB of content, or the index of a compressed file
//! then       data, in blocks of 4 KiB: long directories, files, compressed chunks
//! ```
//!
//! A file is split into chunks of [`CHUNK`] bytes, which are compressed independently, so that a page in the middle of
//! a program costs one chunk. The format was designed for chunks whose *output* fills whole blocks. Splitting the input
//! instead wastes half a block per chunk, 2 to 3 %, but all chunks of all files can be compressed in parallel and start
//! at a page boundary. The index is the plain one of eight bytes per page (0.2 %), not the compact one, whose
//! complexity is not worth the savings.
//!
//! zstd and not LZ4: it compresses Go programs, which extensions consist of, to a third of their size, and the size
//! that every node downloads and keeps matters more than the cost of a page's first read.
//!
//! This library does not use an external program: Debian's `mkfs.erofs` does not support zstd. Existing crates read the
//! format, but do not write it.

mod format;
mod pack;
mod tree;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::PathBuf;

use crate::content::Content;
use format::{BLOCK, Data, DirectoryEntry, Inode};
use pack::{Chunk, Packed};
use tree::Flat;

pub use format::CHUNK;
pub use tree::Tree;

/// Why a file system could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum ErofsError {
    #[error("invalid path {path:?}: {reason}")]
    Path { path: String, reason: &'static str },
    #[error("duplicate path {0}")]
    Conflict(String),
    #[error("{} is neither a file nor a directory nor a symbolic link", .0.display())]
    Special(PathBuf),
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: expected at most {most} bytes, got {found}")]
    TooLarge { path: String, found: u64, most: u64 },
    #[error("cannot compress {path}")]
    Compress { path: String, source: io::Error },
    #[error("cannot write the file system")]
    Write(#[source] io::Error),
    #[error("interrupted")]
    Stopped,
}

/// Name and UUID of a volume.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Up to 15 bytes; longer names are truncated.
    pub name: String,
    /// UUID of the file system.
    pub uuid: [u8; 16],
}

/// Called with the bytes done and the total; `false` aborts. May be called from several threads.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) -> bool + Sync);

/// Writes the file system at the file's beginning; returns its length in blocks of 4096 bytes.
pub fn write(
    tree: &Tree,
    volume: &Volume,
    file: &mut File,
    progress: Progress<'_>,
) -> Result<u64, ErofsError> {
    let flat = tree.flatten();
    let packed = pack::pack(&flat, progress)?;
    let plan = Plan::new(&flat, &packed)?;
    plan.write(volume, file)
}

/// The offsets of all parts.
struct Plan<'a> {
    flat: &'a [Flat<'a>],
    packed: &'a [Packed],
    /// Byte offsets of the inodes.
    inodes: Vec<u64>,
    /// First block of content that is not stored inline; the same for files that share it.
    data: Vec<u64>,
    /// Length of the metadata in bytes.
    metadata: u64,
    blocks: u64,
}

impl<'a> Plan<'a> {
    fn new(flat: &'a [Flat<'a>], packed: &'a [Packed]) -> Result<Self, ErofsError> {
        let mut at = format::FIRST_INODE;
        let mut inodes = Vec::with_capacity(flat.len());
        for packed in packed {
            let beside = packed.beside();
            // Inline content must be in the same block as its inode.
            let crosses = at % BLOCK + format::INODE + beside > BLOCK;
            if packed.is_inline() && crosses {
                at = at.next_multiple_of(BLOCK);
            }
            inodes.push(at);
            at = (at + format::INODE + beside).next_multiple_of(format::INODE);
        }
        let metadata = at;
        let mut block = at.div_ceil(BLOCK);
        let mut data = Vec::with_capacity(flat.len());
        let mut compressed: HashMap<&[Chunk], u64> = HashMap::new();
        for packed in packed {
            let first = match packed {
                Packed::Compressed { chunks, .. } => *compressed.entry(chunks).or_insert(block),
                _ => block,
            };
            data.push(first);
            if first == block {
                block += packed.blocks();
            }
        }
        // Block numbers have 32 bits.
        if u32::try_from(block).is_err() {
            return Err(ErofsError::TooLarge {
                path: "file system".into(),
                found: block * BLOCK,
                most: u64::from(u32::MAX) * BLOCK,
            });
        }
        Ok(Self {
            flat,
            packed,
            inodes,
            data,
            metadata,
            blocks: block,
        })
    }

    fn write(&self, volume: &Volume, file: &mut File) -> Result<u64, ErofsError> {
        let mut metadata = vec![0; self.metadata as usize];
        format::super_block(
            &mut metadata,
            &volume.name,
            volume.uuid,
            self.flat.len(),
            self.blocks,
        );
        for (number, packed) in self.packed.iter().enumerate() {
            let at = self.inodes[number] as usize;
            let (inode, beside) = self.inode(number, packed);
            inode.encode(&mut metadata[at..]);
            let at = at + format::INODE as usize;
            metadata[at..at + beside.len()].copy_from_slice(&beside);
        }
        let failed = ErofsError::Write;
        file.set_len(self.blocks * BLOCK).map_err(failed)?;
        file.rewind().map_err(failed)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&metadata).map_err(failed)?;
        for (number, packed) in self.packed.iter().enumerate() {
            if packed.blocks() > 0 {
                let at = SeekFrom::Start(self.data[number] * BLOCK);
                out.seek(at).map_err(failed)?;
                self.write_data(number, packed, &mut out)?;
            }
        }
        out.flush().map_err(failed)?;
        Ok(self.blocks)
    }

    /// A node's inode, and the bytes that follow it.
    fn inode(&self, number: usize, packed: &Packed) -> (Inode, Vec<u8>) {
        let flat = &self.flat[number];
        let first = self.data[number];
        let (data, beside) = match packed {
            Packed::Inline { bytes } => (Data::Inline, bytes.clone()),
            Packed::Plain { .. } => (Data::Plain { first }, Vec::new()),
            Packed::Compressed { chunks, length } => {
                let index = format::index(first, *length, chunks.iter().map(Chunk::placed));
                let blocks = packed.blocks();
                (Data::Compressed { blocks }, index)
            }
            Packed::Directory { length } if *length <= format::INLINE => {
                (Data::Inline, self.directory(number))
            }
            Packed::Directory { .. } => (Data::Plain { first }, Vec::new()),
        };
        let inode = Inode {
            mode: flat.mode(),
            links: flat.links(),
            // Below 4 GiB, as checked while packing.
            size: packed.length() as u32,
            number: number as u32 + 1,
            data,
        };
        (inode, beside)
    }

    fn directory(&self, number: usize) -> Vec<u8> {
        let flat = &self.flat[number];
        let entries = flat.names().map(|(name, target)| DirectoryEntry {
            name,
            kind: self.flat[target].kind(),
            inode: self.inodes[target],
        });
        format::directory(entries)
    }

    fn write_data(
        &self,
        number: usize,
        packed: &Packed,
        out: &mut impl Write,
    ) -> Result<(), ErofsError> {
        let failed = ErofsError::Write;
        match packed {
            Packed::Inline { .. } => Ok(()),
            Packed::Directory { .. } => out.write_all(&self.directory(number)).map_err(failed),
            Packed::Plain { .. } => match self.flat[number].content() {
                Some(content) => content.copy_to(out).map_err(failed),
                None => Ok(()),
            },
            Packed::Compressed { chunks, .. } => {
                for chunk in chunks {
                    chunk.write(out).map_err(failed)?;
                }
                Ok(())
            }
        }
    }
}

/// Reads a part of a content.
fn read_part(content: &Content, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
    match content {
        Content::Bytes(bytes) => {
            let start = offset as usize;
            let part = bytes.get(start..start + buffer.len());
            buffer.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
        Content::File { path, .. } => {
            use std::os::unix::fs::FileExt;
            File::open(path)?.read_exact_at(buffer, offset)
        }
    }
}
