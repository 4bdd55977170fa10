//! The table with damage, hostile content and power cuts.
//!
//! # Fault model of the fake disk
//! Each write since the last sync may reach the disk or not, in any combination, and the last of
//! them may be torn at any sector (here: at every fifth). Synced writes are durable. A power cut
//! can happen between any two operations.

use std::cell::RefCell;

use proptest::prelude::*;

use super::*;

const SECTOR: u32 = 512;
const ESP: Uuid = Uuid::from_u128(1);
const DATA: Uuid = Uuid::from_u128(2);
const KIND: Uuid = Uuid::from_u128(0x4845);
const MIB: u64 = 2048; // sectors

#[derive(Clone)]
enum Op {
    Write(u64, Vec<u8>),
    Sync,
}

#[derive(Default)]
struct Fake {
    bytes: RefCell<Vec<u8>>,
    log: RefCell<Vec<Op>>,
}

impl Fake {
    fn of(bytes: &[u8]) -> Self {
        Self {
            bytes: RefCell::new(bytes.to_vec()),
            log: RefCell::default(),
        }
    }
}

impl Medium for Fake {
    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes.borrow().len() as u64)
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.saturating_add(buffer.len() as u64) as usize;
        let bytes = self.bytes.borrow();
        let from = bytes.get(offset as usize..end);
        buffer.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        apply(&mut self.bytes.borrow_mut(), offset, bytes);
        let op = Op::Write(offset, bytes.to_vec());
        self.log.borrow_mut().push(op);
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        self.log.borrow_mut().push(Op::Sync);
        Ok(())
    }
}

fn apply(disk: &mut [u8], offset: u64, bytes: &[u8]) {
    disk[offset as usize..][..bytes.len()].copy_from_slice(bytes);
}

fn part(number: u32, guid: Uuid, first: u64, last: u64) -> Partition {
    Partition {
        number,
        type_guid: KIND,
        guid,
        first,
        last,
        attributes: 4,
        name: format!("PART-{number}"),
    }
}

/// A disk with this many sectors and these partitions, with both copies.
fn disk_with(sectors: u64, partitions: &[Partition]) -> Vec<u8> {
    let mut entries = vec![0; 128 * 128];
    for p in partitions {
        let entry = &mut entries[(p.number as usize - 1) * 128..][..128];
        entry[..16].copy_from_slice(&p.type_guid.to_bytes_le());
        entry[16..32].copy_from_slice(&p.guid.to_bytes_le());
        entry[32..40].copy_from_slice(&p.first.to_le_bytes());
        entry[40..48].copy_from_slice(&p.last.to_le_bytes());
        entry[48..56].copy_from_slice(&p.attributes.to_le_bytes());
        for (unit, at) in p.name.encode_utf16().zip((56..).step_by(2)) {
            entry[at..at + 2].copy_from_slice(&unit.to_le_bytes());
        }
    }
    let table = Table {
        disk_guid: Uuid::from_u128(7),
        partitions: partitions.to_vec(),
        from_backup: false,
        first_usable: 34,
        last_usable: sectors - 34,
        alternate: sectors - 1,
        entry_size: 128,
        entries,
    };
    let fake = Fake::of(&vec![0; (sectors * 512) as usize]);
    let disk = Disk::of(&fake, SECTOR).unwrap();
    disk.write_primary(&table).unwrap();
    disk.write_backup(&table).unwrap();
    let mut bytes = fake.bytes.take();
    bytes[450] = 0xee;
    bytes[458..462].copy_from_slice(&(sectors as u32 - 1).to_le_bytes());
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    bytes
}

/// A disk with two partitions of 2 MiB from the first MiB on, for other tests.
pub(crate) fn two_partitions(sectors: u64, a: (Uuid, Uuid), b: (Uuid, Uuid)) -> Vec<u8> {
    let mut parts = [
        part(1, a.1, MIB, 3 * MIB - 1),
        part(2, b.1, 3 * MIB, 5 * MIB - 1),
    ];
    parts[0].type_guid = a.0;
    parts[1].type_guid = b.0;
    disk_with(sectors, &parts)
}

fn usual() -> [Partition; 2] {
    [
        part(1, ESP, MIB, 2 * MIB - 1),
        part(2, DATA, 2 * MIB, 3 * MIB - 1),
    ]
}

fn small() -> Vec<u8> {
    disk_with(4 * MIB, &usual())
}

fn read_bytes(bytes: &[u8]) -> Result<Table, GptError> {
    read(&Fake::of(bytes), SECTOR)
}

#[test]
fn a_table_is_read_as_it_was_written() {
    let table = read_bytes(&small()).unwrap();
    assert_eq!(table.partitions, usual());
    assert!(!table.from_backup);
}

