//! Reads a GUID partition table and grows its last partition.
//!
//! # Invariants
//! - A table is accepted only if its checksums match, everything it refers to is on the disk, and
//!   its partitions neither overlap nor exceed the usable range. If the primary copy is invalid,
//!   the backup is used.
//! - A power cut while growing never leaves the disk without a valid copy: one valid copy is not
//!   changed before the other one is valid and synced.
//! - Growing is idempotent, and writes nothing if there is nothing to do.
//! - Content of the table that is unknown here (attributes, foreign types, larger entries) is
//!   preserved byte for byte.
//!
//! # Why not the `gpt` crate
//! The image builder uses it to write its own tables. Here the table may be corrupt or hostile: the
//! crate panics on an unusual entry size, allocates whatever count the header claims, does not use
//! the backup when the entries of the primary are corrupt, and guarantees no order of writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use uuid::Uuid;

/// Limits of accepted tables. The usual table has 128 entries of 128 bytes.
const MAX_ENTRIES: u32 = 1024;
const MAX_ENTRY_SIZE: u32 = 4096;
const MAX_ARRAY: usize = 1024 * 1024;

const HEADER_SIZE: usize = 92;
const SIGNATURE: &[u8; 8] = b"EFI PART";

/// The grown partition ends at a multiple of this many bytes.
const ALIGNMENT: u64 = 1024 * 1024;

/// Why a table cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum GptError {
    /// The disk has no GUID partition table.
    #[error("no GUID partition table")]
    NoTable,
    /// Neither copy is valid.
    #[error("no valid partition table: primary: {primary}; backup: {backup}")]
    Invalid {
        /// What is wrong with the primary copy.
        primary: Flaw,
        /// What is wrong with the backup copy.
        backup: Flaw,
    },
    /// The table was created for a larger disk.
    #[error("disk size: expected at least {needed} sectors, got {found}")]
    DiskTooSmall {
        /// The number of sectors that the table needs.
        needed: u64,
        /// The number of sectors of the disk.
        found: u64,
    },
    /// The partition does not exist.
    #[error("partition {0} does not exist")]
    NoSuchPartition(Uuid),
    /// The partition is not the last one on the disk, so it cannot grow.
    #[error("partition {partition} cannot grow: partition {next} follows it")]
    NotLast {
        /// The partition to be grown.
        partition: Uuid,
        /// The partition that follows it.
        next: Uuid,
    },
    /// I/O on the disk failed.
    #[error("cannot {step}")]
    Io {
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// What is wrong with one copy of the table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub enum Flaw {
    #[error("the signature is missing")]
    Signature,
    #[error("unsupported revision or header size")]
    Revision,
    #[error("the header's checksum does not match")]
    HeaderChecksum,
    #[error("header position: expected sector {found}, got {claimed}")]
    Misplaced { found: u64, claimed: u64 },
    #[error("{count} entries of {size} bytes are not supported")]
    EntryFormat { count: u32, size: u32 },
    #[error("the entries are outside the disk or overlap a header")]
    EntriesPlace,
    #[error("the checksum of the entries does not match")]
    EntriesChecksum,
    #[error("the usable range {first}–{last} is invalid for a disk of {sectors} sectors")]
    UsableRange { first: u64, last: u64, sectors: u64 },
    #[error("partition {number} has the invalid range {first}–{last}")]
    PartitionRange { number: u32, first: u64, last: u64 },
    #[error("partitions {a} and {b} overlap")]
    Overlap { a: u32, b: u32 },
    #[error("cannot read it: {0}")]
    Unreadable(String),
}

/// The storage of a table: a disk, an image file, or a fake in tests.
pub trait Medium {
    /// The size in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Fills the buffer from `offset` on.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all bytes at `offset`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Makes all writes durable.
    fn sync(&self) -> io::Result<()>;
}

impl Medium for File {
    fn size(&self) -> io::Result<u64> {
        // Not the length from the metadata, which is 0 for a block device.
        io::Seek::seek(&mut &*self, io::SeekFrom::End(0))
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }
    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

/// A partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// The number, from 1, as in the kernel's device names.
    pub number: u32,
    /// The partition type.
    pub type_guid: Uuid,
    /// The unique ID of the partition.
    pub guid: Uuid,
    /// The first sector.
    pub first: u64,
    /// The last sector, inclusive.
    pub last: u64,
    /// The attribute bits.
    pub attributes: u64,
    /// The label.
    pub name: String,
}

impl Partition {
    /// The length in sectors.
    pub fn sectors(&self) -> u64 {
        self.last - self.first + 1
    }
}

