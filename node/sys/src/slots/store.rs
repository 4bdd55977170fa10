//! The storage of a slot: a file, or a region of a block device.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::format::{HEADER_LEN, MAX_PAYLOAD};
use crate::files;

/// The storage of one slot.
///
/// `write_sync` must not return before the bytes are durable. A power cut during the call may leave
/// any content in this slot, and must not affect the other one.
pub trait SlotStore {
    /// The content; `None` if nothing was ever written.
    fn read(&self) -> io::Result<Option<Vec<u8>>>;
    /// Replaces the content, durably.
    fn write_sync(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Overwrites the content and makes the slot absent, durably.
    fn erase_sync(&mut self) -> io::Result<()>;
    /// The maximum length of the content.
    fn capacity(&self) -> usize;
    /// The path of the slot, for messages.
    fn place(&self) -> String;
    /// Whether nothing else can have written here.
    fn is_ours_alone(&self) -> bool;
}

/// A slot in a file with a fixed name.
///
/// A file of zeros is absent: that is how images have it. The file is overwritten in place, and is neither
/// truncated, nor shortened, nor removed: on a full file system an update needs no new block, and on FAT
/// nothing but the file's own blocks and one entry changes.
///
/// The entries of a directory on FAT and the chains of blocks are in different places, and the entries of one
/// long name may be in two sectors. A power cut while they change may leave a part of them, and
/// Linux then makes the file system read-only, for good: nothing could be saved any more. Where a file
/// does not exist, or is too short, its chain is durable before an entry refers to it. A chain
/// without an entry is only lost space.
#[derive(Debug)]
pub struct FileSlot {
    path: PathBuf,
}

impl FileSlot {
    /// The slot in this file, whose directory must exist when it is written.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    fn directory(&self) -> &Path {
        match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        }
    }
}

/// Gives the file blocks for this length, and leaves its length as it is. Returns whether it had too few. A file system
/// that cannot do so is no FAT.
fn reserve(file: &File, length: u64) -> io::Result<bool> {
    /// What `st_blocks` counts.
    const BLOCK: u64 = 512;
    if file.metadata()?.blocks() * BLOCK >= length {
        return Ok(false);
    }
    match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 0, length) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

impl SlotStore for FileSlot {
    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let limit = self.capacity() as u64;
        let content = files::read_limited(&self.path, limit).map_err(io::Error::other)?;
        Ok(content.filter(|bytes| bytes.is_empty() || !is_blank(bytes)))
    }

    fn write_sync(&mut self, bytes: &[u8]) -> io::Result<()> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(files::PRIVATE_FILE)
            .open(&self.path)?;
        let former = file.metadata()?.len().min(self.capacity() as u64) as usize;
        if reserve(&file, bytes.len() as u64)? {
            files::sync_dir(self.directory()).map_err(io::Error::other)?;
        }
        file.write_all_at(bytes, 0)?;
        if let Some(rest) = former.checked_sub(bytes.len()) {
            // Nothing of an older, longer state remains on the disk.
            file.write_all_at(&vec![0; rest], bytes.len() as u64)?;
        }
        file.sync_all()?;
        // The name must be durable as well. Always sync it, since the creation of the file may have
        // been interrupted before this step.
        files::sync_dir(self.directory()).map_err(io::Error::other)
    }

    fn erase_sync(&mut self) -> io::Result<()> {
        match OpenOptions::new().write(true).open(&self.path) {
            Ok(file) => {
                let length = file.metadata()?.len().min(self.capacity() as u64);
                file.write_all_at(&vec![0; length as usize], 0)?;
                file.sync_all()?;
                // An empty file is damaged, not absent.
                if length == 0 {
                    fs::remove_file(&self.path)?;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if !self.directory().exists() {
                    return Ok(());
                }
            }
            Err(error) => return Err(error),
        }
        files::sync_dir(self.directory()).map_err(io::Error::other)
    }

    fn capacity(&self) -> usize {
        HEADER_LEN + MAX_PAYLOAD
    }

    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn is_ours_alone(&self) -> bool {
        true
    }
}

/// A slot in a region of a block device.
///
/// A region of zeros is absent. Two slots must not share a physical block: their offsets and
/// lengths should be multiples of 4096.
#[derive(Debug)]
pub struct RegionSlot {
    device: PathBuf,
    offset: u64,
    length: usize,
}

impl RegionSlot {
    /// The `length` bytes from `offset` on of a block device (or of a file).
    pub fn new(device: impl Into<PathBuf>, offset: u64, length: usize) -> Self {
        Self {
            device: device.into(),
            offset,
            length,
        }
    }

    fn replace(&self, content: &[u8]) -> io::Result<()> {
        let device = OpenOptions::new().write(true).open(&self.device)?;
        device.write_all_at(content, self.offset)?;
        // On a block device this also flushes the disk's own cache.
        device.sync_all()
    }
}

impl SlotStore for RegionSlot {
    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![0; self.length];
        File::open(&self.device)?.read_exact_at(&mut bytes, self.offset)?;
        Ok((!is_blank(&bytes)).then_some(bytes))
    }

    fn write_sync(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > self.length {
            return Err(io::Error::other("the record is larger than its region"));
        }
        // Up to the end of the region, so that nothing of an older, longer state remains on the
        // disk.
        let mut content = zeroize::Zeroizing::new(vec![0; self.length]);
        content[..bytes.len()].copy_from_slice(bytes);
        self.replace(&content)
    }

    fn erase_sync(&mut self) -> io::Result<()> {
        self.replace(&vec![0; self.length])
    }

    fn capacity(&self) -> usize {
        self.length
    }

    fn place(&self) -> String {
        format!("{} at byte {}", self.device.display(), self.offset)
    }

    fn is_ours_alone(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_there_before_the_file_has_a_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("slot");
        let file = File::create(&path).unwrap();
        assert!(reserve(&file, 5000).unwrap());
        let reserved = file.metadata().unwrap();
        assert_eq!(reserved.len(), 0);
        assert!(reserved.blocks() * 512 >= 5000, "{}", reserved.blocks());
        assert!(!reserve(&file, 5000).unwrap());

        FileSlot::new(path.clone()).write_sync(&[7; 5000]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [7; 5000]);
        assert!(reserve(&file, 50_000).unwrap());
        assert_eq!(fs::read(&path).unwrap(), [7; 5000]);
    }

    #[test]
    fn a_file_that_is_there_from_the_start_keeps_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("slot");
        fs::write(&path, [0; 4096]).unwrap();
        let mut slot = FileSlot::new(path.clone());
        assert_eq!(slot.read().unwrap(), None);
        for content in [&[7; 3000][..], &[8; 100]] {
            slot.write_sync(content).unwrap();
            let found = slot.read().unwrap().unwrap();
            assert_eq!(found.len(), 4096);
            assert!(found.starts_with(content) && is_blank(&found[content.len()..]));
        }
        slot.erase_sync().unwrap();
        assert_eq!(slot.read().unwrap(), None);
        assert_eq!(fs::metadata(&path).unwrap().len(), 4096);
        slot.write_sync(&[9; 5000]).unwrap();
        assert_eq!(slot.read().unwrap().unwrap(), [9; 5000]);
        // One that is empty was not made by an image.
        fs::write(&path, []).unwrap();
        assert_eq!(slot.read().unwrap().unwrap(), []);
        slot.erase_sync().unwrap();
        assert!(!path.exists());
    }
}
