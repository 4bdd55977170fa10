//! The sectors of a disk, in which its partition table counts and its file systems are divided.

/// The size of the disk's logical sectors: partition tables count in them, and FAT32 must not have smaller ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SectorSize {
    /// Nearly all disks.
    #[default]
    B512,
    /// Disks without an emulation of small sectors ("4K native").
    B4096,
}

impl SectorSize {
    /// Bytes in a sector.
    pub const fn bytes(self) -> u64 {
        match self {
            SectorSize::B512 => 512,
            SectorSize::B4096 => 4096,
        }
    }
}
