//! The labels of FAT and ISO 9660 file systems, by which a volume is found that somebody has attached.
//!
//! Only what is needed to tell one volume from others is read, by code that bounds everything; a file
//! system is mounted, that is given to the kernel's code, only when it has the label. What is not such
//! a file system has no label. Of FAT the label in the root directory is the right one: it is what
//! systems show and set. Some also write it into the boot sector, which counts where the directory has
//! none.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// FAT12, FAT16 or FAT32.
    Fat,
    /// ISO 9660.
    Iso9660,
}

impl Kind {
    /// The kernel's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fat => "vfat",
            Self::Iso9660 => "iso9660",
        }
    }
}

/// A file system with a label. The bytes of the label are in whatever encoding it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// What it is.
    pub kind: Kind,
    /// Its label, without the spaces after it.
    pub label: Vec<u8>,
}

/// What can be read at an offset: a device, or bytes in tests.
pub trait Readable {
    /// Fills the buffer from `offset` on; nothing if it does not reach that far.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<Option<()>>;
}

impl Readable for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<Option<()>> {
        match self.read_exact_at(buffer, offset) {
            Ok(()) => Ok(Some(())),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Readable for [u8] {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<Option<()>> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(buffer.len());
        Ok(self
            .get(start..end)
            .map(|found| buffer.copy_from_slice(found)))
    }
}

/// Where the primary volume descriptor of ISO 9660 is.
const DESCRIPTOR: u64 = 16 * 2048;
/// Entries of a FAT root directory that are looked at. The label is the first one, in practice.
const ENTRIES: usize = 64;
const ENTRY: usize = 32;

/// The labelled file system of a device or a partition, if it has one of these kinds.
pub fn of(device: &(impl Readable + ?Sized)) -> io::Result<Option<Volume>> {
    if let Some(label) = iso9660(device)? {
        return Ok(Some(Volume {
            kind: Kind::Iso9660,
            label,
        }));
    }
    let label = fat(device)?;
    Ok(label.map(|label| Volume {
        kind: Kind::Fat,
        label,
    }))
}

fn iso9660(device: &(impl Readable + ?Sized)) -> io::Result<Option<Vec<u8>>> {
    let mut descriptor = [0; 72];
    if device.read_at(&mut descriptor, DESCRIPTOR)?.is_none() {
        return Ok(None);
    }
    // Primary, and version 1.
    let is_it = descriptor[..7] == *b"\x01CD001\x01";
    Ok(is_it.then(|| trimmed(&descriptor[40..])))
}

fn fat(device: &(impl Readable + ?Sized)) -> io::Result<Option<Vec<u8>>> {
    let mut sector = [0; 512];
    if device.read_at(&mut sector, 0)?.is_none() {
        return Ok(None);
    }
    let Some(fat) = Fat::parse(&sector) else {
        return Ok(None);
    };
    let mut root = [0; ENTRIES * ENTRY];
    let found = match device.read_at(&mut root, fat.root)? {
        Some(()) => label_in(&root[..fat.entries.min(ENTRIES) * ENTRY]),
        None => None,
    };
    Ok(found.or(fat.label).filter(|label| !label.is_empty()))
}

/// What the boot sector of a FAT file system says.
struct Fat {
    /// Where the root directory begins, or, for FAT32, its first cluster.
    root: u64,
    /// How many entries of it follow each other there.
    entries: usize,
    /// The label in the boot sector; nothing if it says that there is none.
    label: Option<Vec<u8>>,
}

impl Fat {
    fn parse(sector: &[u8; 512]) -> Option<Self> {
        let byte = |at: usize| u64::from(sector[at]);
        let half = |at: usize| u64::from(u16::from_le_bytes([sector[at], sector[at + 1]]));
        let word = |at: usize| half(at) | half(at + 2) << 16;
        let sector_size = half(11);
        let cluster = byte(13) * sector_size;
        let (reserved, fats) = (half(14), byte(16));
        let plausible = sector[510..] == [0x55, 0xaa]
            && (512..=4096).contains(&sector_size)
            && sector_size.is_power_of_two()
            && byte(13).is_power_of_two()
            && reserved > 0
            && fats > 0;
        if !plausible {
            return None;
        }
        let root_entries = half(17) as usize;
        let (fat_size, label, is_32) = match (half(22), root_entries) {
            (0, 0) if sector[82..87] == *b"FAT32" => (word(36), &sector[71..82], true),
            (1.., 1..) if sector[54..57] == *b"FAT" => (half(22), &sector[43..54], false),
            _ => return None,
        };
        // Not more than 2^16 + 2^8 * 2^32 sectors of 2^12 bytes, and 2^32 clusters of 2^19.
        let mut root = (reserved + fats * fat_size) * sector_size;
        let mut entries = root_entries;
        if is_32 {
            root += word(44).checked_sub(2)? * cluster;
            entries = cluster as usize / ENTRY;
        }
        let label = Some(trimmed(label)).filter(|label| label != b"NO NAME");
        Some(Self {
            root,
            entries,
            label,
        })
    }
}

/// The label among these entries of a root directory.
fn label_in(entries: &[u8]) -> Option<Vec<u8>> {
    const DELETED: u8 = 0xe5;
    const VOLUME: u8 = 0x08;
    const DIRECTORY: u8 = 0x10;
    let (entries, _) = entries.as_chunks::<ENTRY>();
    let used = entries.iter().take_while(|entry| entry[0] != 0);
    let mut labels = used.filter(|entry| {
        // A part of a long name has the attribute of a label among others.
        entry[0] != DELETED && entry[11] & 0x3f & (VOLUME | DIRECTORY | 0x07) == VOLUME
    });
    labels.next().map(|entry| trimmed(&entry[..11]))
}

fn trimmed(label: &[u8]) -> Vec<u8> {
    label.trim_ascii_end().to_vec()
}

#[cfg(any(test, feature = "testing"))]
pub mod testing {
    //! Beginnings of file systems, as the usual tools make them.

