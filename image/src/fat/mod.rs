//! A writer of FAT32 file systems from a known set of files.
//!
//! The available crates are made for file systems that change. `fatfs` writes long-name entries for `.` and
//! `..`, which `fsck.vfat` reports for every directory; it writes each cluster's FAT entry as it goes, takes the time
//! from the clock, and requires that the file system is formatted in the image first. If all files are known
//! beforehand, the layout is arithmetic: each file and directory gets one run of clusters, in the order of their paths.
//! So the whole is planned in memory ([`Plan`]) and written once, front to back, and every byte depends on the input
//! only. Zeros are not written, so the image stays sparse.
//!
//! Invariants: the FATs are equal; no cluster is used twice; every name that is not plain upper-case 8.3 has long-name
//! entries; volume ID and dates are fixed (the caller's, and the format's first day). Tests read the result back with
//! `fatfs`, which shares no code with this, and with `fsck.vfat`.

mod geometry;
mod names;

use std::collections::BTreeMap;
use std::io::{self, Seek, SeekFrom, Write};

use geometry::Geometry;
pub use names::VolumeLabel;

use crate::content::Content;
use crate::sector::SectorSize;

/// Why a file system could not be laid out. Sizes are bytes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)] // Documented by the messages.
pub enum FatError {
    #[error("a FAT32 file system of {size} bytes: {reason}")]
    Size { size: u64, reason: &'static str },
    #[error("invalid FAT32 path {path:?}: {reason}")]
    Path { path: String, reason: &'static str },
    #[error("{path:?} is a duplicate, or differs from another name in case only")]
    Duplicate { path: String },
    #[error("{path:?}: expected less than 4 GiB, got {length} bytes")]
    FileTooLarge { path: String, length: u64 },
    #[error("directory {path:?}: exceeds FAT's limit of 65536 entries")]
    DirectoryTooLarge { path: String },
    #[error(
        "the files need {needed} bytes, and {reserve} must stay free; only {available} are available"
    )]
    NoSpace {
        needed: u64,
        reserve: u64,
        available: u64,
    },
    #[error("volume label: expected 1 to 11 characters of A-Z, 0-9, '-', '_', got {label:?}")]
    Label { label: String },
}

/// Parameters of a file system.
#[derive(Debug, Clone)]
pub struct FatSpec {
    /// Size in bytes, a multiple of the sector size; at least about 33 MiB, or 257 MiB with large sectors (FAT32 begins
    /// at 65,525 clusters).
    pub size: u64,
    /// Size of its sectors.
    pub sector_size: SectorSize,
    /// Number of disk sectors before the file system, as the boot sector records it.
    pub hidden_sectors: u32,
    /// Volume label.
    pub label: VolumeLabel,
    /// Volume id.
    pub volume_id: u32,
    /// Bytes that must stay free after the files.
    pub reserve: u64,
    /// Files by path, parts separated by `/`. Directories are created implicitly.
    pub files: BTreeMap<String, Content>,
}

const ROOT: usize = 0;
const ENTRY: usize = 32;
const DIRECTORY: u8 = 0x10;
const ARCHIVE: u8 = 0x20;
const VOLUME_LABEL: u8 = 0x08;
const END_OF_CHAIN: u32 = 0x0fff_ffff;
/// 1 January 1980, the first day that FAT can represent. The time is midnight, 0.
const DATE: u16 = 0x0021;

/// One run of clusters; none for an empty file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Run {
    first: u32,
    count: u32,
}

struct File<'a> {
    content: &'a Content,
    run: Run,
}

struct Directory {
    path: String,
    parent: usize,
    children: BTreeMap<String, Child>,
    run: Run,
}

#[derive(Clone, Copy)]
enum Child {
    Directory(usize),
    File(usize),
}

/// A file system with every offset decided, ready to be written.
pub struct Plan<'a> {
    spec: &'a FatSpec,
    geometry: Geometry,
    directories: Vec<Directory>,
    /// Each directory's entries, as on the disk except for the cluster numbers.
    listings: Vec<Vec<names::Listing>>,
    files: Vec<File<'a>>,
    next_cluster: u32,
}

