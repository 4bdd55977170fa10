//! The arguments for disks, network cards and the random number generator.

use std::path::Path;

use super::{Boot, Machine, absolute};
use crate::command_line::{CommandLine, Options};
use crate::disk::{Disk, Format, Medium};
use crate::hardware::{Card, DiskBus, MediumKind};
use crate::network::{Link, UserNetwork};
use crate::run_dir::RunDir;

/// The name of the block device behind the disk of this index.
pub(crate) fn disk_node(index: usize) -> String {
    format!("disk{index}")
}

/// The ID of the device that is the disk of this index for the guest.
pub(crate) fn disk_device_id(index: usize) -> String {
    format!("disk{index}-device")
}

/// The SATA ports of q35's chip set.
pub(super) const SATA_PORTS: usize = 6;

impl Machine {
    pub(super) fn disks(&self, line: &mut CommandLine) {
        if !self.disks.is_empty()
            && let Some(controller) = controller(self.disk_bus)
        {
            line.option("-device", controller);
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let node = disk_node(index);
            line.option("-blockdev", block_device(&node, disk));
            let mut device = disk_device(self.disk_bus, index)
                .set("id", disk_device_id(index))
                .set("drive", &node);
            // An SD card has neither a cache that the guest could flush nor a place in the boot order.
            if self.disk_bus != DiskBus::Sdhci {
                device = device.on("write-cache", disk.cache.write_cache());
                // The boot index makes the firmware start the drivers of this device alone instead of all. In a
                // direct boot, QEMU uses the first index for the kernel.
                if !matches!(self.boot, Boot::Direct { .. }) {
                    let before = usize::from(self.boots_from_network);
                    let place = before + self.media.len() + index;
                    device = device.set("bootindex", place.to_string());
                }
            }
            if disk.sector_bytes != 512 {
                let bytes = disk.sector_bytes.to_string();
                device = device
                    .set("logical_block_size", &bytes)
                    .set("physical_block_size", &bytes);
            }
            line.option("-device", device);
        }
    }

    pub(super) fn media(&self, line: &mut CommandLine) {
        for (index, Medium { path, kind }) in self.media.iter().enumerate() {
            let node = format!("medium{index}");
            let block = block_device(&node, &Disk::new(path, Format::Raw));
            let (block, device) = match kind {
                MediumKind::Stick => {
                    let bus = format!("media{index}");
                    line.option("-device", Options::of("qemu-xhci").set("id", &bus));
                    let device = Options::of("usb-storage").set("bus", format!("{bus}.0"));
                    (block, device.on("removable", true))
                }
                MediumKind::Disc => {
                    // From the last port on: disks have the first ones.
                    let port = SATA_PORTS.saturating_sub(index + 1);
                    let device = Options::of("ide-cd").set("bus", format!("ide.{port}"));
                    (block.on("read-only", true), device)
                }
            };
            line.option("-blockdev", block);
            let mut device = device.set("drive", &node);
            if !matches!(self.boot, Boot::Direct { .. }) {
                let before = usize::from(self.boots_from_network);
                device = device.set("bootindex", (before + index).to_string());
            }
            line.option("-device", device);
        }
    }

    pub(super) fn network(&self, line: &mut CommandLine) {
        for (index, nic) in self.nics.iter().enumerate() {
            let mut device = card(self.card)
                .set("mac", nic.mac.to_string())
                // No option ROM: the firmware would try to boot from the network by it.
                .set("romfile", "");
            if self.boots_from_network && index == 0 {
                device = device.set("bootindex", "0");
            }
            let id = format!("net{index}");
            let network = match &nic.link {
                Link::Unplugged => None,
                Link::User(user) => Some(user_network(&id, user)),
                // By its name in the machine's folder, which is QEMU's working directory: socket addresses are short.
                Link::Switch { .. } => Some(
                    Options::of("stream")
                        .set("id", &id)
                        .on("server", false)
                        .set("addr.type", "unix")
                        .path("addr.path", Path::new(&RunDir::link_name(index))),
                ),
            };
            if let Some(network) = network {
                line.option("-netdev", network);
                device = device.set("netdev", id);
            }
            line.option("-device", device);
        }
    }