    /// The beginning of a FAT32 file system with these labels in boot sector and root directory.
    pub fn fat32(boot: &[u8; 11], root: Option<&[u8; 11]>) -> Vec<u8> {
        let mut bytes = vec![0; 64 << 10];
        bytes[11..14].copy_from_slice(&[0, 2, 1]);
        bytes[14..17].copy_from_slice(&[32, 0, 2]);
        bytes[36] = 10;
        bytes[44] = 3;
        bytes[71..82].copy_from_slice(boot);
        bytes[82..90].copy_from_slice(b"FAT32   ");
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        // Cluster 3 is the second one.
        let at = (32 + 2 * 10 + 1) * 512;
        directory(&mut bytes[at..], root);
        bytes
    }

    /// The same of FAT16, with sectors of 4096 bytes.
    pub fn fat16(boot: &[u8; 11], root: Option<&[u8; 11]>) -> Vec<u8> {
        let mut bytes = vec![0; 64 << 10];
        bytes[11..14].copy_from_slice(&[0, 16, 4]);
        bytes[14..17].copy_from_slice(&[1, 0, 2]);
        bytes[17..19].copy_from_slice(&[0, 2]);
        bytes[22] = 3;
        bytes[43..54].copy_from_slice(boot);
        bytes[54..62].copy_from_slice(b"FAT16   ");
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        directory(&mut bytes[7 * 4096..], root);
        bytes
    }

    /// A deleted file, a part of a long name, a file, and the label.
    fn directory(bytes: &mut [u8], label: Option<&[u8; 11]>) {
        let mut entries = vec![
            (*b"\xe5LD        ", 0x08),
            (*b"Ap\0a\0r\0a\0m\0", 0x0f),
            (*b"PARAME~1PB ", 0x20),
        ];
        entries.extend(label.map(|label| (*label, 0x08)));
        for ((name, attributes), entry) in entries.into_iter().zip(bytes.chunks_mut(32)) {
            entry[..11].copy_from_slice(&name);
            entry[11] = attributes;
        }
    }

