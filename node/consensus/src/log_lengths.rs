//! The lengths of the records in etcd's log, compared before etcd starts.
//!
//! etcd takes a record that ends beyond its file, or that has a sector of zeros in it, for one that a power cut has torn: it
//! truncates the log there and goes on. After one changed bit in its length, a record looks the same, and everything that was
//! acknowledged after it would be cut off. A member that is alone then waits for ever for entries that its database has and
//! its log has not; one of several has forgotten what others count on.
//!
//! The two can be told apart, because a record has its length twice:
//!
//! ```text
//! frame    8 bytes, little-endian: length of the record (56 bits), number of bytes that pad it (3 bits), is padded (1 bit)
//! record   0x08 type, 0x10 checksum, and perhaps 0x1a length of the data, data; numbers are varints
//! padding  to a multiple of 8 bytes
//! ```
//!
//! So a frame lies in one sector. A power cut leaves all of it and what is written behind it in its sector, or zeros, at which
//! the log ends. Both lengths are compared wherever a record's beginning is there. Whatever else is wrong with a record is
//! left to etcd, which says so ([`damage`](super::damage)). etcd truncates the last file only, so only that one is read.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::damage::{Damage, Damaged};

/// Bytes that a disk writes as a whole.
const SECTOR: u64 = 512;
/// Bytes of a frame; records are padded to a multiple of it.
const FRAME: u64 = 8;
/// Most bytes of a record before its data: three tags, two numbers of 32 bits and one of 64 bits.
const HEAD: usize = 3 + 5 + 5 + 10;
/// How much of a file is read at once.
const WINDOW: usize = 1 << 20;

/// Compares the lengths of each record in the last file of a log. None if they are equal, or if there is no log.
///
/// # Errors
/// If it cannot be read.
pub(super) fn check(log: &Path) -> io::Result<Option<Damaged>> {
    let Some(path) = last_file(log)? else {
        return Ok(None);
    };
    let found = differing(&File::open(&path)?)?;
    Ok(found.map(|at| Damaged {
        damage: Damage::Log,
        words: format!(
            "the record at byte {at} of {} has two lengths",
            path.display()
        ),
    }))
}

fn last_file(log: &Path) -> io::Result<Option<PathBuf>> {
    let entries = match fs::read_dir(log) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    let mut last = None;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "wal") {
            last = last.max(Some(path));
        }
    }
    Ok(last)
}

/// The position of the first record whose lengths differ.
fn differing(file: &File) -> io::Result<Option<u64>> {
    let mut window = Window::default();
    let mut at = 0;
    loop {
        let bytes = window.read(file, at)?;
        let Some((frame, record)) = bytes.split_first_chunk() else {
            return Ok(None);
        };
        let frame = u64::from_le_bytes(*frame);
        let rest_of_sector = (SECTOR - (at + FRAME) % SECTOR) % SECTOR;
        let (same_sector, next_sector) =
            record.split_at((rest_of_sector as usize).min(record.len()));
        if frame == 0 {
            let is_written = same_sector.iter().any(|byte| *byte != 0);
            return Ok(is_written.then_some(at));
        }
        let length = frame & (u64::MAX >> 8);
        if let Some((looked_at, inside)) = length_inside(record, length) {
            let is_torn = looked_at > same_sector.len() && next_sector.iter().all(|b| *b == 0);
            if inside != length && !is_torn {
                return Ok(Some(at));
            }
        }
        match length.checked_next_multiple_of(FRAME) {
            Some(padded) => at += FRAME + padded,
            None => return Ok(None),
        }
    }
}

/// How many bytes of a record say its length, and this length. The frame's is needed where it may end before the data: what
/// follows is the next frame then, with any byte.
fn length_inside(record: &[u8], in_frame: u64) -> Option<(usize, u64)> {
    let mut rest = record;
    for tag in [0x08, 0x10] {
        rest = rest.strip_prefix(&[tag])?;
        varint(&mut rest)?;
    }
    let head = record.len() - rest.len();
    let (0x1a, mut rest) = rest.split_first().filter(|_| head as u64 != in_frame)? else {
        return Some((head + 1, head as u64));
    };
    let data = varint(&mut rest)?;
    let head = record.len() - rest.len();
    Some((head, data.checked_add(head as u64)?))
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let end = bytes.iter().position(|byte| *byte < 0x80)?;
    let (digits, rest) = bytes.split_at(end + 1);
    *bytes = rest;
    let add = |number: u64, digit: &u8| {
        let shifted = number.checked_mul(128)?;
        Some(shifted | u64::from(digit & 0x7f))
    };
    digits.iter().rev().try_fold(0, add)
}

/// A part of a file.
#[derive(Default)]
struct Window {
    start: u64,
    bytes: Vec<u8>,
}

