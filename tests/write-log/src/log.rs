//! The format of the log, which is that of Linux' `dm-log-writes`.
//!
//! Sector 0 has a superblock, all numbers little-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic, `0x6a736677736872` |
//! | 8 | 8 | version, 1 |
//! | 16 | 8 | number of entries |
//! | 24 | 4 | bytes of a sector |
//!
//! The entries follow, each with its header in a sector of its own and then the data:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | first sector on the disk |
//! | 8 | 8 | number of sectors, of data too unless it is a discard |
//! | 16 | 8 | flags: 1 flush, 2 FUA, 4 discard, 8 mark |
//! | 24 | 8 | length of the data of a mark |
//!
//! QEMU reserves the place of an entry when the disk has completed the request, writes the entry, and tells the guest
//! afterwards. So the order is that of completion, and what the guest knows to be complete is in the log. The entries are
//! written in parallel: the last ones of a recording whose QEMU was killed may be missing, before others that are there.
//! The number in the superblock is not relied on for the same reason.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// The part of a superblock, and of an entry's header, that is used.
const USED: usize = 32;

/// Sizes of a sector, in bytes.
const SECTORS: std::ops::RangeInclusive<u32> = 512..=65536;

/// Bytes that can be read at any position: a file, or memory.
pub trait Source {
    /// How many there are.
    ///
    /// # Errors
    /// If that cannot be determined.
    fn length(&self) -> io::Result<u64>;

    /// Reads bytes that exist.
    ///
    /// # Errors
    /// If they cannot be read.
    fn read(&self, buffer: &mut [u8], at: u64) -> io::Result<()>;
}

impl Source for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(buffer, at)
    }
}

/// What was asked of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// These sectors were written.
    Write {
        /// Durable when it is complete.
        fua: bool,
    },
    /// These sectors are no longer needed. The disk may ignore it; then they are as they were.
    Discard,
    /// What was written before is durable.
    Flush,
    /// A note of the recorder.
    Mark,
}

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where its header is in the log, in bytes.
    pub header_at: u64,
    /// What was asked.
    pub kind: Kind,
    /// The first sector on the disk.
    pub sector: u64,
    /// How many sectors.
    pub sectors: u64,
}

impl Entry {
    /// Whether it changes the disk.
    pub fn changes(&self) -> bool {
        match self.kind {
            Kind::Write { .. } | Kind::Discard => self.sectors > 0,
            Kind::Flush | Kind::Mark => false,
        }
    }

    /// Whether it promises that something is durable.
    pub fn is_promise(&self) -> bool {
        matches!(self.kind, Kind::Flush | Kind::Write { fua: true })
    }
}

/// The log of a disk of a known size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    sector_bytes: u32,
    entries: Vec<Entry>,
    /// The entries that promise something.
    promises: Vec<usize>,
    end: u64,
    missing: u64,
}

/// The bytes are not a log of this disk.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// They cannot be read.
    #[error("cannot read the log at byte {at}: {source}")]
    Read {
        /// Position in the log.
        at: u64,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// It ends within the superblock.
    #[error("superblock: expected {USED} bytes, found {found}")]
    NoSuperblock {
        /// The length of the log.
        found: u64,
    },
    /// A field of the superblock.
    #[error("superblock: {field}: expected {expected}, found {found:#x}")]
    Superblock {
        /// Its name.
        field: &'static str,
        /// What it may be.
        expected: String,
        /// Its value.
        found: u64,
    },
    /// A field of an entry.
    #[error("entry {number} at byte {at}: {field}: expected {expected}, found {found:#x}")]
    Entry {
        /// The entry, from 0.
        number: usize,
        /// Position of its header in the log.
        at: u64,
        /// The field's name.
        field: &'static str,
        /// What it may be.
        expected: String,
        /// Its value.
        found: u64,
    },
}

impl Log {
    /// Parses the log of a disk of this size. It may be cut short at any byte after the superblock, and may have a gap
    /// that was never written: it ends with the last whole entry before that.
    ///
    /// # Errors
    /// If it cannot be read, or is not the log of such a disk.
    pub fn parse(source: &impl Source, disk_bytes: u64) -> Result<Self, LogError> {
        let length = source
            .length()
            .map_err(|source| LogError::Read { at: 0, source })?;
        if length < USED as u64 {
            return Err(LogError::NoSuperblock { found: length });
        }
        let numbers = numbers(source, 0)?;
        let [magic, version, promised, _] = numbers;
        for (field, expected, found) in [("magic", MAGIC, magic), ("version", VERSION, version)] {
            if found != expected {
                let expected = format!("{expected:#x}");
                return Err(LogError::Superblock {
                    field,
                    expected,
                    found,
                });
            }
        }
        // The upper half is padding.
        let sector_bytes = (numbers[3] & u64::from(u32::MAX)) as u32;
        if !sector_bytes.is_power_of_two() || !SECTORS.contains(&sector_bytes) {
            return Err(LogError::Superblock {
                field: "sector size",
                expected: format!("a power of two in {SECTORS:?}"),
                found: sector_bytes.into(),
            });
        }
        let mut log = Self {
            sector_bytes,
            entries: Vec::new(),
            promises: Vec::new(),
            end: u64::from(sector_bytes),
            missing: 0,
        };
        while let Some((entry, end)) = log.next(source, length, disk_bytes)? {
            if entry.is_promise() {
                log.promises.push(log.entries.len());
            }
            log.entries.push(entry);
            log.end = end;
        }
        log.missing = promised.saturating_sub(log.entries.len() as u64);
        Ok(log)
    }