    /// The beginning of an ISO 9660 file system.
    pub fn iso9660(label: &str) -> Vec<u8> {
        let mut bytes = vec![0; 64 << 10];
        let descriptor = &mut bytes[16 * 2048..];
        descriptor[..7].copy_from_slice(b"\x01CD001\x01");
        descriptor[40..72].fill(b' ');
        descriptor[40..40 + label.len()].copy_from_slice(label.as_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::{fat16, fat32, iso9660};
    use super::*;

    const LABEL: &[u8; 11] = b"HEARTH-CONF";
    const NONE: &[u8; 11] = b"NO NAME    ";

    fn label(device: &[u8]) -> Option<(Kind, String)> {
        let volume = of(device).unwrap()?;
        Some((volume.kind, String::from_utf8(volume.label).unwrap()))
    }

    #[test]
    fn labels_of_fat_are_those_of_the_root_directory_and_else_of_the_boot_sector() {
        let found = Some((Kind::Fat, "HEARTH-CONF".to_owned()));
        for of_kind in [fat32, fat16] {
            assert_eq!(label(&of_kind(NONE, Some(LABEL))), found);
            assert_eq!(label(&of_kind(LABEL, None)), found);
            assert_eq!(label(&of_kind(b"OTHER      ", Some(LABEL))), found);
            let other = Some((Kind::Fat, "OTHER".to_owned()));
            assert_eq!(label(&of_kind(LABEL, Some(b"OTHER      "))), other);
            assert_eq!(label(&of_kind(NONE, None)), None);
            assert_eq!(label(&of_kind(b"           ", None)), None);
        }
    }

    #[test]
    fn labels_of_iso_9660_are_those_of_the_primary_descriptor() {
        let found = Some((Kind::Iso9660, "HEARTH-CONF".to_owned()));
        assert_eq!(label(&iso9660("HEARTH-CONF")), found);
        let mut other = iso9660("HEARTH-CONF");
        other[16 * 2048] = 2;
        assert_eq!(label(&other), None);
        // A hybrid image has a boot sector, too.
        let mut hybrid = iso9660("HEARTH-CONF");
        hybrid[..512].copy_from_slice(&fat32(b"OTHER      ", None)[..512]);
        assert_eq!(label(&hybrid), found);
    }

    #[test]
    fn what_is_no_file_system_has_no_label() {
        for device in [&[][..], &[0; 600], &[0xff; 64 << 10], &[0; 64 << 10]] {
            assert_eq!(label(device), None);
        }
        let right = fat32(LABEL, Some(LABEL));
        // Signature, sector size, clusters, reserved sectors, FATs, entries, the root cluster.
        for (at, byte) in [
            (510, 0),
            (12, 3),
            (13, 3),
            (14, 0),
            (16, 0),
            (17, 1),
            (44, 1),
            (82, 0),
        ] {
            let mut wrong = right.clone();
            wrong[at] = byte;
            assert_eq!(label(&wrong), None, "byte {at}");
        }
        // A root directory that is not there leaves what the boot sector says.
        let mut wrong = right.clone();
        wrong[47] = 0xff;
        assert!(label(&wrong).is_some());
        let short = &right[..512];
        assert!(label(short).is_some());
    }

    proptest! {
        #[test]
        fn arbitrary_sectors_never_panic(bytes: [u8; 64], at in 0_usize..90) {
            for mut device in [fat32(LABEL, None), fat16(LABEL, None), iso9660("X")] {
                device[at..at + 64].copy_from_slice(&bytes);
                drop(of(&device[..]).unwrap());
            }
        }
    }
}
