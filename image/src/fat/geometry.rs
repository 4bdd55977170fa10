//! Offsets of a FAT32 file system's parts: boot sectors, tables, clusters.

use super::{FatError, FatSpec};

/// Bytes in a sector.
pub(super) const SECTOR: u64 = 512;
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
/// Clusters begin at a multiple of 4 KiB, the block size of underlying disks and file systems.
const ALIGNMENT: u64 = 8;

/// Lengths in sectors, except the number of clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub sectors: u32,
    pub reserved: u16,
    pub fat: u32,
    pub per_cluster: u8,
    pub clusters: u32,
}

impl Geometry {
    /// The geometry with the largest clusters (up to 32 KiB) that gives enough of them for FAT32.
    pub(super) fn of(size: u64) -> Result<Geometry, FatError> {
        let refused = |reason| FatError::Size { size, reason };
        if !size.is_multiple_of(SECTOR) {
            return Err(refused("expected a multiple of 512"));
        }
        let sectors =
            u32::try_from(size / SECTOR).map_err(|_| refused("expected at most 2 TiB"))?;
        [64, 32, 16, 8, 4, 2, 1]
            .into_iter()
            .find_map(|per_cluster| Geometry::with_clusters(sectors, per_cluster))
            .ok_or_else(|| {
                refused("expected at least about 33 MiB (smaller ones are taken for FAT16)")
            })
    }

    fn with_clusters(sectors: u32, per_cluster: u8) -> Option<Geometry> {
        let (total, each) = (u64::from(sectors), u64::from(per_cluster));
        // Counts tables and reserved sectors as clusters, which gives a few more entries than are used.
        let fat = ((total / each + 2) * 4).div_ceil(SECTOR);
        let before = (RESERVED + FATS * fat).next_multiple_of(ALIGNMENT);
        let clusters = total.checked_sub(before)? / each;
        // The largest number that is not a reserved value; 2 TiB in 32 KiB clusters is far below it.
        if !(FEWEST_CLUSTERS..0x0fff_fff5).contains(&clusters) {
            return None;
        }
        Some(Geometry {
            sectors,
            reserved: (before - FATS * fat) as u16,
            fat: fat as u32,
            per_cluster,
            clusters: clusters as u32,
        })
    }

    pub(super) fn cluster_size(&self) -> u64 {
        u64::from(self.per_cluster) * SECTOR
    }

    /// First sector of a copy of the table.
    pub(super) fn fat_start(&self, copy: u64) -> u64 {
        u64::from(self.reserved) + copy * u64::from(self.fat)
    }

    /// First sector of a cluster; the first cluster is number 2.
    pub(super) fn cluster_start(&self, cluster: u32) -> u64 {
        self.fat_start(FATS) + u64::from(cluster - 2) * u64::from(self.per_cluster)
    }

    pub(super) fn boot_sector(&self, spec: &FatSpec) -> [u8; SECTOR as usize] {
        let mut sector = [0; SECTOR as usize];
        let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
        // A jump over the fields to an endless loop: nothing boots from here, but the jump identifies the format.
        put(0, &[0xeb, 0x58, 0x90]);
        put(0x5a, &[0xf4, 0xeb, 0xfd]);
        // The name that the specification recommends: some systems accept no other.
        put(3, b"MSWIN4.1");
        put(11, &(SECTOR as u16).to_le_bytes());
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

    pub(super) fn info_sector(&self, free: u32, next: u32) -> [u8; SECTOR as usize] {
        let mut sector = [0; SECTOR as usize];
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
        for (size, per_cluster) in [
            (34 * MIB, 1),
            (128 * MIB, 2),
            (257 * MIB, 8),
            (513 * MIB, 16),
            (1 << 40, 64),
        ] {
            let geometry = Geometry::of(size).unwrap();
            assert_eq!(geometry.per_cluster, per_cluster, "{size}: {geometry:?}");
        }
    }

    #[test]
    fn parts_fit_and_tables_suffice() {
        for mib in (34..600).chain([5_000, 100_000, 1 << 20]) {
            let geometry = Geometry::of(mib * MIB).unwrap();
            let last =
                geometry.cluster_start(geometry.clusters + 1) + u64::from(geometry.per_cluster);
            assert!(last <= mib * 2048, "{geometry:?}");
            assert!(u64::from(geometry.fat) * 128 >= u64::from(geometry.clusters) + 2);
            assert_eq!(geometry.cluster_start(2) % ALIGNMENT, 0);
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for size in [0, 511, 512, 32 * MIB, 2048 * 1024 * MIB] {
            assert!(
                matches!(Geometry::of(size), Err(FatError::Size { .. })),
                "{size}"
            );
        }
    }
}