    /// The entry after those that are known, and where it ends; none if it is not there as a whole.
    fn next(
        &self,
        source: &impl Source,
        length: u64,
        disk_bytes: u64,
    ) -> Result<Option<(Entry, u64)>, LogError> {
        let (at, sector_bytes) = (self.end, u64::from(self.sector_bytes));
        let Some(data_at) = at.checked_add(sector_bytes).filter(|end| *end <= length) else {
            return Ok(None);
        };
        let [sector, sectors, flags, mark_bytes] = numbers(source, at)?;
        // No entry is like that: it says what was asked, or how much was written.
        if [sector, sectors, flags, mark_bytes] == [0; 4] {
            return Ok(None);
        }
        let wrong = |field, expected: &str, found| LogError::Entry {
            number: self.entries.len(),
            at,
            field,
            expected: expected.to_owned(),
            found,
        };
        let kind = match flags {
            0 => Kind::Write { fua: false },
            FUA => Kind::Write { fua: true },
            // The block layer flushes what was written before such a write; with data, it would be two requests.
            FLUSH if sectors == 0 => Kind::Flush,
            DISCARD => Kind::Discard,
            MARK => Kind::Mark,
            _ => {
                let expected = "one of flush (1, without data), FUA (2), discard (4) and mark (8)";
                return Err(wrong("flags", expected, flags));
            }
        };
        let disk_sectors = disk_bytes / sector_bytes;
        if sector
            .checked_add(sectors)
            .is_none_or(|end| end > disk_sectors)
        {
            let expected = format!("an end within the disk's {disk_sectors} sectors");
            return Err(wrong("sector", &expected, sector));
        }
        let data = match kind {
            Kind::Write { .. } => sectors * sector_bytes,
            Kind::Flush | Kind::Discard | Kind::Mark => 0,
        };
        let end = data_at.checked_add(data).filter(|end| *end <= length);
        let entry = Entry {
            header_at: at,
            kind,
            sector,
            sectors,
        };
        Ok(end.map(|end| (entry, end)))
    }

    /// Bytes of a sector: the unit in which a disk changes.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// All entries.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entries that promise something, in order.
    pub(crate) fn promises(&self) -> &[usize] {
        &self.promises
    }

    /// How many promises there are: flushes, and writes with FUA.
    pub fn promise_count(&self) -> usize {
        self.promises.len()
    }

    /// How many entries begin before this byte: when the log was that long, no more were complete.
    pub fn entries_before(&self, byte: u64) -> usize {
        self.entries.partition_point(|entry| entry.header_at < byte)
    }

    /// The log at the moment when it had this many entries. Where several machines were recorded, the logs of all of them at
    /// one moment belong together: what one of them has written later may depend on another's later messages.
    #[must_use]
    pub fn until(&self, entries: usize) -> Self {
        let next = self.entries.get(entries);
        Self {
            sector_bytes: self.sector_bytes,
            entries: self.entries.iter().take(entries).cloned().collect(),
            promises: self.promises[..self.promises_before(entries)].to_vec(),
            end: next.map_or(self.end, |next| next.header_at),
            missing: 0,
        }
    }

    /// How many promises these first entries have.
    pub fn promises_before(&self, entries: usize) -> usize {
        self.promises.partition_point(|promise| *promise < entries)
    }

    /// How many entries the superblock counts that are not there.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Where the data of an entry is in the log.
    pub(crate) fn data_at(&self, entry: &Entry) -> u64 {
        entry.header_at + u64::from(self.sector_bytes)
    }
}

fn numbers(source: &impl Source, at: u64) -> Result<[u64; 4], LogError> {
    let mut bytes = [0; USED];
    source
        .read(&mut bytes, at)
        .map_err(|source| LogError::Read { at, source })?;
    let mut numbers = [0; 4];
    for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut whole = [0; 8];
        whole.copy_from_slice(bytes);
        *number = u64::from_le_bytes(whole);
    }
    Ok(numbers)
}