/// A valid partition table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The unique ID of the disk.
    pub disk_guid: Uuid,
    /// The used partitions, sorted by number.
    pub partitions: Vec<Partition>,
    /// Whether it was read from the backup because the primary copy is invalid.
    pub from_backup: bool,
    first_usable: u64,
    last_usable: u64,
    alternate: u64,
    entry_size: u32,
    entries: Vec<u8>,
}

/// The result of growing a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grown {
    /// The previous length of the partition, in sectors.
    pub from: u64,
    /// The new length, in sectors.
    pub to: u64,
    /// Whether anything was written, for example to repair a damaged copy.
    pub written: bool,
}

/// Reads the table of a disk with sectors of `sector_size` bytes.
pub fn read(medium: &impl Medium, sector_size: u32) -> Result<Table, GptError> {
    Disk::of(medium, sector_size)?.read()
}

/// Grows a partition to the end of its disk, and moves the backup copy there.
///
/// Repairs a damaged copy.
pub fn grow_last(
    medium: &impl Medium,
    sector_size: u32,
    partition: Uuid,
) -> Result<Grown, GptError> {
    Disk::of(medium, sector_size)?.grow_last(partition)
}

struct Disk<'a, M> {
    medium: &'a M,
    sector: u64,
    sectors: u64,
}

impl<'a, M: Medium> Disk<'a, M> {
    fn of(medium: &'a M, sector_size: u32) -> Result<Self, GptError> {
        let sector = u64::from(sector_size.max(512));
        let size = medium.size().map_err(io_at("get the size of the disk"))?;
        Ok(Self {
            medium,
            sector,
            sectors: size / sector,
        })
    }

    fn last_sector(&self) -> u64 {
        self.sectors.saturating_sub(1)
    }

    fn read(&self) -> Result<Table, GptError> {
        let primary = match self.copy_at(1) {
            Ok(table) => return Ok(table),
            Err(flaw) => flaw,
        };
        match self.copy_at(self.last_sector()) {
            Ok(table) => Ok(Table {
                from_backup: true,
                // In the backup's header, the alternate is the primary.
                alternate: self.last_sector(),
                ..table
            }),
            Err(Flaw::Signature) if primary == Flaw::Signature => Err(GptError::NoTable),
            Err(backup) => match primary {
                Flaw::UsableRange { last, sectors, .. } if last >= sectors => {
                    Err(GptError::DiskTooSmall {
                        // After the usable range come the backup's entries (32 sectors in the usual
                        // table) and its header.
                        needed: last.saturating_add(34),
                        found: sectors,
                    })
                }
                _ => Err(GptError::Invalid { primary, backup }),
            },
        }
    }

    fn copy_at(&self, place: u64) -> Result<Table, Flaw> {
        let mut sector = vec![0; self.sector as usize];
        self.read_sectors(&mut sector, place)?;
        let header = Header::parse(&sector, place)?;
        let mut entries = vec![0; header.array_bytes()?];
        let length = (entries.len() as u64).div_ceil(self.sector);
        let end = header.entries_at.checked_add(length);
        let over_header = |at: u64| header.entries_at <= at && end.is_some_and(|end| at < end);
        if header.entries_at < 2 || end.is_none_or(|end| end > self.sectors) || over_header(place) {
            return Err(Flaw::EntriesPlace);
        }
        self.read_sectors(&mut entries, header.entries_at)?;
        if crc32fast::hash(&entries) != header.entries_crc {
            return Err(Flaw::EntriesChecksum);
        }
        header.into_table(entries, self.sector, self.sectors)
    }

    fn read_sectors(&self, buffer: &mut [u8], sector: u64) -> Result<(), Flaw> {
        let offset = sector.checked_mul(self.sector).ok_or(Flaw::EntriesPlace)?;
        match self.medium.read_at(buffer, offset) {
            Ok(()) => Ok(()),
            // The position is beyond the end of a disk that is too small for a table.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Flaw::Signature),
            Err(error) => Err(Flaw::Unreadable(error.to_string())),
        }
    }

    fn grow_last(&self, partition: Uuid) -> Result<Grown, GptError> {
        let mut table = self.read()?;
        let mut written = false;
        if table.from_backup {
            // The backup is the only valid copy and is about to be changed: first write the primary
            // from the backup.
            self.write_primary(&table)?;
            table.from_backup = false;
            written = true;
        }
        let before = table.clone();
        let (from, to) = self.stretch(&mut table, partition)?;
        let backup = self.copy_at(table.alternate);
        if backup.is_ok_and(|backup| backup.same_as(&table)) && before == table {
            written |= self.write_protective_mbr()?;
            return Ok(Grown { from, to, written });
        }
        // The primary remains valid until it is replaced; afterwards the backup at the end of the
        // disk is valid.
        self.write_backup(&table)?;
        self.write_primary(&table)?;
        self.write_protective_mbr()?;
        Ok(Grown {
            from,
            to,
            written: true,
        })
    }