impl FatSpec {
    /// Decides the layout.
    pub fn plan(&self) -> Result<Plan<'_>, FatError> {
        let mut plan = Plan {
            spec: self,
            geometry: Geometry::of(self.size, self.sector_size)?,
            directories: vec![Directory {
                path: String::new(),
                parent: ROOT,
                children: BTreeMap::new(),
                run: Run::default(),
            }],
            listings: Vec::new(),
            files: Vec::new(),
            next_cluster: 2,
        };
        for (path, content) in &self.files {
            plan.add(path, content)?;
        }
        plan.allocate()?;
        Ok(plan)
    }
}

impl<'a> Plan<'a> {
    /// Bytes that are free for more files.
    pub fn free(&self) -> u64 {
        u64::from(self.free_clusters()) * self.geometry.cluster_size()
    }

    fn free_clusters(&self) -> u32 {
        self.geometry.clusters + 2 - self.next_cluster
    }

    fn add(&mut self, path: &str, content: &'a Content) -> Result<(), FatError> {
        let length = content.length();
        if u32::try_from(length).is_err() {
            return Err(FatError::FileTooLarge {
                path: path.to_owned(),
                length,
            });
        }
        let duplicate = || FatError::Duplicate {
            path: path.to_owned(),
        };
        let mut here = ROOT;
        let mut parts = path.split('/').peekable();
        while let Some(part) = parts.next() {
            names::check(part).map_err(|reason| FatError::Path {
                path: path.to_owned(),
                reason,
            })?;
            let found = self.directories[here].children.get(part).copied();
            let last = parts.peek().is_none();
            here = match found {
                Some(Child::Directory(inner)) if !last => inner,
                Some(_) => return Err(duplicate()),
                None if last => {
                    let file = Child::File(self.files.len());
                    self.files.push(File {
                        content,
                        run: Run::default(),
                    });
                    self.directories[here]
                        .children
                        .insert(part.to_owned(), file);
                    return Ok(());
                }
                None => self.new_directory(here, part),
            };
        }
        // `split` yields at least one part, and the last one returned above.
        Err(duplicate())
    }

    fn new_directory(&mut self, parent: usize, name: &str) -> usize {
        let inner = self.directories.len();
        let path = match self.directories[parent].path.as_str() {
            "" => name.to_owned(),
            above => format!("{above}/{name}"),
        };
        self.directories.push(Directory {
            path,
            parent,
            children: BTreeMap::new(),
            run: Run::default(),
        });
        self.directories[parent]
            .children
            .insert(name.to_owned(), Child::Directory(inner));
        inner
    }

    fn allocate(&mut self) -> Result<(), FatError> {
        let mut needed: u64 = 0;
        let mut take = |bytes: u64, geometry: &Geometry| {
            let first = needed + 2;
            let count = bytes.div_ceil(geometry.cluster_size());
            needed += count;
            // A count that exceeds 32 bits also exceeds the file system, which is checked below before a run is used.
            Run {
                first: if count == 0 { 0 } else { first as u32 },
                count: count as u32,
            }
        };
        for (index, directory) in self.directories.iter_mut().enumerate() {
            let listing =
                names::list(directory.children.keys().map(String::as_str)).map_err(|name| {
                    FatError::Duplicate {
                        path: format!("{}/{name}", directory.path)
                            .trim_start_matches('/')
                            .to_owned(),
                    }
                })?;
            // The root has the volume label, every other directory `.` and `..`.
            let own = if index == ROOT { 1 } else { 2 };
            let entries = own + listing.iter().map(names::Listing::entries).sum::<usize>();
            if entries > 65536 {
                return Err(FatError::DirectoryTooLarge {
                    path: directory.path.clone(),
                });
            }
            directory.run = take((entries * ENTRY) as u64, &self.geometry);
            self.listings.push(listing);
        }
        for file in &mut self.files {
            file.run = take(file.content.length(), &self.geometry);
        }
        let size = self.geometry.cluster_size();
        let reserved = self.spec.reserve.div_ceil(size);
        if needed + reserved > u64::from(self.geometry.clusters) {
            return Err(FatError::NoSpace {
                needed: needed * size,
                reserve: self.spec.reserve,
                available: u64::from(self.geometry.clusters) * size,
            });
        }
        self.next_cluster = needed as u32 + 2;
        Ok(())
    }

