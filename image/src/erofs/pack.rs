//! Packs each node's content: inline, in blocks, or compressed. This is the slow part, and uses all processors.

use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use zstd::bulk::Compressor;
use zstd::zstd_safe::CParameter;

use super::format::{self, BLOCK, CHUNK, INLINE, Placed};
use super::tree::{Flat, What};
use super::{ErofsError, Progress, read_part};

/// zstd's level. For Kubernetes, 15 takes two thirds of the time and gives 1 % more, 12 gives 7 % more; 19 takes 1.4
/// times as long for 0.1 % less.
const LEVEL: i32 = 16;

/// Packed content of a node.
#[derive(Debug)]
pub(super) enum Packed {
    /// Inline, after its inode.
    Inline { bytes: Vec<u8> },
    /// Uncompressed, in blocks.
    Plain { length: u64 },
    /// Compressed, in blocks.
    Compressed { chunks: Vec<Chunk>, length: u64 },
    /// Inline or in blocks; the bytes depend on the offsets of everything else.
    Directory { length: u64 },
}

/// One chunk of a file, compressed if that made it smaller.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) enum Chunk {
    Compressed(Vec<u8>),
    Stored(Vec<u8>),
}

impl Chunk {
    pub(super) fn placed(&self) -> Placed {
        match self {
            // At most what the uncompressed chunk would take.
            Chunk::Compressed(bytes) => Placed::Compressed {
                blocks: blocks_of(bytes.len() as u64) as u16,
            },
            Chunk::Stored(_) => Placed::Stored,
        }
    }

    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let (Chunk::Compressed(bytes) | Chunk::Stored(bytes)) = self;
        let padding = vec![0; bytes.len().next_multiple_of(BLOCK as usize) - bytes.len()];
        // The kernel skips zeros to find the start of compressed data.
        match self {
            Chunk::Compressed(_) => out.write_all(&padding).and_then(|()| out.write_all(bytes)),
            Chunk::Stored(_) => out.write_all(bytes).and_then(|()| out.write_all(&padding)),
        }
    }

    fn blocks(&self) -> u64 {
        let (Chunk::Compressed(bytes) | Chunk::Stored(bytes)) = self;
        blocks_of(bytes.len() as u64)
    }
}

impl Packed {
    /// The content's length in bytes.
    pub(super) fn length(&self) -> u64 {
        match self {
            Packed::Inline { bytes } => bytes.len() as u64,
            Packed::Plain { length }
            | Packed::Compressed { length, .. }
            | Packed::Directory { length } => *length,
        }
    }

    /// Number of inline bytes, after the inode.
    pub(super) fn beside(&self) -> u64 {
        match self {
            Packed::Inline { bytes } => bytes.len() as u64,
            Packed::Directory { length } if *length <= INLINE => *length,
            Packed::Compressed { length, .. } => format::index_length(*length),
            Packed::Plain { .. } | Packed::Directory { .. } => 0,
        }
    }

    /// Whether the content is inline.
    pub(super) fn is_inline(&self) -> bool {
        match self {
            Packed::Inline { .. } => true,
            Packed::Directory { length } => *length <= INLINE,
            Packed::Plain { .. } | Packed::Compressed { .. } => false,
        }
    }

    /// Number of blocks outside the metadata.
    pub(super) fn blocks(&self) -> u64 {
        match self {
            Packed::Inline { .. } => 0,
            Packed::Directory { length } if *length <= INLINE => 0,
            Packed::Plain { length } | Packed::Directory { length } => blocks_of(*length),
            Packed::Compressed { chunks, .. } => chunks.iter().map(Chunk::blocks).sum(),
        }
    }
}