    /// Changes only the table in memory.
    fn stretch(&self, table: &mut Table, partition: Uuid) -> Result<(u64, u64), GptError> {
        let index = table.partitions.iter().position(|p| p.guid == partition);
        let index = index.ok_or(GptError::NoSuchPartition(partition))?;
        let target = table.partitions[index].clone();
        if let Some(next) = table.partitions.iter().find(|p| p.first > target.last) {
            return Err(GptError::NotLast {
                partition,
                next: next.guid,
            });
        }
        // The entries of a valid table are after sector 1 and on the disk, so this cannot
        // underflow.
        let array = (table.entries.len() as u64).div_ceil(self.sector);
        table.alternate = self.last_sector();
        table.last_usable = table.alternate - array - 1;
        if target.last > table.last_usable {
            return Err(GptError::DiskTooSmall {
                needed: target.last + 2 + array,
                found: self.sectors,
            });
        }
        let unit = (ALIGNMENT / self.sector).max(1);
        let aligned_end = (table.last_usable + 1) / unit * unit;
        let last = aligned_end.saturating_sub(1).max(target.last);
        let at = (target.number as usize - 1) * table.entry_size as usize;
        table.entries[at + 40..at + 48].copy_from_slice(&last.to_le_bytes());
        table.partitions[index].last = last;
        Ok((target.sectors(), last - target.first + 1))
    }

    fn write_backup(&self, table: &Table) -> Result<(), GptError> {
        let array = (table.entries.len() as u64).div_ceil(self.sector);
        let entries_at = table.alternate - array;
        self.write_copy(table, table.alternate, 1, entries_at)
    }

    fn write_primary(&self, table: &Table) -> Result<(), GptError> {
        self.write_copy(table, 1, table.alternate, 2)
    }

    fn write_copy(
        &self,
        table: &Table,
        place: u64,
        other: u64,
        entries_at: u64,
    ) -> Result<(), GptError> {
        self.write_sectors(&table.entries, entries_at)?;
        let mut header = table.header(place, other, entries_at);
        header.resize(self.sector as usize, 0);
        self.write_sectors(&header, place)?;
        self.medium
            .sync()
            .map_err(io_at("sync the partition table"))
    }

    /// Updates the MBR that protects the disk from tools without GPT support. Returns whether it
    /// had to be written.
    fn write_protective_mbr(&self) -> Result<bool, GptError> {
        let mut mbr = [0; 512];
        self.medium
            .read_at(&mut mbr, 0)
            .map_err(io_at("read the protective MBR"))?;
        let covered = u32::try_from(self.last_sector()).unwrap_or(u32::MAX);
        let (signed, protective) = (mbr[510..] == [0x55, 0xaa], mbr[450] == 0xee);
        if !signed || !protective || mbr[458..462] == covered.to_le_bytes() {
            return Ok(false);
        }
        mbr[458..462].copy_from_slice(&covered.to_le_bytes());
        self.write_sectors(&mbr, 0)?;
        self.medium
            .sync()
            .map_err(io_at("sync the protective MBR"))?;
        Ok(true)
    }

    fn write_sectors(&self, bytes: &[u8], sector: u64) -> Result<(), GptError> {
        self.medium
            .write_at(bytes, sector * self.sector)
            .map_err(io_at("write the partition table"))
    }
}

struct Header {
    alternate: u64,
    first_usable: u64,
    last_usable: u64,
    disk_guid: Uuid,
    entries_at: u64,
    entries: u32,
    entry_size: u32,
    entries_crc: u32,
}

impl Header {
    fn parse(sector: &[u8], place: u64) -> Result<Self, Flaw> {
        if &sector[..8] != SIGNATURE {
            return Err(Flaw::Signature);
        }
        let size = u32_at(sector, 12) as usize;
        if u32_at(sector, 8) >> 16 != 1 || !(HEADER_SIZE..=sector.len()).contains(&size) {
            return Err(Flaw::Revision);
        }
        let mut unsummed = sector[..size].to_vec();
        unsummed[16..20].fill(0);
        if crc32fast::hash(&unsummed) != u32_at(sector, 16) {
            return Err(Flaw::HeaderChecksum);
        }
        let claimed = u64_at(sector, 24);
        if claimed != place {
            return Err(Flaw::Misplaced {
                found: place,
                claimed,
            });
        }
        Ok(Self {
            alternate: u64_at(sector, 32),
            first_usable: u64_at(sector, 40),
            last_usable: u64_at(sector, 48),
            disk_guid: uuid_at(sector, 56),
            entries_at: u64_at(sector, 72),
            entries: u32_at(sector, 80),
            entry_size: u32_at(sector, 84),
            entries_crc: u32_at(sector, 88),
        })
    }

