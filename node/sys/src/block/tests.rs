//! Finding and growing partitions, on files laid out like sysfs and `/dev`.

use super::*;

const DATA: Uuid = Uuid::from_u128(0xda7a);

struct Machine {
    dir: tempfile::TempDir,
    blocks: Blocks,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("sys/block")).unwrap();
        fs::create_dir_all(dir.path().join("dev")).unwrap();
        let blocks = Blocks::at(dir.path().join("sys"), dir.path().join("dev"));
        Self { dir, blocks }
    }

    /// Adds a disk of this size in MiB; returns its device.
    fn add_disk(&self, name: &str, mib: u64) -> PathBuf {
        let directory = self.dir.path().join("sys/block").join(name);
        fs::create_dir_all(directory.join("queue")).unwrap();
        fs::write(directory.join("size"), format!("{}\n", mib * 2048)).unwrap();
        fs::write(directory.join("ro"), "0\n").unwrap();
        fs::write(directory.join("queue/logical_block_size"), "512\n").unwrap();
        let device = self.dir.path().join("dev").join(name);
        File::create(&device)
            .unwrap()
            .set_len(mib * CHUNK_LENGTH as u64)
            .unwrap();
        device
    }

    /// Adds a disk with an ESP (2 MiB) and a data partition (2 MiB).
    fn add_boot_disk(&self, name: &str, esp: Uuid) {
        let device = self.add_disk(name, 8);
        let table = gpt::tests::two_partitions(8 * 2048, (ESP, esp), (DATA, Uuid::from_u128(99)));
        fs::write(device, table).unwrap();
        for number in 1..=2 {
            let p = if name.ends_with(|c: char| c.is_ascii_digit()) {
                "p"
            } else {
                ""
            };
            let directory = self.dir.path().join("sys/block").join(name);
            let directory = directory.join(format!("{name}{p}{number}"));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("partition"), format!("{number}\n")).unwrap();
            fs::write(directory.join("size"), "4096\n").unwrap();
        }
    }
}

fn named(partition: Uuid) -> Booted {
    Booted {
        partition: Some(partition),
        disk: None,
    }
}

const A: Uuid = Uuid::from_u128(0xa);
const B: Uuid = Uuid::from_u128(0xb);

#[test]
fn disks_are_listed_without_virtual_ones() {
    let machine = Machine::new();
    for name in ["vdb", "vda", "loop0", "ram0", "dm-0", "sr0"] {
        machine.add_disk(name, 1);
    }
    for name in ["sda", "mmcblk0", "mmcblk0boot0", "mmcblk0rpmb", "nvme1n1"] {
        machine.add_disk(name, 2);
    }
    machine.add_disk("empty", 0);
    let disks = machine.blocks.disks().unwrap();
    let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["mmcblk0", "nvme1n1", "sda", "vda", "vdb"]);
    assert_eq!((disks[3].size, disks[3].sector_size), (1 << 20, 512));
}

#[test]
fn partitions_are_found_on_disks_of_every_kind() {
    for (disk, esp) in [
        ("sda", "sda1"),
        ("mmcblk0", "mmcblk0p1"),
        ("xvda", "xvda1"),
        ("nvme0n1", "nvme0n1p1"),
    ] {
        let machine = Machine::new();
        machine.add_boot_disk(disk, A);
        let found = machine
            .blocks
            .boot_partition(&Booted::default(), DATA)
            .unwrap();
        assert_eq!(found.path.file_name().unwrap(), esp);
    }
}

#[test]
fn a_missing_disk_is_told_with_the_controllers_that_have_no_driver() {
    let machine = Machine::new();
    let device = machine.dir.path().join("sys/bus/pci/devices/0000:03:00.0");
    fs::create_dir_all(&device).unwrap();
    for (name, value) in [
        ("vendor", "0x9005"),
        ("device", "0x028d"),
        ("class", "0x010400"),
    ] {
        fs::write(device.join(name), format!("{value}\n")).unwrap();
    }
    let error = machine
        .blocks
        .boot_partition(&Booted::default(), DATA)
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with(
            "disks: none; PCI devices without a driver in this kernel: \
             9005:028d (class 010400) at 0000:03:00.0"
        ),
        "{error}"
    );
    machine.add_boot_disk("sda", A);
    let error = machine.blocks.boot_partition(&named(B), DATA).unwrap_err();
    assert!(error.to_string().contains("9005:028d"), "{error}");
}

#[test]
fn the_only_esp_is_the_boot_partition() {
    let machine = Machine::new();
    machine.add_boot_disk("nvme0n1", A);
    machine.add_disk("vda", 1);
    let esp = machine
        .blocks
        .boot_partition(&Booted::default(), DATA)
        .unwrap();
    assert!(esp.path.ends_with("dev/nvme0n1p1"), "{:?}", esp.path);
    assert_eq!(esp.size(), 2 << 20);
    let data = machine.blocks.only_partition(&esp.disk, DATA).unwrap();
    assert!(data.path.ends_with("dev/nvme0n1p2"));
}

