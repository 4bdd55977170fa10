//! A writer of ISO 9660 images that boot by UEFI (El Torito), for optical drives and the virtual ones of management
//! controllers.
//!
//! As for FAT ([`crate::fat`]), all files are known before the first byte is written, and every byte follows from them.
//! What is needed is little: one level of directories, names that need no extension of the format, and one boot image.
//! The crates that write the format take times from the clock and are younger than this needs to be; `xorriso` and
//! `genisoimage` would be programs of others for two hundred lines.
//!
//! The boot image, a FAT file system, is the last file, and its catalog entry has the length 0. That means "up to the end
//! of the medium", as `xorriso` writes it for images of 32 MiB and more, which the 16 bits of the field cannot count.
//!
//! ```text
//! sector (2048 bytes)
//! 0–15    zeros
//! 16–18   primary volume descriptor, boot record, terminator
//! 19, 20  path table, little-endian and big-endian
//! 21      root directory
//! 22 …    the other directories, a sector each
//!         boot catalog
//!         files in the order of their paths, then the boot image
//! ```

use std::collections::BTreeMap;
use std::io::{self, Seek, SeekFrom, Write};

use crate::content::Content;

/// The format's sectors.
const SECTOR: u64 = 2048;
/// Where the volume descriptors begin.
const DESCRIPTORS: u64 = 16;
const PATH_TABLES: u64 = 19;
const ROOT: u64 = 21;
/// Length of a name with its dot, at most: level 2 of the format.
const LONGEST_NAME: usize = 31;
/// 1 January 1980, as in the FAT file systems: year, month, day, hour, minute, second, zone.
const DATE: [u8; 7] = [80, 1, 1, 0, 0, 0, 0];
const DIRECTORY: u8 = 2;

/// Why an image could not be laid out. Sizes are bytes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)] // Documented by the messages.
pub enum IsoError {
    #[error("volume label: expected 1 to 32 characters of A-Z, 0-9, '-', '_', got {label:?}")]
    Label { label: String },
    #[error("invalid path {path:?}: expected DIRECTORY/NAME.EXTENSION of A-Z, 0-9 and '_'")]
    Path { path: String },
    #[error("directory {name:?}: its entries do not fit into {SECTOR} bytes")]
    Directory { name: String },
    #[error("{path:?}: expected less than 4 GiB, got {length} bytes")]
    TooLarge { path: String, length: u64 },
}

/// An image to be written.
#[derive(Debug, Clone)]
pub struct Iso {
    /// Volume label.
    pub label: String,
    /// Files by `DIRECTORY/NAME.EXTENSION`, in capitals. Linux shows the names in small letters.
    pub files: BTreeMap<String, Content>,
    /// The FAT file system with the boot loader.
    pub boot: Content,
}

/// Where a file is.
struct File<'a> {
    name: String,
    content: &'a Content,
    sector: u64,
}

/// An image with the place of everything.
pub struct Plan<'a> {
    label: &'a str,
    /// By name, with the files in it.
    directories: BTreeMap<String, Vec<File<'a>>>,
    boot: File<'a>,
    sectors: u64,
}

impl Iso {
    /// Decides the layout.
    pub fn plan(&self) -> Result<Plan<'_>, IsoError> {
        let is_plain = |c: u8| c.is_ascii_uppercase() || c.is_ascii_digit() || b"-_".contains(&c);
        if !(1..=32).contains(&self.label.len()) || !self.label.bytes().all(is_plain) {
            return Err(IsoError::Label {
                label: self.label.clone(),
            });
        }
        let mut directories: BTreeMap<String, Vec<File<'_>>> = BTreeMap::new();
        for (path, content) in &self.files {
            let (directory, name) = names(path)?;
            fits(path, content)?;
            directories
                .entry(directory.to_owned())
                .or_default()
                .push(File {
                    name: format!("{name};1"),
                    content,
                    sector: 0,
                });
        }
        fits("the boot image", &self.boot)?;
        let mut next = ROOT + 1 + directories.len() as u64 + 1;
        let mut place = |content: &Content| {
            let sector = next;
            next += content.length().div_ceil(SECTOR);
            sector
        };
        for file in directories.values_mut().flatten() {
            file.sector = place(file.content);
        }
        let plan = Plan {
            label: &self.label,
            boot: File {
                name: String::new(),
                content: &self.boot,
                sector: place(&self.boot),
            },
            sectors: next,
            directories,
        };
        plan.check()?;
        Ok(plan)
    }
}

