//! A disk that is changed to what cuts leave, one after the other.
//!
//! The promises of a log are replayed once, forward. What a cut keeps beyond them is written and, before the next one,
//! taken back, so that the work for a sweep does not grow with the square of the log. A machine must not write to this
//! disk but to an overlay. Only what differs is written: a sparse file stays sparse where nothing but zeros is written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use crate::cut::Cut;
use crate::log::{Entry, Kind, Log, Source};

/// Bytes that are compared and written at once.
const BLOCK: u64 = 64 << 10;

/// A disk: bytes that can be read and written at any position.
pub trait Disk: Source {
    /// Writes bytes within the disk.
    ///
    /// # Errors
    /// If they cannot be written.
    fn write(&mut self, bytes: &[u8], at: u64) -> io::Result<()>;
}

impl Disk for File {
    fn write(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }
}

/// The disk does not become what the cut leaves. It can then not be used any more.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The log ends before.
    #[error("cut {cut}: expected at most {promises} promises, as in the log")]
    NoSuchCut {
        /// The cut.
        cut: Cut,
        /// How many there are.
        promises: usize,
    },
    /// The disk has been replayed beyond it.
    #[error("cut {cut}: expected one at or after entry {replayed}, found entry {flushed}")]
    Before {
        /// The cut.
        cut: Cut,
        /// The entries that are on the disk.
        replayed: usize,
        /// The entries that the cut's last flush covers.
        flushed: usize,
    },
    /// The log cannot be read.
    #[error("cannot read the log at byte {at}: {source}")]
    Log {
        /// Position in the log.
        at: u64,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// The disk cannot be read or written.
    #[error("cannot {step} the disk at byte {at}: {source}")]
    Disk {
        /// What was attempted.
        step: &'static str,
        /// Position on the disk.
        at: u64,
        /// The underlying I/O error.
        source: io::Error,
    },
}

/// What was on the disk where a cut has changed it.
#[derive(Debug)]
struct Former {
    at: u64,
    bytes: Vec<u8>,
}

/// A disk in the course of a log.
#[derive(Debug)]
pub struct Replay<S, D> {
    source: S,
    disk: D,
    /// The entries that are on the disk for good.
    replayed: usize,
    former: Vec<Former>,
}

impl<S: Source, D: Disk> Replay<S, D> {
    /// A disk as it was before the log that these bytes are.
    pub fn new(source: S, disk: D) -> Self {
        Self {
            source,
            disk,
            replayed: 0,
            former: Vec::new(),
        }
    }

    /// The disk.
    pub fn disk(&self) -> &D {
        &self.disk
    }

    /// Makes the disk what this cut leaves in the log, or in the log at an earlier moment. Its flush must be that of the
    /// previous cut, or a later one.
    ///
    /// # Errors
    /// If there is no such cut, it is before the previous one, or something cannot be read or written.
    pub fn cut(&mut self, log: &Log, cut: Cut) -> Result<(), ReplayError> {
        let kept = log.kept(cut).ok_or(ReplayError::NoSuchCut {
            cut,
            promises: log.promise_count(),
        })?;
        let flushed = log.flushed(cut.after);
        if flushed < self.replayed {
            return Err(ReplayError::Before {
                cut,
                replayed: self.replayed,
                flushed,
            });
        }
        while let Some(Former { at, bytes }) = self.former.pop() {
            self.write(&bytes, at)?;
        }
        for entry in &log.entries()[self.replayed..flushed] {
            self.apply(log, entry, 0..entry.sectors)?;
        }
        self.replayed = flushed;
        self.former.clear();
        for kept in kept {
            self.apply(log, &log.entries()[kept.entry], kept.sectors)?;
        }
        Ok(())
    }

    /// Writes these of an entry's sectors.
    fn apply(&mut self, log: &Log, entry: &Entry, sectors: Range<u64>) -> Result<(), ReplayError> {
        if !entry.changes() {
            return Ok(());
        }
        let sector_bytes = u64::from(log.sector_bytes());
        let (from, to) = (sectors.start * sector_bytes, sectors.end * sector_bytes);
        let (mut new, mut old) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
        let mut at = from;
        while at < to {
            let length = BLOCK.min(to - at) as usize;
            let (new, old) = (&mut new[..length], &mut old[..length]);
            // What is discarded reads as zeros: the machine that was recorded has found it so.
            if entry.kind != Kind::Discard {
                let at = log.data_at(entry) + at;
                let read = self.source.read(new, at);
                read.map_err(|source| ReplayError::Log { at, source })?;
            }
            let on_disk = entry.sector * sector_bytes + at;
            let read = self.disk.read(old, on_disk);
            read.map_err(|source| ReplayError::Disk {
                step: "read",
                at: on_disk,
                source,
            })?;
            if new != old {
                self.write(new, on_disk)?;
                self.former.push(Former {
                    at: on_disk,
                    bytes: old.to_vec(),
                });
            }
            at += length as u64;
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8], at: u64) -> Result<(), ReplayError> {
        let written = self.disk.write(bytes, at);
        written.map_err(|source| ReplayError::Disk {
            step: "write to",
            at,
            source,
        })
    }
}
