//! Writes the image to the disk, so that a power cut at any moment leaves a disk on which the installation begins again.
//!
//! | step | on the disk afterwards |
//! |---|---|
//! | [`Writer::begin`] | the mark in the sector of the partition table's header, zeros in the rest of both ends |
//! | [`Writer::fill`] | everything between the tables, zeros included |
//! | [`Writer::verify`] | the same, read back from the disk |
//! | [`Writer::finish`] | the backup table and, last, the header of the table in the place of the mark |
//!
//! Each step is synced before the next one begins. The header is one sector, which a disk writes as a whole: until then no
//! firmware boots the disk, from then on everything on it is right.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use hearth_host::disks::content::{is_zero, mark};
use hearth_sys::gpt::{self, GptError, Medium, Table};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};

use crate::payload::{Header, PIECE, PayloadError, read_extent};

/// What is cleared at once, and what is written before it is synced.
const STEP: u64 = 16 << 20;

/// Why an image was not written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub enum WriteError {
    #[error("the medium")]
    Payload(#[from] PayloadError),
    #[error("the disk: cannot {step}")]
    Disk {
        step: &'static str,
        source: io::Error,
    },
    #[error("the disk: what was read back at {offset} is not what was written")]
    Differs { offset: u64 },
    #[error("the partition table in the payload")]
    Table(#[from] GptError),
}

fn disk(step: &'static str) -> impl FnOnce(io::Error) -> WriteError {
    move |source| WriteError::Disk { step, source }
}

/// A disk that is written. Offsets and lengths are bytes.
pub trait Target {
    /// Its size.
    fn size(&self) -> io::Result<u64>;
    /// Reads what is on it, not what is still in memory after [`Self::forget`].
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Makes a part of it zeros.
    fn clear(&self, part: Range<u64>) -> io::Result<()>;
    /// Makes all of that durable.
    fn sync(&self) -> io::Result<()>;
    /// Drops what is kept in memory of it, which is synced.
    fn forget(&self) -> io::Result<()>;
}

impl Target for File {
    fn size(&self) -> io::Result<u64> {
        Medium::size(self)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn clear(&self, part: Range<u64>) -> io::Result<()> {
        // In the kernel's words: only if it is no slower than to write zeros.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if fallocate(self, flags, part.start, part.end - part.start).is_ok() {
            return Ok(());
        }
        // Flash memory is read much faster than it is written.
        let mut buffer = vec![0; PIECE as usize];
        for at in (part.start..part.end).step_by(PIECE as usize) {
            let piece = &mut buffer[..(part.end - at).min(PIECE) as usize];
            self.read_exact_at(piece, at)?;
            if !is_zero(piece) {
                piece.fill(0);
                self.write_all_at(piece, at)?;
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }

    fn forget(&self) -> io::Result<()> {
        Ok(fadvise(self, 0, None, Advice::DontNeed)?)
    }
}

/// How far the work is, in percent of one step of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// What is zeros in the image.
    Cleared(u64),
    /// What is not.
    Written(u64),
    /// The same, read back.
    Verified(u64),
}

/// An image on its way to a disk.
pub struct Writer<'a, T> {
    header: &'a Header,
    target: T,
    disk_size: u64,
    /// The bytes of the image's first and last MiB, which have the partition tables.
    ends: [Vec<u8>; 2],
}

impl<'a, T: Target> Writer<'a, T> {
    /// Of an image with this header to this disk, which is large enough.
    ///
    /// # Errors
    /// If the size of the disk cannot be determined.
    pub fn new(header: &'a Header, target: T) -> Result<Self, WriteError> {
        let disk_size = target.size().map_err(disk("get the size"))?;
        Ok(Self {
            header,
            target,
            disk_size,
            ends: [(); 2].map(|()| vec![0; PIECE as usize]),
        })
    }

    /// The disk.
    pub fn target(&self) -> &T {
        &self.target
    }

    /// The part of the image between its tables.
    fn middle(&self) -> Range<u64> {
        PIECE..self.header.size - PIECE
    }

    /// Marks the disk, and removes what others know it by.
    ///
    /// # Errors
    /// If the disk cannot be written.
    pub fn begin(&self) -> Result<(), WriteError> {
        let sector = u64::from(self.header.sector_size);
        self.target
            .write_at(&mark(self.header.sector_size), sector)
            .map_err(disk("write the mark"))?;
        self.sync()?;
        let tail = self.disk_size - PIECE..self.disk_size;
        for part in [0..sector, 2 * sector..PIECE, tail] {
            self.target
                .clear(part)
                .map_err(disk("clear its begin and its end"))?;
        }
        self.sync()
    }

    /// Writes all of the image but its tables. `from` is where the header has ended.
    ///
    /// # Errors
    /// If the medium cannot be read or is damaged, or the disk cannot be written.
    pub fn fill(
        &mut self,
        from: &mut impl Read,
        progress: &dyn Fn(Progress),
    ) -> Result<(), WriteError> {
        self.clear_holes(progress)?;
        let header = self.header;
        let (total, last) = (header.length(), header.size - PIECE);
        let (mut done, mut unsynced) = (0, 0);
        for extent in &header.extents {
            let bytes = read_extent(from, extent)?;
            match extent.offset {
                at if at < PIECE => put(&mut self.ends[0], at, &bytes),
                at if at >= last => put(&mut self.ends[1], at - last, &bytes),
                at => self.target.write_at(&bytes, at).map_err(disk("write"))?,
            }
            done += extent.length;
            unsynced += extent.length;
            if unsynced >= STEP {
                self.sync()?;
                unsynced = 0;
            }
            progress(Progress::Written(done * 100 / total));
        }
        self.sync()
    }

    fn clear_holes(&self, progress: &dyn Fn(Progress)) -> Result<(), WriteError> {
        let holes = self.header.holes(self.middle());
        let total: u64 = holes.iter().map(|hole| hole.end - hole.start).sum();
        let last = self.header.size - PIECE..self.header.size;
        let mut done = 0;
        for hole in holes.into_iter().chain([last]) {
            for at in (hole.start..hole.end).step_by(STEP as usize) {
                let part = at..hole.end.min(at + STEP);
                done += part.end - part.start;
                self.target.clear(part).map_err(disk("clear"))?;
                progress(Progress::Cleared(done.min(total) * 100 / total.max(1)));
            }
        }
        self.sync()
    }

    /// Reads back what was written.
    ///
    /// # Errors
    /// If it cannot be read, or is something else.
    pub fn verify(&self, progress: &dyn Fn(Progress)) -> Result<(), WriteError> {
        self.target.forget().map_err(disk("read it anew"))?;
        let total = self.header.length();
        let mut done = 0;
        let mut buffer = vec![0; PIECE as usize];
        for extent in &self.header.extents {
            done += extent.length;
            let range = extent.range();
            if self.middle().start <= range.start && range.end <= self.middle().end {
                let bytes = &mut buffer[..extent.length as usize];
                self.target
                    .read_at(bytes, extent.offset)
                    .map_err(disk("read"))?;
                if !extent.is(bytes) {
                    let offset = extent.offset;
                    return Err(WriteError::Differs { offset });
                }
            }
            progress(Progress::Verified(done * 100 / total));
        }
        Ok(())
    }

    /// The partition table, once it was read from the medium.
    ///
    /// # Errors
    /// If it is not one.
    pub fn table(&self) -> Result<Table, WriteError> {
        let image = Image {
            header: self.header,
            ends: &self.ends,
        };
        Ok(gpt::read(&image, self.header.sector_size)?)
    }

    /// Writes the tables, the header of the first one last.
    ///
    /// # Errors
    /// If the disk cannot be written, or has something else afterwards.
    pub fn finish(&self) -> Result<(), WriteError> {
        let sector = self.header.sector_size as usize;
        let [first, last] = &self.ends;
        let failed = || disk("write the partition table");
        self.target
            .write_at(last, self.header.size - PIECE)
            .map_err(failed())?;
        self.target
            .write_at(&first[..sector], 0)
            .map_err(failed())?;
        self.target
            .write_at(&first[2 * sector..], 2 * sector as u64)
            .map_err(failed())?;
        self.sync()?;
        self.target
            .write_at(&first[sector..2 * sector], sector as u64)
            .map_err(failed())?;
        self.sync()?;
        self.target.forget().map_err(disk("read it anew"))?;
        let mut found = vec![0; PIECE as usize];
        self.target.read_at(&mut found, 0).map_err(disk("read"))?;
        match found == *first {
            true => Ok(()),
            false => Err(WriteError::Differs { offset: 0 }),
        }
    }

    fn sync(&self) -> Result<(), WriteError> {
        self.target.sync().map_err(disk("sync"))
    }
}

fn put(end: &mut [u8], at: u64, bytes: &[u8]) {
    // An extent does not cross a piece.
    let at = at as usize;
    end[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The ends of the image, from which its partition table is read. What is between them is not asked for.
struct Image<'a> {
    header: &'a Header,
    ends: &'a [Vec<u8>; 2],
}

impl Medium for Image<'_> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.header.size)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let last = self.header.size - PIECE;
        let (end, at) = match offset {
            at if at >= last => (&self.ends[1], at - last),
            at => (&self.ends[0], at),
        };
        let at = usize::try_from(at).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let found = end.get(at..).and_then(|rest| rest.get(..buffer.len()));
        buffer.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