    fn array_bytes(&self) -> Result<usize, Flaw> {
        let (count, size) = (self.entries, self.entry_size);
        let sizes = 128..=MAX_ENTRY_SIZE;
        let bytes = count as usize * size as usize;
        if !sizes.contains(&size)
            || !size.is_power_of_two()
            || !(1..=MAX_ENTRIES).contains(&count)
            || bytes > MAX_ARRAY
        {
            return Err(Flaw::EntryFormat { count, size });
        }
        Ok(bytes)
    }

    fn into_table(self, entries: Vec<u8>, sector: u64, sectors: u64) -> Result<Table, Flaw> {
        let (first, last) = (self.first_usable, self.last_usable);
        // Space for the primary copy, which a repair writes from sector 1 on.
        let array = (entries.len() as u64).div_ceil(sector);
        if first < 2 + array || first > last || last >= sectors {
            return Err(Flaw::UsableRange {
                first,
                last,
                sectors,
            });
        }
        let mut partitions = Vec::new();
        for (entry, number) in entries.chunks_exact(self.entry_size as usize).zip(1..) {
            let partition = partition(entry, number);
            if partition.type_guid.is_nil() {
                continue;
            }
            if partition.first < first || partition.first > partition.last || partition.last > last
            {
                return Err(Flaw::PartitionRange {
                    number,
                    first: partition.first,
                    last: partition.last,
                });
            }
            partitions.push(partition);
        }
        no_overlap(&partitions)?;
        Ok(Table {
            disk_guid: self.disk_guid,
            partitions,
            from_backup: false,
            first_usable: first,
            last_usable: last,
            alternate: self.alternate,
            entry_size: self.entry_size,
            entries,
        })
    }
}

impl Table {
    /// Whether two copies have the same content, apart from their positions.
    fn same_as(&self, other: &Self) -> bool {
        self.disk_guid == other.disk_guid
            && self.entries == other.entries
            && self.entry_size == other.entry_size
            && self.first_usable == other.first_usable
            && self.last_usable == other.last_usable
    }

    fn header(&self, place: u64, other: u64, entries_at: u64) -> Vec<u8> {
        let count = self.entries.len() as u32 / self.entry_size;
        let mut header = Vec::with_capacity(HEADER_SIZE);
        header.extend_from_slice(SIGNATURE);
        header.extend_from_slice(&0x0001_0000_u32.to_le_bytes());
        header.extend_from_slice(&(HEADER_SIZE as u32).to_le_bytes());
        header.extend_from_slice(&[0; 8]); // checksum, reserved
        for value in [place, other, self.first_usable, self.last_usable] {
            header.extend_from_slice(&value.to_le_bytes());
        }
        header.extend_from_slice(&self.disk_guid.to_bytes_le());
        header.extend_from_slice(&entries_at.to_le_bytes());
        for value in [count, self.entry_size, crc32fast::hash(&self.entries)] {
            header.extend_from_slice(&value.to_le_bytes());
        }
        let checksum = crc32fast::hash(&header);
        header[16..20].copy_from_slice(&checksum.to_le_bytes());
        header
    }
}

fn partition(entry: &[u8], number: u32) -> Partition {
    let name: Vec<u16> = entry[56..128]
        .chunks_exact(2)
        .map(|unit| u16::from_le_bytes([unit[0], unit[1]]))
        .take_while(|unit| *unit != 0)
        .collect();
    Partition {
        number,
        type_guid: uuid_at(entry, 0),
        guid: uuid_at(entry, 16),
        first: u64_at(entry, 32),
        last: u64_at(entry, 40),
        attributes: u64_at(entry, 48),
        name: String::from_utf16_lossy(&name),
    }
}

fn no_overlap(partitions: &[Partition]) -> Result<(), Flaw> {
    let mut by_place: Vec<_> = partitions.iter().collect();
    by_place.sort_by_key(|p| p.first);
    for pair in by_place.windows(2) {
        if pair[1].first <= pair[0].last {
            return Err(Flaw::Overlap {
                a: pair[0].number,
                b: pair[1].number,
            });
        }
    }
    Ok(())
}

fn io_at(step: &'static str) -> impl FnOnce(io::Error) -> GptError {
    move |source| GptError::Io { step, source }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn uuid_at(bytes: &[u8], at: usize) -> Uuid {
    Uuid::from_bytes_le(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
pub(crate) mod tests;
