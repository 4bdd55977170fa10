//! What is on a disk, by its first and its last MiB.
//!
//! Partition tables, file systems, volume managers and RAIDs all have something there. A disk is *empty* only if both are
//! zeros: what is not recognised is something, too, and is never overwritten unasked.
//!
//! While an installation is being written, the disk has a *mark* in the sector where a GPT has its header. The sector is
//! replaced by the header as a whole and last, so a disk has either the mark or a node that was written completely; a power
//! cut leaves nothing between the two.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::{fmt, io};

use hearth_api::names::disk::{DATA_TYPE, ESP_TYPE};
use hearth_sys::{gpt, volume};

use crate::storage::header;

/// What is looked at, at either end.
pub const END: u64 = 1 << 20;
/// How a mark begins.
const MARK: &[u8; 24] = b"hearth.installation open";
/// More partitions than a message shows.
const SHOWN: usize = 6;

/// What is on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros.
    Empty,
    /// An installation that was not completed.
    Unfinished,
    /// A node, or the disk image of one.
    Node,
    /// A further disk of a node.
    Volume,
    /// Something else, as it is described to people.
    Other(String),
}

impl Content {
    /// Whether nothing is lost if the disk is overwritten.
    pub fn is_vacant(&self) -> bool {
        matches!(self, Self::Empty | Self::Unfinished)
    }

    /// Looks at a disk of this size.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn of(disk: &File, size: u64, sector_size: u32) -> io::Result<Self> {
        if size < 2 * END {
            return Ok(Self::Other("less than 2 MiB".to_owned()));
        }
        let mut head = vec![0; END as usize];
        let mut tail = vec![0; END as usize];
        disk.read_exact_at(&mut head, 0)?;
        disk.read_exact_at(&mut tail, size - END)?;
        let sector = sector_size as usize;
        if head
            .get(sector..)
            .is_some_and(|rest| rest.starts_with(MARK))
        {
            return Ok(Self::Unfinished);
        }
        if is_zero(&head) && is_zero(&tail) {
            return Ok(Self::Empty);
        }
        if head.starts_with(&header::MAGIC) {
            return Ok(Self::Volume);
        }
        if let Ok(table) = gpt::read(disk, sector_size) {
            return Ok(Self::of_table(&table.partitions));
        }
        let file_system = volume::of(disk)?.map(|volume| {
            let label = String::from_utf8_lossy(&volume.label).into_owned();
            format!(
                "a file system ({}) with the label {label:?}",
                volume.kind.name()
            )
        });
        Ok(Self::Other(
            file_system.unwrap_or_else(|| known(&head).to_owned()),
        ))
    }

    fn of_table(partitions: &[gpt::Partition]) -> Self {
        let has = |kind| partitions.iter().any(|one| one.type_guid == kind);
        if has(ESP_TYPE) && has(DATA_TYPE) {
            return Self::Node;
        }
        let names = partitions.iter().take(SHOWN);
        let names: Vec<String> = names.map(|one| format!("{:?}", one.name)).collect();
        let more = if partitions.len() > SHOWN {
            ", …"
        } else {
            ""
        };
        Self::Other(match partitions.len() {
            0 => "a partition table (GPT) without partitions".to_owned(),
            1 => format!(
                "a partition table (GPT) with 1 partition: {}",
                names.join("")
            ),
            count => format!(
                "a partition table (GPT) with {count} partitions: {}{more}",
                names.join(", ")
            ),
        })
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("empty"),
            Self::Unfinished => f.write_str("an installation that was not completed"),
            Self::Node => f.write_str("a Hearth node"),
            Self::Volume => f.write_str("a volume of a Hearth node"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

/// The mark of an installation that is being written, for a sector of this size.
pub fn mark(sector_size: u32) -> Vec<u8> {
    let mut sector = MARK.to_vec();
    sector.resize(sector_size as usize, 0);
    sector
}

/// Whether there are only zeros.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Whole words first: this looks at every byte of a disk that cannot be cleared otherwise.
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

/// What is known by a signature at its begin.
fn known(head: &[u8]) -> &'static str {
    const KNOWN: [(usize, &[u8], &str); 12] = [
        (0, b"XFSB", "a file system (xfs)"),
        (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
        (3, b"NTFS    ", "a file system (ntfs)"),
        (3, b"EXFAT   ", "a file system (exfat)"),
        (512, b"LABELONE", "a physical volume of LVM"),
        (512, b"EFI PART", "a damaged partition table (GPT)"),
        (1080, b"\x53\xef", "a file system (ext2, ext3 or ext4)"),
        (4086, b"SWAPSPACE2", "swap space"),
        (4096, b"EFI PART", "a damaged partition table (GPT)"),
        (4096, b"\xfc\x4e\x2b\xa9", "a member of a RAID"),
        (65600, b"_BHRfS_M", "a file system (btrfs)"),
        (
            510,
            b"\x55\xaa",
            "a partition table (MBR), or a boot sector",
        ),
    ];
    let is_there = |(at, signature, _): &&(usize, &[u8], &str)| {
        head.get(*at..)
            .is_some_and(|rest| rest.starts_with(signature))
    };
    let found = KNOWN.iter().find(is_there);
    found.map_or("data of an unknown kind", |(_, _, what)| what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 8 << 20;

    fn content(parts: &[(u64, &[u8])]) -> Content {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        for (at, bytes) in parts {
            file.write_all_at(bytes, *at).unwrap();
        }
        Content::of(&file, SIZE, 512).unwrap()
    }

    #[test]
    fn only_zeros_at_both_ends_are_nothing() {
        assert_eq!(content(&[]), Content::Empty);
        // What is left in the middle of a disk whose ends were cleared.
        assert_eq!(content(&[(4 << 20, b"left")]), Content::Empty);
        for at in [0, END - 1, SIZE - END, SIZE - 1] {
            let found = content(&[(at, &[1])]);
            assert!(!found.is_vacant(), "{at}: {found}");
        }
    }

    #[test]
    fn an_installation_that_was_cut_short_is_known_whatever_else_is_there() {
        let found = content(&[(0, b"x"), (512, &mark(512)), (SIZE - 1, &[1])]);
        assert_eq!(found, Content::Unfinished);
        assert!(found.is_vacant());
        let elsewhere = content(&[(4096, &mark(4096))]);
        assert!(!elsewhere.is_vacant(), "of a disk with other sectors");
    }

    #[test]
    fn what_is_known_is_named() {
        for (at, bytes, what) in [
            (0, &b"XFSB"[..], "a file system (xfs)"),
            (1080, b"\x53\xef", "ext4"),
            (510, b"\x55\xaa", "MBR"),
            (SIZE - 8, b"anything", "unknown kind"),
        ] {
            let found = content(&[(at, bytes)]).to_string();
            assert!(found.contains(what), "{found}");
        }
        let fat = volume::testing::fat32(b"HOLIDAYS   ", None);
        let found = content(&[(0, &fat)]).to_string();
        assert_eq!(found, "a file system (vfat) with the label \"HOLIDAYS\"");
    }

    proptest! {
        #[test]
        fn no_disk_with_something_at_an_end_is_vacant(at in 0..END - 8, byte in 1_u8.., at_end: bool) {
            let at = if at_end { SIZE - END + at } else { at };
            prop_assert!(!content(&[(at, &[byte; 8])]).is_vacant());
        }
    }
}