impl Window {
    /// A frame and the beginning of its record; fewer bytes at the end of the file.
    fn read(&mut self, file: &File, at: u64) -> io::Result<&[u8]> {
        const COUNT: usize = FRAME as usize + HEAD;
        let is_inside =
            at >= self.start && at + COUNT as u64 <= self.start + self.bytes.len() as u64;
        if !is_inside {
            self.bytes.resize(WINDOW, 0);
            let mut filled = 0;
            while filled < WINDOW {
                match file.read_at(&mut self.bytes[filled..], at + filled as u64) {
                    Ok(0) => break,
                    Ok(count) => filled += count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            self.bytes.truncate(filled);
            self.start = at;
        }
        let from = &self.bytes[(at - self.start) as usize..];
        Ok(&from[..from.len().min(COUNT)])
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;

    /// Type, checksum and data of a record.
    type Record = (u8, u32, Option<Vec<u8>>);

    fn record() -> impl Strategy<Value = Record> {
        let data = proptest::option::of(proptest::collection::vec(any::<u8>(), 0..1500));
        (1_u8..6, any::<u32>(), data)
    }

    fn push_varint(bytes: &mut Vec<u8>, mut number: u64) {
        while number >= 0x80 {
            bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        bytes.push(number as u8);
    }

    /// A log as etcd writes it, with the zeros after it; and where its frames are.
    fn log(records: &[Record]) -> (Vec<u8>, Vec<usize>) {
        let (mut log, mut frames) = (Vec::new(), Vec::new());
        for (kind, checksum, data) in records {
            let mut record = vec![0x08, *kind, 0x10];
            push_varint(&mut record, u64::from(*checksum));
            if let Some(data) = data {
                record.push(0x1a);
                push_varint(&mut record, data.len() as u64);
                record.extend(data);
            }
            let padding = record.len().next_multiple_of(8) - record.len();
            let is_padded = (0x80 | padding as u64) << 56;
            let frame = record.len() as u64 | if padding > 0 { is_padded } else { 0 };
            frames.push(log.len());
            log.extend(frame.to_le_bytes());
            log.extend(record);
            log.extend(vec![0; padding]);
        }
        log.extend(vec![0; 8192]);
        (log, frames)
    }

    fn found(log: &[u8]) -> Option<u64> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(log).unwrap();
        differing(&file).unwrap()
    }

    /// Changes a bit of the length in a frame. Returns false if what comes of it means something else: zeros at the end of a
    /// sector, at which the log ends; a record without data, whose checksum etcd finds to be wrong; or, of one without data
    /// that ends the log and its sector, a record whose data were not written. etcd writes such records only where a file
    /// begins.
    fn is_to_be_found(log: &mut [u8], at: usize, bit: usize) -> bool {
        log[at + bit / 8] ^= 1 << (bit % 8);
        let frame = u64::from_le_bytes(log[at..at + 8].try_into().unwrap());
        let checksum = log[at + 11..].iter().position(|byte| *byte < 0x80).unwrap() + 1;
        let is_end = frame == 0 && (at + 8).is_multiple_of(512);
        let head_end = at + 11 + checksum;
        let is_last = log[head_end..].iter().all(|byte| *byte == 0);
        let is_unwritten = head_end.is_multiple_of(512) && is_last;
        !is_end && !is_unwritten && frame & 0xff_ffff_ffff_ffff != (3 + checksum) as u64
    }

    /// Nothing says that the data after this sector were not merely unwritten.
    #[test]
    fn the_last_record_may_be_torn_where_its_data_would_begin_a_sector() {
        let records = [(1, 0, Some(vec![1; 480])), (2, u32::MAX, None)];
        let (mut log, frames) = log(&records);
        assert_eq!(frames, [0, 512 - 16]);
        assert!(!is_to_be_found(&mut log, frames[1], 9));
        assert_eq!(found(&log), None);
        log[512] = 1;
        assert_eq!(found(&log), Some(512 - 16));
    }

    proptest! {
        #[test]
        fn a_changed_bit_in_a_length_is_found(
            records in proptest::collection::vec(record(), 1..20),
            which in any::<proptest::sample::Index>(),
            bit in 0_usize..56,
        ) {
            let (mut log, frames) = log(&records);
            let at = *which.get(&frames);
            prop_assume!(is_to_be_found(&mut log, at, bit));
            prop_assert_eq!(found(&log), Some(at as u64));
        }

        /// Sectors that were not written are zeros.
        #[test]
        fn no_power_cut_looks_like_a_changed_bit(
            records in proptest::collection::vec(record(), 1..20),
            kept in proptest::collection::vec(any::<bool>(), 64),
        ) {
            let (mut log, _) = log(&records);
            for (sector, kept) in log.chunks_mut(512).zip(kept) {
                if !kept {
                    sector.fill(0);
                }
            }
            prop_assert_eq!(found(&log), None);
        }

        #[test]
        fn arbitrary_bytes_never_panic(log in proptest::collection::vec(any::<u8>(), 0..4096)) {
            found(&log);
        }

        /// More than what is read at once, with records across its ends.
        #[test]
        fn all_of_a_log_is_read(length in 1_usize..3000, bit in 0_usize..56) {
            let records = vec![(2, 1, Some(vec![7; length])); (3 << 20) / length + 2];
            let (mut log, frames) = log(&records);
            prop_assert_eq!(found(&log), None);
            let at = *frames.last().unwrap();
            prop_assume!(is_to_be_found(&mut log, at, bit));
            prop_assert_eq!(found(&log), Some(at as u64));
        }
    }
}
