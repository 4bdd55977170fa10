//! Variables and paths as firmware writes them, and directories laid out like sysfs.

use proptest::prelude::*;

use super::*;

const GUID: &str = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B";

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16()
        .chain([0])
        .flat_map(u16::to_le_bytes)
        .collect()
}

fn node(kind: u8, subtype: u8, data: &[u8]) -> Vec<u8> {
    let length = (4 + data.len()) as u16;
    [&[kind, subtype], &length.to_le_bytes()[..], data].concat()
}

/// `PciRoot(0x0)/Pci(DEVICE,FUNCTION)`, then these nodes.
fn path(device: u8, function: u8, more: &[Vec<u8>]) -> Vec<u8> {
    let root = node(2, 1, &[0xd0, 0x41, 3, 0x0a, 0, 0, 0, 0]);
    let pci = node(1, 1, &[function, device]);
    [root, pci, more.concat(), node(0x7f, 0xff, &[])].concat()
}

fn entry(path: &[u8]) -> Vec<u8> {
    let length = (path.len() as u16).to_le_bytes();
    [
        &[1, 0, 0, 0],
        &length[..],
        &utf16("UEFI QEMU HARDDISK"),
        path,
        b"more",
    ]
    .concat()
}

/// A machine whose disks are devices at these paths below `devices`.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new(disks: &[&str]) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let sys = machine.sys();
        fs::create_dir_all(sys.join("block")).unwrap();
        for disk in disks {
            let device = sys.join("devices").join(disk);
            fs::create_dir_all(&device).unwrap();
            let name = device.file_name().unwrap();
            std::os::unix::fs::symlink(&device, sys.join("block").join(name)).unwrap();
        }
        machine
    }

    fn sys(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, path: &str, content: &str) {
        let path = self.sys().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// The disks that this path leads to.
    fn at(&self, path: &[u8]) -> Vec<String> {
        let path = DevicePath::of_boot_entry(&entry(path)).unwrap();
        let disks = fs::read_dir(self.sys().join("block")).unwrap();
        let names = disks.map(|disk| disk.unwrap().file_name().into_string().unwrap());
        let mut found: Vec<String> = names.filter(|name| path.is(self.sys(), name)).collect();
        found.sort();
        found
    }
}

#[test]
fn the_loaders_partition_is_read_from_its_variable() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Booted::read(dir.path()).unwrap(), Booted::default());
    let content = [&[6, 0, 0, 0], &utf16(GUID)[..]].concat();
    let path = dir.path().join(LOADER_DEVICE);
    fs::write(&path, &content).unwrap();
    let booted = Booted::read(dir.path()).unwrap();
    assert_eq!(booted.partition, Some(Uuid::try_parse(GUID).unwrap()));
    for bad in [
        &content[..3],
        &content[..20],
        b"\x06\0\0\0\0\xd8\0\xd8",
        b"",
    ] {
        fs::write(&path, bad).unwrap();
        let error = Booted::read(dir.path()).unwrap_err();
        assert!(error.to_string().contains("LoaderDevice"), "{error}");
    }
}

#[test]
fn the_boot_entry_is_the_current_one() {
    let dir = tempfile::tempdir().unwrap();
    let variable = |name: &str, content: &[u8]| {
        let content = [&[7, 0, 0, 0], content].concat();
        fs::write(dir.path().join(format!("{name}-{GLOBAL}")), content).unwrap();
    };
    variable("BootCurrent", &[0x0a, 0]);
    assert_eq!(Booted::read(dir.path()).unwrap().disk, None);
    variable("Boot0001", &entry(&path(4, 0, &[])));
    variable("Boot000A", &entry(&path(5, 1, &[])));
    let wanted = DevicePath {
        pci: vec![(5, 1)],
        place: Place::Any,
    };
    assert_eq!(Booted::read(dir.path()).unwrap().disk, Some(wanted));
    // Made by an installer: partition and file.
    let short = [node(4, 1, &[0; 38]), node(4, 4, &utf16("\\EFI"))].concat();
    variable("Boot000A", &entry(&short));
    assert_eq!(Booted::read(dir.path()).unwrap().disk, None);
}

#[test]
fn equal_disks_are_told_apart_by_their_controllers() {
    let machine = Machine::new(&[
        "pci0000:00/0000:00:04.0/virtio1/block/vda",
        "pci0000:00/0000:00:05.0/virtio2/block/vdb",
        "pci0000:00/0000:00:1c.0/0000:01:04.0/virtio3/block/vdc",
    ]);
    assert_eq!(machine.at(&path(4, 0, &[])), ["vda"]);
    assert_eq!(machine.at(&path(5, 0, &[])), ["vdb"]);
    let behind_bridge = path(0x1c, 0, &[node(1, 1, &[0, 4])]);
    assert_eq!(machine.at(&behind_bridge), ["vdc"]);
    assert!(machine.at(&path(6, 0, &[])).is_empty());
}

#[test]
fn disks_of_one_controller_are_told_apart_by_their_places() {
    let machine = Machine::new(&[
        "pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda",
        "pci0000:00/0000:00:1f.2/ata2/host1/target1:0:0/1:0:0:0/block/sdb",
        "pci0000:00/0000:00:02.0/virtio0/host2/target2:0:0/2:0:0:0/block/sdc",
        "pci0000:00/0000:00:02.0/virtio0/host2/target2:0:3/2:0:3:1/block/sdd",
        "pci0000:00/0000:00:03.0/nvme/nvme0/nvme0n1",
        "pci0000:00/0000:00:03.0/nvme/nvme0/nvme0n2",
        "pci0000:00/0000:00:06.0/usb1/1-2/1-2:1.0/host3/target3:0:0/3:0:0:0/block/sde",
        "pci0000:00/0000:00:06.0/usb1/1-3/1-3.2/1-3.2:1.0/host4/target4:0:0/4:0:0:0/block/sdf",
    ]);
    machine.write("class/ata_port/ata1/port_no", "1\n");
    machine.write("class/ata_port/ata2/port_no", "2\n");
    for disk in ["nvme0n1", "nvme0n2"] {
        let namespace = &disk[6..];
        machine.write(&format!("block/{disk}/nsid"), &format!("{namespace}\n"));
    }
    let sata = |port: u8| path(0x1f, 2, &[node(3, 18, &[port, 0, 0xff, 0xff, 0, 0])]);
    assert_eq!(machine.at(&sata(1)), ["sdb"]);
    assert!(machine.at(&sata(2)).is_empty());
    let scsi = |target: u8, unit: u8| path(2, 0, &[node(3, 2, &[target, 0, unit, 0])]);
    assert_eq!(machine.at(&scsi(0, 0)), ["sdc"]);
    assert_eq!(machine.at(&scsi(3, 1)), ["sdd"]);
    let nvme = |namespace: u8| {
        path(
            3,
            0,
            &[node(3, 23, &[namespace, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8])],
        )
    };
    assert_eq!(machine.at(&nvme(2)), ["nvme0n2"]);
    let usb = |ports: &[u8]| {
        let nodes: Vec<Vec<u8>> = ports.iter().map(|port| node(3, 5, &[*port, 0])).collect();
        path(6, 0, &nodes)
    };
    assert_eq!(machine.at(&usb(&[1])), ["sde"]);
    assert_eq!(machine.at(&usb(&[2, 1])), ["sdf"]);
}

proptest! {
    #[test]
    fn arbitrary_entries_never_panic(bytes: Vec<u8>) {
        let _ = DevicePath::of_boot_entry(&bytes);
        let _ = DevicePath::parse(&bytes);
    }
}