/// Packs every node.
pub(super) fn pack(flat: &[Flat<'_>], progress: Progress<'_>) -> Result<Vec<Packed>, ErofsError> {
    let mut compressed = compress_all(flat, progress)?;
    flat.iter()
        .enumerate()
        .map(|(number, node)| pack_one(node, std::mem::take(&mut compressed[number])))
        .collect()
}

fn pack_one(node: &Flat<'_>, chunks: Vec<Chunk>) -> Result<Packed, ErofsError> {
    match node.what {
        What::Directory => {
            let names = node.names().map(|(name, _)| name.len());
            let length = format::directory_length(names);
            Ok(Packed::Directory { length })
        }
        // Longer content would not fit into one block together with its inode.
        What::Symlink(target) => Ok(Packed::Inline {
            bytes: target.as_bytes().to_vec(),
        }),
        What::File(content, _) => {
            let length = content.length();
            if length <= INLINE {
                let mut bytes = vec![0; length as usize];
                read_part(content, 0, &mut bytes).map_err(unreadable(node))?;
                Ok(Packed::Inline { bytes })
            } else if chunks.iter().any(|c| matches!(c, Chunk::Compressed(_))) {
                Ok(Packed::Compressed { chunks, length })
            } else {
                Ok(Packed::Plain { length })
            }
        }
    }
}

/// The chunks of every node that is worth compressing; empty for all others.
fn compress_all(flat: &[Flat<'_>], progress: Progress<'_>) -> Result<Vec<Vec<Chunk>>, ErofsError> {
    let mut jobs = Vec::new();
    for (number, node) in flat.iter().enumerate() {
        let length = node.content().map_or(0, |content| content.length());
        // What fits into one block cannot take less.
        if length > BLOCK {
            jobs.extend((0..length.div_ceil(CHUNK)).map(|chunk| (number, chunk * CHUNK)));
        }
    }
    let work = Work {
        flat,
        results: jobs.iter().map(|_| Mutex::new(None)).collect(),
        jobs,
        next: AtomicUsize::new(0),
        done: AtomicU64::new(0),
        stopped: AtomicBool::new(false),
        progress,
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(work.jobs.len()) {
            scope.spawn(|| work.run());
        }
    });
    let mut chunks: Vec<Vec<Chunk>> = flat.iter().map(|_| Vec::new()).collect();
    let mut whole = true;
    for ((number, _), result) in work.jobs.iter().zip(work.results) {
        // A failure leaves gaps, perhaps before it, and has to be reported.
        match result.into_inner().unwrap_or_else(|e| e.into_inner()) {
            Some(chunk) => chunks[*number].push(chunk?),
            None => whole = false,
        }
    }
    if whole {
        Ok(chunks)
    } else {
        Err(ErofsError::Stopped)
    }
}

/// Shared by the threads.
struct Work<'a> {
    flat: &'a [Flat<'a>],
    /// Node number, and offset in its content.
    jobs: Vec<(usize, u64)>,
    results: Vec<Mutex<Option<Result<Chunk, ErofsError>>>>,
    next: AtomicUsize,
    done: AtomicU64,
    stopped: AtomicBool,
    progress: Progress<'a>,
}

impl Work<'_> {
    fn run(&self) {
        let mut compressor = compressor();
        while !self.stopped.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some((node, offset)) = self.jobs.get(number) else {
                return;
            };
            let result = self.chunk(&self.flat[*node], *offset, &mut compressor);
            // After a failure, which is reported, the other results are not needed.
            let mut go_on = result.is_ok();
            let all: u64 = self.jobs.len() as u64 * CHUNK;
            let done = self.done.fetch_add(CHUNK, Ordering::Relaxed) + CHUNK;
            go_on &= (self.progress)(done, all);
            *self.results[number]
                .lock()
                .unwrap_or_else(|e| e.into_inner()) = Some(result);
            if !go_on {
                self.stopped.store(true, Ordering::Relaxed);
            }
        }
    }

    fn chunk(
        &self,
        node: &Flat<'_>,
        offset: u64,
        compressor: &mut io::Result<Compressor<'static>>,
    ) -> Result<Chunk, ErofsError> {
        let failed = |source| ErofsError::Compress {
            path: node.path.clone(),
            source,
        };
        let Some(content) = node.content() else {
            return Ok(Chunk::Stored(Vec::new()));
        };
        let mut raw = vec![0; (content.length() - offset).min(CHUNK) as usize];
        read_part(content, offset, &mut raw).map_err(unreadable(node))?;
        let compressor = match compressor {
            Ok(compressor) => compressor,
            Err(error) => return Err(failed(io::Error::other(error.to_string()))),
        };
        let small = compressor.compress(&raw).map_err(failed)?;
        if blocks_of(small.len() as u64) < blocks_of(raw.len() as u64) {
            Ok(Chunk::Compressed(small))
        } else {
            Ok(Chunk::Stored(raw))
        }
    }
}

/// The kernel allocates a window of one chunk, and dm-verity checks the data.
fn compressor() -> io::Result<Compressor<'static>> {
    let mut compressor = Compressor::new(LEVEL)?;
    let window = CHUNK.trailing_zeros();
    compressor.set_parameter(CParameter::WindowLog(window))?;
    compressor.set_parameter(CParameter::ChecksumFlag(false))?;
    Ok(compressor)
}

fn unreadable(node: &Flat<'_>) -> impl FnOnce(io::Error) -> ErofsError {
    let path = node.path.clone().into();
    move |source| ErofsError::Read { path, source }
}

fn blocks_of(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK)
}