    pub(super) fn rng(&self, line: &mut CommandLine) {
        if self.rng {
            // Without it (and without a trusted CPU) a guest's getrandom() blocks forever.
            line.option("-device", "virtio-rng-pci");
        }
    }
}

fn block_device(node: &str, disk: &Disk) -> Options {
    let Some(log) = &disk.log else {
        return file_of(Options::default(), "", disk).set("node-name", node);
    };
    let logged = cached(Options::with("driver", "blklogwrites"), "", disk);
    file_of(logged, "file.", disk)
        .set("log.driver", "file")
        .path("log.filename", &absolute(log))
        // QEMU flushes the log with each flush of the guest; a log that the host has lost is recorded anew.
        .on("log.cache.no-flush", true)
        .set("log-sector-size", disk.sector_bytes.to_string())
        // With each entry, so that the log has a superblock whenever QEMU ends.
        .set("log-super-update-interval", "1")
        .set("node-name", node)
}

/// The format and the file of a disk, as a block device or, with a prefix, as a part of one.
fn file_of(options: Options, prefix: &str, disk: &Disk) -> Options {
    let options = options
        .set(&format!("{prefix}driver"), disk.format.driver())
        .set(&format!("{prefix}file.driver"), "file")
        .path(&format!("{prefix}file.filename"), &absolute(&disk.path));
    let options = cached(options, prefix, disk);
    cached(options, &format!("{prefix}file."), disk)
}

fn cached(options: Options, prefix: &str, disk: &Disk) -> Options {
    options
        .on(&format!("{prefix}cache.direct"), disk.cache.direct())
        .on(&format!("{prefix}cache.no-flush"), disk.cache.no_flush())
        // What the guest discards becomes a hole again, so that a disk stays as small as its content.
        .set(&format!("{prefix}discard"), "unmap")
}

/// The controller that all disks are attached to, where it is a device of its own and not part of the machine.
fn controller(bus: DiskBus) -> Option<Options> {
    let (driver, id) = match bus {
        DiskBus::Virtio | DiskBus::Nvme | DiskBus::Ahci => return None,
        DiskBus::VirtioScsi => ("virtio-scsi-pci", "scsi"),
        DiskBus::Pvscsi => ("pvscsi", "scsi"),
        DiskBus::Megasas => ("megasas", "scsi"),
        DiskBus::Usb => ("qemu-xhci", "usb"),
        DiskBus::Sdhci => ("sdhci-pci", "sd"),
    };
    Some(Options::of(driver).set("id", id))
}

fn disk_device(bus: DiskBus, index: usize) -> Options {
    match bus {
        DiskBus::Virtio => Options::of("virtio-blk-pci"),
        // QEMU insists on a serial number.
        DiskBus::Nvme => Options::of("nvme").set("serial", format!("disk{index}")),
        DiskBus::Ahci => Options::of("ide-hd").set("bus", format!("ide.{index}")),
        DiskBus::VirtioScsi | DiskBus::Pvscsi | DiskBus::Megasas => {
            Options::of("scsi-hd").set("bus", "scsi.0")
        }
        DiskBus::Usb => Options::of("usb-storage").set("bus", "usb.0"),
        DiskBus::Sdhci => Options::of("sd-card").set("bus", "sd-bus"),
    }
}

fn card(card: Card) -> Options {
    match card {
        Card::Virtio => Options::of("virtio-net-pci"),
        // A transitional device would be driven as a modern one.
        Card::VirtioLegacy => Options::of("virtio-net-pci")
            .on("disable-modern", true)
            .on("disable-legacy", false),
        Card::E1000 | Card::E1000e | Card::Vmxnet3 | Card::Rtl8139 => Options::of(card.word()),
    }
}

/// QEMU's user-mode network.
fn user_network(id: &str, user: &UserNetwork) -> Options {
    let mut network = Options::of("user")
        .set("id", id)
        .on("restrict", user.restricted);
    for forward in &user.forwards {
        let rule = format!("tcp:127.0.0.1:{}-:{}", forward.host, forward.guest);
        network = network.set("hostfwd", rule);
    }
    network
}
