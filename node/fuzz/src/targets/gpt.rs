//! The partition table of a disk, which is then grown.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;

use hearth_sys::gpt::{self, Medium, Partition};
use uuid::Uuid;

use crate::parts::Parts;
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "gpt",
    // Two megabytes of entries are read four times, and written twice.
    allocates: 32 << 20,
    check,
    seeds,
};

const LARGE_SECTORS: u8 = 1;
/// The checksums of the copies are corrected.
const CORRECT: u8 = 2;
const WITH_BACKUP: u8 = 4;
const WITHOUT_PRIMARY: u8 = 8;

const HEADER: usize = 92;
const MAX_SECTORS: u64 = 1 << 14;

/// A disk that stores the sectors that were written, in units of 512 bytes.
struct Disk {
    sector: u64,
    sectors: u64,
    written: RefCell<BTreeMap<u64, [u8; 512]>>,
}

impl Medium for Disk {
    fn size(&self) -> io::Result<u64> {
        Ok(self.sector * self.sectors)
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.within(buffer.len(), offset)?;
        let written = self.written.borrow();
        for (at, part) in (offset / 512..).zip(buffer.chunks_mut(512)) {
            let stored = written.get(&at).unwrap_or(&[0; 512]);
            part.copy_from_slice(&stored[..part.len()]);
        }
        Ok(())
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.within(bytes.len(), offset)?;
        let mut written = self.written.borrow_mut();
        for (at, part) in (offset / 512..).zip(bytes.chunks(512)) {
            let stored = written.entry(at).or_insert([0; 512]);
            stored[..part.len()].copy_from_slice(part);
        }
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Disk {
    fn within(&self, length: usize, offset: u64) -> io::Result<()> {
        let end = offset.checked_add(length as u64);
        match end.is_some_and(|end| end <= self.sector * self.sectors) {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Writes a copy of the table, as far as there is room for it.
    fn put(&self, place: u64, header: &[u8], entries_at: u64, entries: &[u8]) {
        let _ = self.write_at(header, place.saturating_mul(self.sector));
        let _ = self.write_at(entries, entries_at.saturating_mul(self.sector));
    }
}

/// Flags; the number of sectors; the header in sector 1; the entries.
fn check(input: &[u8]) {
    let mut parts = Parts::of(input);
    let flags = parts.byte();
    let sectors = u64::from(parts.number()) % MAX_SECTORS;
    let disk = Disk {
        sector: if flags & LARGE_SECTORS == 0 {
            512
        } else {
            4096
        },
        sectors,
        written: RefCell::default(),
    };
    let mut header = [0; HEADER];
    let given = parts.bytes(HEADER);
    header[..given.len()].copy_from_slice(given);
    let entries = parts.rest();
    let array = u64::from(number(&header, 80)) * u64::from(number(&header, 84));
    if flags & WITHOUT_PRIMARY == 0 {
        correct(flags, &mut header, entries, array);
        disk.put(1, &header, 2, entries);
    }
    if flags & WITH_BACKUP != 0 {
        let last = sectors.saturating_sub(1);
        let entries_at = last.saturating_sub(array.div_ceil(disk.sector));
        header[24..32].copy_from_slice(&last.to_le_bytes());
        header[32..40].copy_from_slice(&1_u64.to_le_bytes());
        header[72..80].copy_from_slice(&entries_at.to_le_bytes());
        correct(flags, &mut header, entries, array);
        disk.put(last, &header, entries_at, entries);
    }
    let sector = disk.sector as u32;
    let Ok(table) = gpt::read(&disk, sector) else {
        return;
    };
    is_sound(&table.partitions, sectors);
    if let Some(last) = table.partitions.iter().max_by_key(|one| one.last) {
        grows(&disk, sector, last.guid, &table.partitions);
    }
}

/// The last partition is grown, and nothing else changes, now and the second time.
fn grows(disk: &Disk, sector: u32, last: Uuid, before: &[Partition]) {
    let Ok(grown) = gpt::grow_last(disk, sector, last) else {
        return;
    };
    assert!(grown.to >= grown.from);
    let after = gpt::read(disk, sector).expect("the table was valid");
    is_sound(&after.partitions, disk.sectors);
    assert!(!after.from_backup, "the primary copy is repaired");
    let others = |all: &[Partition]| -> Vec<Partition> {
        let others = all.iter().filter(|one| one.guid != last);
        others.cloned().collect()
    };
    assert_eq!(others(&after.partitions), others(before));
    let again = gpt::grow_last(disk, sector, last).expect("it was grown before");
    assert!(!again.written, "growing twice is growing once");
    assert_eq!((again.from, again.to), (grown.to, grown.to));
}

fn is_sound(partitions: &[Partition], sectors: u64) {
    for one in partitions {
        assert!(one.first <= one.last && one.last < sectors, "{one:?}");
        let overlaps = |other: &&Partition| {
            other.number != one.number && other.first <= one.last && one.first <= other.last
        };
        assert_eq!(partitions.iter().find(overlaps), None, "beside {one:?}");
    }
}

/// Corrects both checksums, if the flags say so.
fn correct(flags: u8, header: &mut [u8; HEADER], entries: &[u8], array: u64) {
    if flags & CORRECT == 0 || array > 1 << 20 {
        return;
    }
    let mut hash = crc32fast::Hasher::new();
    let stored = &entries[..entries.len().min(array as usize)];
    hash.update(stored);
    // The rest of a disk is zero.
    hash.update(&vec![0; array as usize - stored.len()]);
    header[88..92].copy_from_slice(&hash.finalize().to_le_bytes());
    let size = (number(header, 12) as usize).min(512);
    header[16..20].fill(0);
    let mut sector = [0; 512];
    sector[..HEADER].copy_from_slice(header);
    header[16..20].copy_from_slice(&crc32fast::hash(&sector[..size]).to_le_bytes());
}

fn number(header: &[u8; HEADER], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| header[at + i]))
}

fn seeds() -> Seeds {
    let disk = |flags: u8, sectors: u16| {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(b"EFI PART");
        header[8..12].copy_from_slice(&0x0001_0000_u32.to_le_bytes());
        header[12..16].copy_from_slice(&(HEADER as u32).to_le_bytes());
        let numbers = [1, u64::from(sectors) - 1, 34, u64::from(sectors) - 34];
        for (at, number) in (24..).step_by(8).zip(numbers) {
            header[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        header[56..72].fill(7);
        header[72..80].copy_from_slice(&2_u64.to_le_bytes());
        header[80..84].copy_from_slice(&4_u32.to_le_bytes());
        header[84..88].copy_from_slice(&128_u32.to_le_bytes());
        let entry = |guid: u8, first: u64, last: u64| {
            let mut entry = [0; 128];
            entry[..16].fill(0x48);
            entry[16..32].fill(guid);
            entry[32..40].copy_from_slice(&first.to_le_bytes());
            entry[40..48].copy_from_slice(&last.to_le_bytes());
            entry[56..62].copy_from_slice(b"E\0S\0P\0");
            entry
        };
        let entries = [entry(1, 64, 127), entry(2, 128, 255)].concat();
        [&[flags][..], &sectors.to_le_bytes(), &header, &entries].concat()
    };
    let backup = CORRECT | WITH_BACKUP;
    vec![
        ("usual", disk(backup, 512)),
        ("grown", disk(CORRECT, 8192)),
        ("from_backup", disk(backup | WITHOUT_PRIMARY, 8192)),
        ("large_sectors", disk(backup | LARGE_SECTORS, 2048)),
        ("wrong_checksum", disk(0, 512)),
    ]
}
