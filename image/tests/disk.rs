//! Whole images: partition table, file system and sparseness, by independent readers.
#![allow(clippy::unwrap_used)] // A test's helpers fail the test.

mod tools;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use hearth_image::content::Content;
use hearth_image::disk::{Disk, DiskError, Partition, PartitionContent, Seed};
use hearth_image::fat::FatError;
use hearth_image::layout::{Boot, esp_partition};
use hearth_image::sector::SectorSize;
use uuid::{Uuid, uuid};

const MIB: u64 = 1 << 20;
const ESP: Uuid = uuid!("c12a7328-f81f-11d2-ba4b-00a0c93ec93b");
const DATA: Uuid = uuid!("0f0e0d0c-0b0a-4908-8706-050403020100");

fn boot(uki: Content) -> Boot {
    Boot {
        loader: vec![0x10; 100_000].into(),
        uki,
        version: "1.2".into(),
    }
}

fn disk(uki: Content) -> Disk {
    let files = BTreeMap::from([(
        "hearth/parameters.pb".to_owned(),
        Content::Bytes(vec![5; 77]),
    )]);
    Disk {
        seed: Seed::of(&[b"test"]),
        sector_size: SectorSize::B512,
        is_secret: true,
        partitions: vec![
            esp_partition("HEARTH-ESP", ESP, 128 * MIB, boot(uki), files).unwrap(),
            Partition {
                label: "HEARTH-DATA".into(),
                type_guid: DATA,
                size: 512 * MIB,
                content: PartitionContent::Blank,
            },
        ],
    }
}

fn written(directory: &Path) -> std::path::PathBuf {
    let path = directory.join("disk.img");
    disk(Content::Bytes(vec![0xee; 2_000_000]))
        .write(&path)
        .unwrap();
    path
}

#[test]
fn the_table_is_clean_and_says_what_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = written(directory.path());
    let verdict = tools::run("sgdisk", &["-v"], &path);
    assert!(verdict.contains("No problems found"), "{verdict}");
    for word in ["Warning", "Caution", "corrupt", "non-protective"] {
        assert!(!verdict.contains(word), "{verdict}");
    }
    let disk = gpt::GptConfig::new().open(&path).unwrap();
    assert_eq!(
        disk.primary_header().unwrap().disk_guid,
        disk.backup_header().unwrap().disk_guid
    );
    let partitions: Vec<_> = disk.partitions().values().collect();
    assert_eq!(partitions.len(), 2);
    assert_eq!(
        (
            partitions[0].name.as_str(),
            partitions[0].part_type_guid.guid
        ),
        ("HEARTH-ESP", ESP)
    );
    assert_eq!(
        (
            partitions[1].name.as_str(),
            partitions[1].part_type_guid.guid
        ),
        ("HEARTH-DATA", DATA)
    );
    assert_eq!(
        (partitions[0].first_lba, partitions[0].last_lba),
        (2048, 129 * 2048 - 1)
    );
    assert_eq!(
        (partitions[1].first_lba, partitions[1].last_lba),
        (129 * 2048, 641 * 2048 - 1)
    );
    assert_ne!(partitions[0].part_guid, partitions[1].part_guid);
    assert_eq!(partitions[0].part_guid.get_version_num(), 8);
    let mut file = File::open(&path).unwrap();
    let mbr =
        gpt::mbr::ProtectiveMBR::from_disk(&mut file, gpt::disk::LogicalBlockSize::Lb512).unwrap();
    assert_eq!(mbr.partition(0).unwrap().os_type, 0xee);
    assert_eq!(mbr.partition(0).unwrap().lb_size as u64, 642 * 2048 - 1);
}

#[test]
fn the_esp_is_clean_and_boots_the_uki() {
    let directory = tempfile::tempdir().unwrap();
    let path = written(directory.path());
    check_esp(directory.path(), &path, 128 * MIB);
}

#[test]
fn a_disk_with_large_sectors_has_table_and_esp_of_large_sectors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    let mut large = disk(Content::Bytes(vec![0xee; 2_000_000]));
    large.sector_size = SectorSize::B4096;
    large.partitions[0].size = 300 * MIB;
    large.write(&path).unwrap();
    check_esp(directory.path(), &path, 300 * MIB);
    let blocks = gpt::disk::LogicalBlockSize::Lb4096;
    let config = gpt::GptConfig::new().logical_block_size(blocks);
    let table = config.open(&path).unwrap();
    let partitions = table.partitions();
    let places = partitions
        .values()
        .map(|partition| (partition.first_lba, partition.last_lba));
    let places: Vec<_> = places.collect();
    assert_eq!(places, [(256, 301 * 256 - 1), (301 * 256, 813 * 256 - 1)]);
    let mut file = File::open(&path).unwrap();
    let mbr = gpt::mbr::ProtectiveMBR::from_disk(&mut file, blocks).unwrap();
    assert_eq!(mbr.partition(0).unwrap().lb_size as u64, 814 * 256 - 1);
}

