//! Devices as sysfs, `/proc` and udev describe them.

use super::*;

/// A host with these files.
fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
    let root = tempfile::tempdir().expect("a folder");
    for (path, content) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, content).expect("written");
    }
    let numbers = root.path().join("sys/dev/block");
    fs::create_dir_all(&numbers).expect("a folder");
    for (number, device) in [("8:16", "sdb"), ("8:17", "sdb/sdb1")] {
        let device = format!("../../devices/usb1/1-4/host6/block/{device}");
        std::os::unix::fs::symlink(device, numbers.join(number)).expect("a link");
    }
    let host = Host::under(root.path());
    (root, host)
}

const DISK: &str = "sys/devices/usb1/1-4/host6/block/sdb";
/// 8:16 and 8:17.
const STICK: [(&str, &str); 14] = [
    ("sys/devices/usb1/1-4/idVendor", "0781\n"),
    ("sys/devices/usb1/1-4/serial", "4C530001\n"),
    ("sys/devices/usb1/1-4/host6/block/sdb/dev", "8:16\n"),
    ("sys/devices/usb1/1-4/host6/block/sdb/size", "30031872\n"),
    ("sys/devices/usb1/1-4/host6/block/sdb/ro", "0\n"),
    ("sys/devices/usb1/1-4/host6/block/sdb/removable", "1\n"),
    (
        "sys/devices/usb1/1-4/host6/block/sdb/queue/logical_block_size",
        "512\n",
    ),
    (
        "sys/devices/usb1/1-4/host6/block/sdb/device/model",
        "Ultra Fit       \n",
    ),
    (
        "sys/devices/usb1/1-4/host6/block/sdb/device/vendor",
        "SanDisk \n",
    ),
    ("sys/devices/usb1/1-4/host6/block/sdb/sdb1/dev", "8:17\n"),
    ("sys/devices/usb1/1-4/host6/block/sdb/sdb1/partition", "1\n"),
    (
        "sys/devices/usb1/1-4/host6/block/sdb/sdb1/size",
        "2097152\n",
    ),
    (
        "sys/devices/usb1/1-4/host6/block/sdb/sdb1/uevent",
        "MAJOR=8\nPARTN=1\nPARTNAME=HEARTH-ESP\n",
    ),
    (
        "run/udev/data/b8:17",
        "S:disk/by-label/BOOT\nE:ID_FS_LABEL=BO\x1bOT\nE:ID_FS_TYPE=vfat\n",
    ),
];

fn read(host: &Host) -> Device {
    Device::read(host, Path::new("/dev/sdb"), makedev(8, 16)).expect("a device")
}

fn layout(size: u64, sector_size: u32) -> Layout {
    Layout {
        size,
        sector_size,
        head: 1 << 20,
        esp: 1 << 20..2 << 20,
        is_installer: false,
    }
}

#[test]
fn a_stick_is_recognised_by_what_is_printed() {
    let (_root, host) = host(&STICK);
    let device = read(&host);
    assert_eq!(
        device.text(),
        "/dev/sdb: SanDisk Ultra Fit, serial 4C530001, 15.4 GB, removable\n  \
         sdb1  1.1 GB  \"HEARTH-ESP\"  vfat \"BO\\u{1b}OT\"\n"
    );
    device.check(&layout(1 << 30, 512)).expect("it fits");
    let error = device.check(&layout(1 << 34, 512)).expect_err("too small");
    let text = error.to_string();
    assert!(
        text.contains("17.2 GB (17179869184 bytes)") && text.contains("(15376318464 bytes)"),
        "{text}"
    );
    let error = device.check(&layout(1 << 30, 4096)).expect_err("sectors");
    assert!(error.to_string().contains("--sector-size 512"), "{error}");
}

#[test]
fn a_partition_is_no_disk() {
    let (_root, host) = host(&STICK);
    let error = Device::read(&host, Path::new("/dev/sdb1"), makedev(8, 17));
    let error = error.expect_err("a partition").to_string();
    assert!(error.contains("name the whole disk, /dev/sdb"), "{error}");
}

#[test]
fn what_is_used_is_refused_with_who_uses_it() {
    const MOUNT: &str = "26 1 8:17 / /media/usb rw,nosuid shared:1 - vfat /dev/none rw\n\
                         27 1 8:1 / / rw - ext4 /dev/none rw\nshort\n";
    let (root, host) = host(&STICK);
    fs::create_dir_all(root.path().join("proc/self")).expect("a folder");
    fs::write(root.path().join("proc/self/mountinfo"), MOUNT).expect("written");
    let holders = root.path().join(DISK).join("holders");
    fs::create_dir_all(holders.join("dm-3")).expect("a folder");
    let error = read(&host).check(&layout(1 << 30, 512)).expect_err("used");
    assert_eq!(
        error.to_string(),
        "it is in use: sdb is part of dm-3, sdb1 is mounted on /media/usb"
    );
}

#[test]
fn switches_and_empty_drives_are_noticed() {
    let (root, host) = host(&STICK);
    fs::write(root.path().join(DISK).join("ro"), "1\n").expect("written");
    let error = read(&host).check_use().expect_err("read-only");
    assert!(matches!(error, DeviceError::ReadOnly));
    fs::write(root.path().join(DISK).join("size"), "0\n").expect("written");
    let error = read(&host).check_use().expect_err("empty");
    assert!(matches!(error, DeviceError::NoMedium));
    fs::write(root.path().join(DISK).join("size"), "many\n").expect("written");
    let error = Device::read(&host, Path::new("/dev/sdb"), makedev(8, 16));
    assert!(error.expect_err("no number").to_string().contains("many"));
}

#[test]
fn the_names_of_other_kinds_of_disks_are_found() {
    let (root, host) = host(&STICK);
    let disk = root.path().join(DISK);
    fs::remove_file(root.path().join("sys/devices/usb1/1-4/serial")).expect("removed");
    fs::write(disk.join("device/vpd_pg80"), b"\0\x80\0\x06 S3Z8 ").expect("written");
    fs::write(disk.join("device/vendor"), "ATA     \n").expect("written");
    let device = read(&host);
    assert_eq!(device.serial.as_deref(), Some("S3Z8"));
    assert_eq!(device.model.as_deref(), Some("Ultra Fit"));
    fs::write(disk.join("device/vendor"), "0x1af4\n").expect("written");
    fs::remove_file(disk.join("device/model")).expect("removed");
    fs::write(disk.join("serial"), "virtual\n").expect("written");
    let device = read(&host);
    assert_eq!(device.serial.as_deref(), Some("virtual"));
    assert_eq!(device.model, None);
    fs::create_dir_all(disk.join("loop")).expect("a folder");
    fs::write(disk.join("loop/backing_file"), "/tmp/disk\n").expect("written");
    let device = read(&host);
    assert_eq!(device.model.as_deref(), Some("loop device of /tmp/disk"));
}