#[test]
fn several_are_decided_by_the_firmware_or_not_at_all() {
    let machine = Machine::new();
    machine.add_boot_disk("vda", A);
    machine.add_boot_disk("vdb", B);
    let esp = machine.blocks.boot_partition(&named(B), DATA).unwrap();
    assert_eq!(esp.disk.name, "vdb");
    let error = machine
        .blocks
        .boot_partition(&Booted::default(), DATA)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("dev/vda1") && error.contains("dev/vdb1"),
        "{error}"
    );
}

#[test]
fn copies_of_one_image_are_not_told_apart_by_the_order_of_disks() {
    let machine = Machine::new();
    machine.add_boot_disk("vda", A);
    machine.add_boot_disk("vdb", A);
    for booted in [Booted::default(), named(A)] {
        let error = machine.blocks.boot_partition(&booted, DATA).unwrap_err();
        assert!(
            matches!(&error, BlockError::AmbiguousEsp { candidates } if candidates.len() == 2),
            "{error}"
        );
    }
}

/// FIELD K1.
#[test]
fn a_whole_table_goes_before_a_backup_and_our_disk_before_another_systems() {
    let machine = Machine::new();
    machine.add_boot_disk("vda", A);
    machine.add_boot_disk("vdb", A);
    let copy = machine.dir.path().join("dev/vda");
    // The primary table.
    write_region(&copy, 512, &[0; 34 * 512]).unwrap();
    machine.add_boot_disk("vdc", B);
    let other_type = Uuid::from_u128(0x07e8);
    let table = gpt::tests::two_partitions(8 * 2048, (ESP, B), (other_type, Uuid::from_u128(98)));
    fs::write(machine.dir.path().join("dev/vdc"), table).unwrap();
    for booted in [Booted::default(), named(A)] {
        let esp = machine.blocks.boot_partition(&booted, DATA).unwrap();
        assert_eq!(esp.disk.name, "vdb");
    }
    let error = machine.blocks.boot_partition(&named(B), DATA).unwrap_err();
    assert!(
        matches!(error, BlockError::BootPartitionMissing { .. }),
        "{error}"
    );
}

#[test]
fn a_missing_boot_partition_tells_what_was_found() {
    let machine = Machine::new();
    let error = machine
        .blocks
        .boot_partition(&Booted::default(), DATA)
        .unwrap_err()
        .to_string();
    assert!(error.contains("disks: none"), "{error}");
    machine.add_disk("vda", 1);
    let error = machine
        .blocks
        .boot_partition(&Booted::default(), DATA)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("dev/vda (no GUID partition table)"),
        "{error}"
    );
    machine.add_boot_disk("vdb", A);
    let error = machine
        .blocks
        .boot_partition(&named(B), DATA)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&B.to_string()) && error.contains("vdb"),
        "{error}"
    );
    let error = machine
        .blocks
        .only_partition(&machine.blocks.disks().unwrap()[1], B);
    assert!(error.unwrap_err().to_string().ends_with("got 0"));
}

#[test]
fn a_partition_that_fills_its_disk_is_left_alone() {
    let machine = Machine::new();
    machine.add_boot_disk("vda", A);
    let disk = &machine.blocks.disks().unwrap()[0];
    let data = machine.blocks.only_partition(disk, DATA).unwrap();
    // A file cannot be resized in the kernel, so its size in sysfs must match already.
    let kernel = machine.dir.path().join("sys/block/vda/vda2/size");
    fs::write(&kernel, format!("{}\n", 4 * 2048)).unwrap();
    let grown = machine.blocks.grow(&data).unwrap();
    assert_eq!(grown.size(), 4 << 20);
    let before = fs::read(&disk.path).unwrap();
    assert_eq!(machine.blocks.grow(&grown).unwrap(), grown);
    assert!(fs::read(&disk.path).unwrap() == before);
    // If it does not match, the kernel is asked to resize it, which fails for a file.
    fs::write(&kernel, "4096\n").unwrap();
    let error = machine.blocks.grow(&grown).unwrap_err();
    assert!(error.to_string().contains("set the new size"), "{error}");
}

#[test]
fn ranges_are_zeroed_and_nothing_beside_them() {
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("device");
    fs::write(&device, vec![7; 3 * CHUNK_LENGTH]).unwrap();
    let (offset, length) = (1000, CHUNK_LENGTH as u64 + 5000);
    assert!(!is_blank(&device, offset, length).unwrap());
    zero_range(&device, offset, length).unwrap();
    assert!(is_blank(&device, offset, length).unwrap());
    assert!(!is_blank(&device, offset - 1, length).unwrap());
    assert!(!is_blank(&device, offset, length + 1).unwrap());
    assert_eq!(size_of(&device).unwrap(), 3 * CHUNK_LENGTH as u64);
    write_region(&device, offset + 7, b"abc").unwrap();
    assert_eq!(read_region(&device, offset + 6, 5).unwrap(), b"\0abc\0");
}