/// Checks the ESP of this size, at 1 MiB of an image.
fn check_esp(directory: &Path, image: &Path, size: u64) {
    let mut file = File::open(image).unwrap();
    file.seek(SeekFrom::Start(MIB)).unwrap();
    let mut volume = Vec::new();
    file.take(size).read_to_end(&mut volume).unwrap();
    let esp = directory.join("esp");
    std::fs::write(&esp, &volume).unwrap();
    tools::fsck(&esp);

    let file = File::options().read(true).write(true).open(image).unwrap();
    let slice = fscommon::StreamSlice::new(file, MIB, MIB + size).unwrap();
    let volume = fatfs::FileSystem::new(slice, fatfs::FsOptions::new()).unwrap();
    assert_eq!(volume.volume_label(), "HEARTH-ESP");
    let read = |path: &str| {
        let mut content = Vec::new();
        let mut file = volume.root_dir().open_file(path).unwrap();
        file.read_to_end(&mut content).unwrap();
        content
    };
    assert_eq!(read("EFI/BOOT/BOOTX64.EFI"), vec![0x10; 100_000]);
    assert_eq!(read("loader/loader.conf"), b"timeout 0\neditor no\n");
    assert_eq!(read("EFI/Linux/hearth-1.2.efi"), vec![0xee; 2_000_000]);
    assert_eq!(read("hearth/parameters.pb"), [5; 77]);
}

#[test]
fn only_content_takes_space_and_data_is_blank() {
    let directory = tempfile::tempdir().unwrap();
    let path = written(directory.path());
    let metadata = path.metadata().unwrap();
    assert_eq!(metadata.len(), 642 * MIB);
    assert!(
        metadata.blocks() * 512 < 2_300_000,
        "{} bytes allocated",
        metadata.blocks() * 512
    );
    let mut file = File::open(&path).unwrap();
    file.seek(SeekFrom::Start(129 * MIB)).unwrap();
    let mut block = vec![1; MIB as usize];
    for _ in 0..512 {
        file.read_exact(&mut block).unwrap();
        assert!(block.iter().all(|&b| b == 0));
    }
}

#[test]
fn the_same_content_gives_the_same_bytes_from_memory_or_file() {
    let directory = tempfile::tempdir().unwrap();
    let first = written(directory.path());
    let uki = directory.path().join("uki");
    std::fs::write(&uki, vec![0xee; 2_000_000]).unwrap();
    let second = directory.path().join("second.img");
    disk(Content::of_file(&uki).unwrap())
        .write(&second)
        .unwrap();
    let same = Command::new("cmp")
        .arg(&first)
        .arg(&second)
        .status()
        .unwrap();
    assert!(same.success());
    let mut other = disk(Content::of_file(&uki).unwrap());
    other.seed = Seed::of(&[b"other"]);
    other.write(&second).unwrap();
    let guid = |path| *gpt::GptConfig::new().open(path).unwrap().guid();
    assert_ne!(guid(&first), guid(&second));
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    let mut corrupt = disk(Content::Bytes(vec![1]));
    corrupt.partitions[1].size = MIB + 512;
    assert!(matches!(
        corrupt.write(&path),
        Err(DiskError::PartitionSize { .. })
    ));
    let mut corrupt = disk(Content::Bytes(vec![1]));
    corrupt.partitions[1].label = "x".repeat(37);
    assert!(matches!(
        corrupt.write(&path),
        Err(DiskError::PartitionLabel { .. })
    ));
    // Fits once, not three times.
    let large = disk(Content::Bytes(vec![1; 40 << 20]));
    assert!(matches!(
        large.write(&path),
        Err(DiskError::Fat {
            source: FatError::NoSpace { .. },
            ..
        })
    ));
    let lost = directory.path().join("lost");
    std::fs::write(&lost, vec![1; 5000]).unwrap();
    let half = disk(Content::of_file(&lost).unwrap());
    std::fs::write(&lost, vec![1; 4000]).unwrap();
    assert!(matches!(half.write(&path), Err(DiskError::Write { .. })));
    std::fs::remove_file(&lost).unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}