#[test]
fn one_damaged_copy_is_read_from_the_other() {
    let good = small();
    let whole = read_bytes(&good).unwrap();
    let end = good.len();
    // Every byte of both headers, and every 61st byte of both arrays (coprime to the sizes of the
    // fields).
    let primary = (512..604).chain((1024..1024 + 16384).step_by(61));
    for at in primary {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        let table = read_bytes(&bad).unwrap_or_else(|error| panic!("{at}: {error}"));
        assert!(table.from_backup, "{at}");
        assert_eq!(table.partitions, whole.partitions);
    }
    let backup = (end - 512..end - 420).chain((end - 512 - 16384..end - 512).step_by(61));
    for at in backup {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        let fake = Fake::of(&bad);
        assert_eq!(read(&fake, SECTOR).unwrap(), whole, "{at}");
        // The damaged copy is repaired when the partition grows.
        assert!(grow_last(&fake, SECTOR, DATA).unwrap().written);
        let mut without_primary = fake.bytes.take();
        without_primary[512..1024].fill(0);
        assert!(read_bytes(&without_primary).unwrap().from_backup);
    }
}

#[test]
fn two_damaged_copies_are_an_error_that_names_both() {
    let mut bad = small();
    let end = bad.len();
    bad[520] ^= 1;
    bad[end - 500] ^= 1;
    let error = read_bytes(&bad).unwrap_err();
    assert!(matches!(error, GptError::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("backup: "), "{error}");
}

#[test]
fn a_blank_disk_has_no_table() {
    for sectors in [0, 1, 2, 100] {
        let error = read_bytes(&vec![0; sectors * 512]).unwrap_err();
        assert!(matches!(error, GptError::NoTable), "{sectors}: {error}");
    }
}

#[test]
fn overlapping_and_misplaced_partitions_are_refused() {
    let cases: [(&str, [Partition; 2]); 4] = [
        (
            "overlap",
            [part(1, ESP, MIB, 2 * MIB), part(2, DATA, 2 * MIB, 3 * MIB)],
        ),
        (
            "range",
            [part(1, ESP, 10, 20), part(2, DATA, 2 * MIB, 3 * MIB)],
        ),
        (
            "range",
            [part(1, ESP, MIB, 2 * MIB), part(2, DATA, 3 * MIB, 9 * MIB)],
        ),
        (
            "range",
            [part(1, ESP, MIB, MIB - 1), part(2, DATA, 3 * MIB, 3 * MIB)],
        ),
    ];
    for (word, partitions) in cases {
        let error = read_bytes(&disk_with(4 * MIB, &partitions)).unwrap_err();
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

fn grown_disk() -> Vec<u8> {
    let mut bytes = small();
    bytes.resize((8 * MIB * 512) as usize, 0);
    bytes
}

#[test]
fn the_last_partition_grows_to_the_disks_end_and_the_backup_moves() {
    let fake = Fake::of(&grown_disk());
    let grown = grow_last(&fake, SECTOR, DATA).unwrap();
    // The backup takes the last 33 sectors, so the last whole MiB is the 7th.
    assert_eq!((grown.from, grown.to), (MIB, 5 * MIB));
    assert!(grown.written);
    let table = read(&fake, SECTOR).unwrap();
    assert_eq!(table.partitions[1].last, 7 * MIB - 1);
    assert_eq!(table.partitions[0], usual()[0]);
    assert_eq!(table.partitions[1].attributes, 4);
    // The backup at the new end has the same content.
    let mut without_primary = fake.bytes.borrow().clone();
    without_primary[512..1024].fill(0xff);
    let backup = read_bytes(&without_primary).unwrap();
    assert_eq!(backup.partitions, table.partitions);
    // A second call writes nothing.
    fake.log.borrow_mut().clear();
    let again = grow_last(&fake, SECTOR, DATA).unwrap();
    assert_eq!((again.from, again.to), (5 * MIB, 5 * MIB));
    assert!(!again.written && fake.log.borrow().is_empty());
    // The protective MBR covers the whole disk.
    assert_eq!(u32_at(&fake.bytes.borrow(), 458) as u64, 8 * MIB - 1);
}

#[test]
fn what_cannot_grow_is_refused_and_left_alone() {
    let fake = Fake::of(&grown_disk());
    for (guid, word) in [(ESP, "follows it"), (Uuid::from_u128(9), "does not exist")] {
        let error = grow_last(&fake, SECTOR, guid).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    assert!(fake.log.borrow().is_empty());
}

#[test]
fn a_disk_smaller_than_its_table_is_named() {
    let mut bytes = small();
    bytes.truncate((3 * MIB * 512) as usize);
    let error = read_bytes(&bytes).unwrap_err();
    let GptError::DiskTooSmall { needed, found } = error else {
        panic!("{error}");
    };
    assert_eq!((needed, found), (4 * MIB, 3 * MIB));
}

#[test]
fn disks_with_sectors_of_4096_bytes_work() {
    // The fields count sectors, so the same numbers are valid on a larger disk.
    let fake = Fake::of(&vec![0; (2048 * 4096) as usize]);
    let disk = Disk::of(&fake, 4096).unwrap();
    let table = Table {
        alternate: 2047,
        first_usable: 6,
        last_usable: 2040,
        partitions: vec![part(1, DATA, 256, 511)],
        ..read_bytes(&disk_with(4 * MIB, &[part(1, DATA, 256, 511)])).unwrap()
    };
    disk.write_primary(&table).unwrap();
    disk.write_backup(&table).unwrap();
    let grown = grow_last(&fake, 4096, DATA).unwrap();
    assert_eq!((grown.from, grown.to), (256, 1792 - 256));
    assert_eq!(read(&fake, 4096).unwrap().partitions[0].last, 1791);
}

/// Every possible content of the disk after a power cut during these operations.
fn disks_after_a_cut(before: &[u8], log: &[Op]) -> Vec<(String, Vec<u8>)> {
    let mut disks = Vec::new();
    for end in 0..=log.len() {
        let synced = log[..end].iter().rposition(|op| matches!(op, Op::Sync));
        let (durable, pending) = log[..end].split_at(synced.map_or(0, |at| at + 1));
        let mut base = before.to_vec();
        let writes = |ops: &[Op]| -> Vec<(u64, Vec<u8>)> {
            let write = |op: &Op| match op {
                Op::Write(offset, bytes) => Some((*offset, bytes.clone())),
                Op::Sync => None,
            };
            ops.iter().filter_map(write).collect()
        };
        for (offset, bytes) in writes(durable) {
            apply(&mut base, offset, &bytes);
        }
        let pending = writes(pending);
        for reached in 0..1_u32 << pending.len() {
            let mut disk = base.clone();
            for (i, (offset, bytes)) in pending.iter().enumerate() {
                if reached & (1 << i) != 0 {
                    apply(&mut disk, *offset, bytes);
                }
            }
            disks.push((format!("{end} operations, {reached:b}"), disk));
        }
        if let Some((offset, bytes)) = pending.last() {
            for sectors in (1..bytes.len() / 512).step_by(5) {
                let mut disk = base.clone();
                apply(&mut disk, *offset, &bytes[..sectors * 512]);
                disks.push((format!("{end} operations, torn at {sectors}"), disk));
            }
        }
    }
    disks
}

#[test]
fn a_power_cut_while_growing_leaves_the_old_table_or_the_new() {
    let mut broken_primary = grown_disk();
    broken_primary.truncate((4 * MIB * 512) as usize);
    broken_primary[600] ^= 1;
    // A grown disk; the same disk with a damaged primary copy and space to grow.
    for before in [grown_disk(), broken_primary] {
        let fake = Fake::of(&before);
        let old = read(&fake, SECTOR).unwrap().partitions;
        grow_last(&fake, SECTOR, DATA).unwrap();
        let new = read(&fake, SECTOR).unwrap().partitions;
        let log = fake.log.borrow().clone();
        for (what, disk) in disks_after_a_cut(&before, &log) {
            let found = read_bytes(&disk).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(found.partitions == old || found.partitions == new, "{what}");
            let again = Fake::of(&disk);
            grow_last(&again, SECTOR, DATA).unwrap();
            let after = read(&again, SECTOR).unwrap();
            assert_eq!(after.partitions, new, "{what}");
            assert!(!after.from_backup, "{what}");
            assert!(*again.bytes.borrow() == *fake.bytes.borrow(), "{what}");
        }
    }
}

#[test]
fn a_file_is_a_medium() {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&grown_disk(), 0).unwrap();
    assert_eq!(grow_last(&file, SECTOR, DATA).unwrap().to, 5 * MIB);
    assert_eq!(
        read(&file, SECTOR).unwrap().partitions[1].sectors(),
        5 * MIB
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// A header with correct checksums and arbitrary fields.
    #[test]
    fn hostile_headers_crash_nothing(
        fields in proptest::collection::vec((24_usize..92, any::<u8>()), 0..24),
        entries in proptest::collection::vec((0_usize..512, any::<u8>()), 0..16),
    ) {
        let mut bytes = small();
        for (at, byte) in entries {
            bytes[1024 + at] = byte;
        }
        let crc = crc32fast::hash(&bytes[1024..1024 + 16384]);
        bytes[512 + 88..512 + 92].copy_from_slice(&crc.to_le_bytes());
        for (at, byte) in fields {
            bytes[512 + at] = byte;
        }
        bytes[528..532].fill(0);
        let crc = crc32fast::hash(&bytes[512..604]);
        bytes[528..532].copy_from_slice(&crc.to_le_bytes());
        let fake = Fake::of(&bytes);
        let _ = read(&fake, SECTOR);
        if grow_last(&fake, SECTOR, DATA).is_ok() {
            prop_assert!(read(&fake, SECTOR).is_ok());
        }
    }
}
