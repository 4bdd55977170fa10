//! Offsets of a FAT32 file system's parts: boot sectors, tables, clusters.

use super::{FatError, FatSpec};
use crate::sector::SectorSize;

/// Copies of the allocation table.
pub(super) const FATS: u64 = 2;
/// Sector of the backup boot sector, where every system expects it.
pub(super) const BACKUP: u64 = 6;
/// Sector of the free-space record, relative to either boot sector.
pub(super) const INFO: u64 = 1;
/// Media type of a fixed disk.
pub(super) const MEDIA: u8 = 0xf8;

/// With fewer clusters, systems take the file system for FAT16. The specification says 65,525, and advises a distance
/// of 16.
const FEWEST_CLUSTERS: u64 = 65_525 + 16;
const RESERVED: u64 = 32;
/// Clusters begin at a multiple of the block size of underlying disks and file systems, in bytes.
const ALIGNMENT: u64 = 4096;
/// Larger clusters are not portable.
const LARGEST_CLUSTER: u64 = 32 * 1024;

/// Lengths in sectors, except the number of clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes in a sector.
    pub sector: u16,
    pub sectors: u32,
    pub reserved: u16,
    pub fat: u32,
    pub per_cluster: u8,
    pub clusters: u32,
}

impl Geometry {
    /// The geometry with the largest clusters (up to 32 KiB) that gives enough of them for FAT32.
    pub(super) fn of(size: u64, sector_size: SectorSize) -> Result<Geometry, FatError> {
        let refused = |reason| FatError::Size { size, reason };
        let sector = sector_size.bytes();
        if !size.is_multiple_of(sector) {
            return Err(refused("expected a multiple of the sector size"));
        }
        let sectors = u32::try_from(size / sector)
            .map_err(|_| refused("expected fewer sectors than 2^32"))?;
        [64, 32, 16, 8, 4, 2, 1]
            .into_iter()
            .filter(|per_cluster| u64::from(*per_cluster) * sector <= LARGEST_CLUSTER)
            .find_map(|per_cluster| Geometry::with_clusters(sector_size, sectors, per_cluster))
            .ok_or_else(|| refused("expected at least 65541 clusters (fewer are taken for FAT16)"))
    }

    fn with_clusters(sector_size: SectorSize, sectors: u32, per_cluster: u8) -> Option<Geometry> {
        let sector = sector_size.bytes();
        let (total, each) = (u64::from(sectors), u64::from(per_cluster));
        // Counts tables and reserved sectors as clusters, which gives a few more entries than are used.
        let fat = ((total / each + 2) * 4).div_ceil(sector);
        let before = (RESERVED + FATS * fat).next_multiple_of(ALIGNMENT / sector);
        let clusters = total.checked_sub(before)? / each;
        // The largest number that is not a reserved value; 2 TiB in 32 KiB clusters is far below it.
        if !(FEWEST_CLUSTERS..0x0fff_fff5).contains(&clusters) {
            return None;
        }
        Some(Geometry {
            sector: sector as u16,
            sectors,
            reserved: (before - FATS * fat) as u16,
            fat: fat as u32,
            per_cluster,
            clusters: clusters as u32,
        })
    }

    pub(super) fn cluster_size(&self) -> u64 {
        u64::from(self.per_cluster) * u64::from(self.sector)
    }

    /// First sector of a copy of the table.
    pub(super) fn fat_start(&self, copy: u64) -> u64 {
        u64::from(self.reserved) + copy * u64::from(self.fat)
    }

    /// First sector of a cluster; the first cluster is number 2.
    pub(super) fn cluster_start(&self, cluster: u32) -> u64 {
        self.fat_start(FATS) + u64::from(cluster - 2) * u64::from(self.per_cluster)
    }