/// Directory and name of a path.
fn names(path: &str) -> Result<(&str, &str), IsoError> {
    let refused = || IsoError::Path {
        path: path.to_owned(),
    };
    let is_plain = |text: &str| {
        let plain = |c: u8| c.is_ascii_uppercase() || c.is_ascii_digit() || c == b'_';
        !text.is_empty() && text.bytes().all(plain)
    };
    let (directory, name) = path.split_once('/').ok_or_else(refused)?;
    let (stem, extension) = name.split_once('.').ok_or_else(refused)?;
    let is_it = [directory, stem, extension].into_iter().all(is_plain)
        && directory.len() <= LONGEST_NAME
        && name.len() < LONGEST_NAME;
    is_it.then_some((directory, name)).ok_or_else(refused)
}

fn fits(path: &str, content: &Content) -> Result<(), IsoError> {
    let length = content.length();
    match u32::try_from(length) {
        Ok(_) => Ok(()),
        Err(_) => Err(IsoError::TooLarge {
            path: path.to_owned(),
            length,
        }),
    }
}

impl Plan<'_> {
    /// The image's size in bytes.
    pub fn size(&self) -> u64 {
        self.sectors * SECTOR
    }

    fn check(&self) -> Result<(), IsoError> {
        let names = std::iter::once("").chain(self.directories.keys().map(String::as_str));
        for (number, name) in names.enumerate() {
            let entries = match number {
                0 => self.root(),
                _ => self.directory(name),
            };
            if entries.len() as u64 > SECTOR {
                return Err(IsoError::Directory {
                    name: name.to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Writes the image to `out`, where everything must be zero.
    pub fn write_to<W: Write + Seek>(&self, out: &mut W) -> io::Result<()> {
        let mut put = |sector: u64, bytes: &[u8]| -> io::Result<()> {
            out.seek(SeekFrom::Start(sector * SECTOR))?;
            out.write_all(bytes)
        };
        put(DESCRIPTORS, &self.primary())?;
        put(DESCRIPTORS + 1, &self.boot_record())?;
        put(DESCRIPTORS + 2, b"\xffCD001\x01")?;
        put(
            PATH_TABLES,
            &self.path_table(u32::to_le_bytes, u16::to_le_bytes),
        )?;
        put(
            PATH_TABLES + 1,
            &self.path_table(u32::to_be_bytes, u16::to_be_bytes),
        )?;
        put(ROOT, &self.root())?;
        for (name, sector) in self.directories.keys().zip(ROOT + 1..) {
            put(sector, &self.directory(name))?;
        }
        put(self.catalog_sector(), &self.catalog())?;
        let files = self.directories.values().flatten();
        for file in files.chain([&self.boot]) {
            out.seek(SeekFrom::Start(file.sector * SECTOR))?;
            file.content.copy_to(out)?;
        }
        Ok(())
    }

    fn catalog_sector(&self) -> u64 {
        ROOT + 1 + self.directories.len() as u64
    }

    fn sector_of(&self, directory: &str) -> u64 {
        let position = self.directories.keys().position(|name| name == directory);
        ROOT + 1 + position.unwrap_or(0) as u64
    }

    fn primary(&self) -> Vec<u8> {
        let mut sector = vec![0; SECTOR as usize];
        let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x01CD001\x01");
        // System, volume; then volume set, publisher, preparer and application, and three file names.
        put(8, &[b' '; 32]);
        put(40, &[b' '; 32]);
        put(40, self.label.as_bytes());
        put(190, &[b' '; 128 * 4 + 37 * 3]);
        put(80, &both_32(self.sectors));
        // One volume of a set of one, and its block size.
        put(120, &both_16(1));
        put(124, &both_16(1));
        put(128, &both_16(SECTOR as u16));
        let table = self.path_table(u32::to_le_bytes, u16::to_le_bytes).len() as u64;
        put(132, &both_32(table));
        put(140, &(PATH_TABLES as u32).to_le_bytes());
        put(148, &(PATH_TABLES as u32 + 1).to_be_bytes());
        put(156, &record(&[0], ROOT, SECTOR, DIRECTORY));
        // Made, changed, expires, effective: not given.
        for at in [813, 830, 847, 864] {
            put(at, &[b'0'; 16]);
        }
        put(881, &[1]);
        sector
    }

    fn boot_record(&self) -> Vec<u8> {
        let mut sector = b"\0CD001\x01EL TORITO SPECIFICATION".to_vec();
        sector.resize(71, 0);
        sector.extend((self.catalog_sector() as u32).to_le_bytes());
        sector
    }

    fn catalog(&self) -> Vec<u8> {
        // The validation entry: EFI, and a checksum by which its words sum up to 0.
        let mut catalog = vec![0; 32];
        catalog[..2].copy_from_slice(&[1, 0xef]);
        catalog[30..].copy_from_slice(&[0x55, 0xaa]);
        let words = catalog.chunks_exact(2);
        let sum = words.fold(0_u16, |sum, word| {
            sum.wrapping_add(u16::from_le_bytes([word[0], word[1]]))
        });
        catalog[28..30].copy_from_slice(&sum.wrapping_neg().to_le_bytes());
        // The default entry: bootable, no emulation, up to the medium's end.
        catalog.extend([0x88, 0, 0, 0, 0, 0, 0, 0]);
        catalog.extend((self.boot.sector as u32).to_le_bytes());
        catalog
    }

    fn path_table(&self, wide: fn(u32) -> [u8; 4], narrow: fn(u16) -> [u8; 2]) -> Vec<u8> {
        let mut table = Vec::new();
        let mut add = |name: &[u8], sector: u64| {
            table.extend([name.len() as u8, 0]);
            table.extend(wide(sector as u32));
            // All are in the root, which is in itself.
            table.extend(narrow(1));
            table.extend(name);
            if !name.len().is_multiple_of(2) {
                table.push(0);
            }
        };
        add(&[0], ROOT);
        for (name, sector) in self.directories.keys().zip(ROOT + 1..) {
            add(name.as_bytes(), sector);
        }
        table
    }

    fn root(&self) -> Vec<u8> {
        let mut entries = record(&[0], ROOT, SECTOR, DIRECTORY);
        entries.extend(record(&[1], ROOT, SECTOR, DIRECTORY));
        for (name, sector) in self.directories.keys().zip(ROOT + 1..) {
            entries.extend(record(name.as_bytes(), sector, SECTOR, DIRECTORY));
        }
        entries
    }

    fn directory(&self, name: &str) -> Vec<u8> {
        let mut entries = record(&[0], self.sector_of(name), SECTOR, DIRECTORY);
        entries.extend(record(&[1], ROOT, SECTOR, DIRECTORY));
        for file in self.directories.get(name).into_iter().flatten() {
            let length = file.content.length();
            entries.extend(record(file.name.as_bytes(), file.sector, length, 0));
        }
        entries
    }
}

/// An entry of a directory.
fn record(name: &[u8], sector: u64, length: u64, flags: u8) -> Vec<u8> {
    let mut record = vec![0, 0];
    record.extend(both_32(sector));
    record.extend(both_32(length));
    record.extend(DATE);
    record.extend([flags, 0, 0]);
    record.extend(both_16(1));
    record.push(name.len() as u8);
    record.extend(name);
    if !record.len().is_multiple_of(2) {
        record.push(0);
    }
    record[0] = record.len() as u8;
    record
}

/// A number in both byte orders. All lengths and sectors fit: files are shorter than 4 GiB.
fn both_32(number: u64) -> [u8; 8] {
    let number = number as u32;
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    bytes
}

fn both_16(number: u16) -> [u8; 4] {
    let [a, b] = number.to_le_bytes();
    [a, b, b, a]
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::process::Command;

    use super::*;

    fn iso(files: &[(&str, &[u8])]) -> Iso {
        let files = files.iter();
        Iso {
            label: "HEARTH-INST".to_owned(),
            files: files
                .map(|(path, bytes)| ((*path).to_owned(), Content::Bytes(bytes.to_vec())))
                .collect(),
            boot: Content::Bytes(vec![7; 5000]),
        }
    }

    /// `isoinfo` shares no code with this.
    #[test]
    fn another_program_reads_it() {
        let iso = iso(&[
            ("HEARTH/PAYLOAD.BIN", &[1; 3000]),
            ("HEARTH/PARAMETERS.PB", b"parameters"),
        ]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.iso");
        let plan = iso.plan().unwrap();
        let mut file = std::fs::File::create_new(&path).unwrap();
        file.set_len(plan.size()).unwrap();
        plan.write_to(&mut file).unwrap();
        let isoinfo = |arguments: &[&str]| {
            let mut command = Command::new("isoinfo");
            let output = command.arg("-i").arg(&path).args(arguments).output();
            let output = output.expect("isoinfo, of the package genisoimage");
            assert!(output.status.success(), "{output:?}");
            output.stdout
        };
        let said = String::from_utf8(isoinfo(&["-d"])).unwrap();
        for part in [
            "Volume id: HEARTH-INST",
            "Arch 239", // EFI
            "Nsect 0",
            "No Emulation Boot",
            "Bootid 88 (bootable)",
        ] {
            let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(words(&said).contains(part), "{part}: {said}");
        }
        assert_eq!(isoinfo(&["-x", "/HEARTH/PAYLOAD.BIN;1"]), [1; 3000]);
        assert_eq!(isoinfo(&["-x", "/HEARTH/PARAMETERS.PB;1"]), b"parameters");
        // The boot image reaches to the end.
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, (plan.boot.sector + 3) * SECTOR);
    }

    #[test]
    fn the_same_files_give_the_same_bytes() {
        let write = || {
            let iso = iso(&[("A/B.C", b"1")]);
            let mut out = Cursor::new(Vec::new());
            iso.plan().unwrap().write_to(&mut out).unwrap();
            out.into_inner()
        };
        assert_eq!(write(), write());
        // What hearth-sys looks for.
        assert_eq!(write()[16 * 2048..][..7], *b"\x01CD001\x01");
    }

    #[test]
    fn what_the_format_does_not_take_is_refused() {
        for path in ["A.B", "a/B.C", "A/B", "A/B.C.D", "A/B/C.D", "/B.C", "A/.C"] {
            let error = iso(&[(path, b"")]).plan().err();
            assert_eq!(error, Some(IsoError::Path { path: path.into() }), "{path}");
        }
        let mut other = iso(&[]);
        other.label = "a label".to_owned();
        assert!(matches!(other.plan().err(), Some(IsoError::Label { .. })));
        let names: Vec<String> = (0..50).map(|n| format!("D/FILE{n}.X")).collect();
        let files: Vec<(&str, &[u8])> = names.iter().map(|name| (&name[..], &b""[..])).collect();
        let error = iso(&files).plan().err();
        assert_eq!(error, Some(IsoError::Directory { name: "D".into() }));
    }
}