    /// Writes the file system to `out` at `offset`, where everything must be zero.
    pub fn write_to<W: Write + Seek>(&self, out: &mut W, offset: u64) -> io::Result<()> {
        let sector_size = self.spec.sector_size.bytes();
        let mut put = |sector: u64, bytes: &[u8]| -> io::Result<()> {
            out.seek(SeekFrom::Start(offset + sector * sector_size))?;
            out.write_all(bytes)
        };
        let boot = self.geometry.boot_sector(self.spec);
        let info = self
            .geometry
            .info_sector(self.free_clusters(), self.next_cluster);
        for copy in [0, geometry::BACKUP] {
            put(copy, &boot)?;
            put(copy + geometry::INFO, &info)?;
        }
        let table = self.table();
        for copy in 0..geometry::FATS {
            put(self.geometry.fat_start(copy), &table)?;
        }
        for (index, directory) in self.directories.iter().enumerate() {
            put(
                self.geometry.cluster_start(directory.run.first),
                &self.directory_bytes(index),
            )?;
        }
        for file in self.files.iter().filter(|file| file.run.count > 0) {
            out.seek(SeekFrom::Start(
                offset + self.geometry.cluster_start(file.run.first) * sector_size,
            ))?;
            file.content.copy_to(out)?;
        }
        Ok(())
    }

    /// The allocation table, up to its last entry that is not zero.
    fn table(&self) -> Vec<u8> {
        let mut entries = Vec::with_capacity(self.next_cluster as usize);
        // Media type; and "shut down cleanly, no I/O errors".
        entries.extend([0x0fff_ff00 | u32::from(geometry::MEDIA), END_OF_CHAIN]);
        let runs = self
            .directories
            .iter()
            .map(|d| d.run)
            .chain(self.files.iter().map(|f| f.run));
        for run in runs.filter(|run| run.count > 0) {
            // Runs were allocated in this order, without gaps.
            entries.extend(run.first + 1..run.first + run.count);
            entries.push(END_OF_CHAIN);
        }
        entries
            .iter()
            .flat_map(|entry| entry.to_le_bytes())
            .collect()
    }

    fn directory_bytes(&self, index: usize) -> Vec<u8> {
        let directory = &self.directories[index];
        let mut bytes = Vec::new();
        if index == ROOT {
            bytes.extend(entry(self.spec.label.padded(), VOLUME_LABEL, 0, 0));
        } else {
            // The root has the number 0 here.
            let above = match directory.parent {
                ROOT => 0,
                parent => self.directories[parent].run.first,
            };
            bytes.extend(entry(*b".          ", DIRECTORY, directory.run.first, 0));
            bytes.extend(entry(*b"..         ", DIRECTORY, above, 0));
        }
        for (listing, child) in self.listings[index].iter().zip(directory.children.values()) {
            listing.write_long(&mut bytes);
            bytes.extend(match *child {
                Child::Directory(inner) => entry(
                    listing.short,
                    DIRECTORY,
                    self.directories[inner].run.first,
                    0,
                ),
                Child::File(file) => {
                    let File { content, run } = &self.files[file];
                    // Checked when the file was added.
                    entry(listing.short, ARCHIVE, run.first, content.length() as u32)
                }
            });
        }
        bytes
    }
}

/// A short directory entry.
fn entry(name: [u8; 11], attributes: u8, cluster: u32, size: u32) -> [u8; ENTRY] {
    let mut bytes = [0; ENTRY];
    bytes[..11].copy_from_slice(&name);
    bytes[11] = attributes;
    // Created, accessed, modified.
    for at in [16, 18, 24] {
        bytes[at..at + 2].copy_from_slice(&DATE.to_le_bytes());
    }
    bytes[20..22].copy_from_slice(&((cluster >> 16) as u16).to_le_bytes());
    bytes[26..28].copy_from_slice(&(cluster as u16).to_le_bytes());
    bytes[28..].copy_from_slice(&size.to_le_bytes());
    bytes
}