    /// The first 512 bytes of the boot sector; the others, if there are any, are zero.
    pub(super) fn boot_sector(&self, spec: &FatSpec) -> [u8; 512] {
        let mut sector = [0; 512];
        let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
        // A jump over the fields to an endless loop: nothing boots from here, but the jump identifies the format.
        put(0, &[0xeb, 0x58, 0x90]);
        put(0x5a, &[0xf4, 0xeb, 0xfd]);
        // The name that the specification recommends: some systems accept no other.
        put(3, b"MSWIN4.1");
        put(11, &self.sector.to_le_bytes());
        put(13, &[self.per_cluster]);
        put(14, &self.reserved.to_le_bytes());
        put(16, &[FATS as u8]);
        put(21, &[MEDIA]);
        // Sectors per track and heads: a typical geometry of BIOSes.
        put(24, &63u16.to_le_bytes());
        put(26, &255u16.to_le_bytes());
        put(28, &spec.hidden_sectors.to_le_bytes());
        put(32, &self.sectors.to_le_bytes());
        put(36, &self.fat.to_le_bytes());
        // Cluster of the root directory.
        put(44, &2u32.to_le_bytes());
        put(48, &(INFO as u16).to_le_bytes());
        put(50, &(BACKUP as u16).to_le_bytes());
        // First hard disk; the next three fields are present.
        put(64, &[0x80, 0, 0x29]);
        put(67, &spec.volume_id.to_le_bytes());
        put(71, &spec.label.padded());
        put(82, b"FAT32   ");
        put(510, &[0x55, 0xaa]);
        sector
    }

    /// The first 512 bytes of the free-space record.
    pub(super) fn info_sector(&self, free: u32, next: u32) -> [u8; 512] {
        let mut sector = [0; 512];
        let mut put = |at: usize, number: u32| {
            sector[at..at + 4].copy_from_slice(&number.to_le_bytes());
        };
        put(0, 0x4161_5252);
        put(484, 0x6141_7272);
        put(488, free);
        put(492, next);
        put(508, 0xaa55_0000);
        sector
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn clusters_are_as_large_as_their_number_allows() {
        for (size, sector_size, per_cluster) in [
            (34 * MIB, SectorSize::B512, 1),
            (128 * MIB, SectorSize::B512, 2),
            (257 * MIB, SectorSize::B512, 8),
            (513 * MIB, SectorSize::B512, 16),
            (1024 * MIB, SectorSize::B512, 16),
            (1 << 40, SectorSize::B512, 64),
            (258 * MIB, SectorSize::B4096, 1),
            (1024 * MIB, SectorSize::B4096, 2),
            (1 << 42, SectorSize::B4096, 8),
        ] {
            let geometry = Geometry::of(size, sector_size).unwrap();
            assert_eq!(geometry.per_cluster, per_cluster, "{size}: {geometry:?}");
        }
    }

    #[test]
    fn parts_fit_and_tables_suffice() {
        let small = (34..600).chain([5_000, 100_000, 1 << 20]);
        let large = (258..600).chain([5_000, 100_000, 1 << 23]);
        let small = small.map(|mib| (mib, SectorSize::B512));
        for (mib, sector_size) in small.chain(large.map(|mib| (mib, SectorSize::B4096))) {
            let geometry = Geometry::of(mib * MIB, sector_size).unwrap();
            let sector = u64::from(geometry.sector);
            let last =
                geometry.cluster_start(geometry.clusters + 1) + u64::from(geometry.per_cluster);
            assert!(last * sector <= mib * MIB, "{geometry:?}");
            assert!(u64::from(geometry.fat) * sector / 4 >= u64::from(geometry.clusters) + 2);
            assert_eq!(geometry.cluster_start(2) * sector % ALIGNMENT, 0);
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let small = [0, 511, 512, 32 * MIB, 2048 * 1024 * MIB].map(|size| (size, SectorSize::B512));
        let large = [0, 512, 256 * MIB, 1 << 44].map(|size| (size, SectorSize::B4096));
        for (size, sector_size) in small.into_iter().chain(large) {
            let geometry = Geometry::of(size, sector_size);
            assert!(matches!(geometry, Err(FatError::Size { .. })), "{size}");
        }
    }
}
