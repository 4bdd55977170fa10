//! The kinds of disk controllers and network cards that a machine can have.
//!
//! Virtio is the default, because it is the fastest. The others exist to boot the drivers that real machines and other
//! hypervisors need: each is a device that QEMU emulates and that the kernel of the image has a driver for. A machine
//! has one kind of each, because a node has one disk and one card.
//!
//! The names of the kernel's drivers are here as well: `docs/hardware.md` says by them which drivers are booted.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How the disks of a machine are attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskBus {
    /// A virtio block device for each disk.
    #[default]
    Virtio,
    /// An NVMe controller for each disk.
    Nvme,
    /// The SATA ports of the chip set.
    Ahci,
    /// SCSI disks on a virtio controller.
    VirtioScsi,
    /// SCSI disks on VMware's controller.
    Pvscsi,
    /// USB sticks on an xHCI controller.
    Usb,
    /// One SD card, in a reader on the PCI bus.
    Sdhci,
    /// SCSI disks on a MegaRAID controller.
    Megasas,
}

/// How a medium from which a machine is installed or configured is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumKind {
    /// A USB stick, on an xHCI controller of its own.
    Stick,
    /// A disc in an optical drive, on a SATA port of the chip set.
    Disc,
}

/// The kind of a machine's network cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Card {
    /// Virtio.
    #[default]
    Virtio,
    /// Intel 82540EM.
    E1000,
    /// Intel 82574L.
    E1000e,
    /// VMware's paravirtual card.
    Vmxnet3,
    /// Realtek RTL8139C+.
    Rtl8139,
    /// Virtio as it was before version 1.0, and nothing newer.
    VirtioLegacy,
}

/// A word that names no kind of device.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{what} {found:?}: expected one of {}", words.join(", "))]
pub struct UnknownDevice {
    what: &'static str,
    found: String,
    words: Vec<&'static str>,
}

impl DiskBus {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Virtio,
        Self::Nvme,
        Self::Ahci,
        Self::VirtioScsi,
        Self::Pvscsi,
        Self::Usb,
        Self::Sdhci,
        Self::Megasas,
    ];

    /// Its name in options and records.
    pub fn word(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::Nvme => "nvme",
            Self::Ahci => "ahci",
            Self::VirtioScsi => "virtio-scsi",
            Self::Pvscsi => "pvscsi",
            Self::Usb => "usb",
            Self::Sdhci => "sdhci",
            Self::Megasas => "megasas",
        }
    }

    /// The kernel's drivers, by their module names, that a boot from it goes through.
    pub fn drivers(self) -> &'static [&'static str] {
        match self {
            Self::Virtio => &["virtio_pci", "virtio_blk"],
            Self::Nvme => &["nvme"],
            Self::Ahci => &["ahci"],
            Self::VirtioScsi => &["virtio_pci", "virtio_scsi"],
            Self::Pvscsi => &["vmw_pvscsi"],
            Self::Usb => &["xhci_pci", "usb_storage"],
            Self::Sdhci => &["sdhci_pci"],
            Self::Megasas => &["megaraid_sas"],
        }
    }

    /// Whether Debian's OVMF can boot from it. It has no driver for the other controllers.
    pub fn boots_by_firmware(self) -> bool {
        !matches!(self, Self::Pvscsi | Self::Sdhci | Self::Megasas)
    }

    /// Whether it is a virtio device.
    pub fn is_virtio(self) -> bool {
        matches!(self, Self::Virtio | Self::VirtioScsi)
    }
}

impl Card {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Virtio,
        Self::E1000,
        Self::E1000e,
        Self::Vmxnet3,
        Self::Rtl8139,
        Self::VirtioLegacy,
    ];

    /// Its name in options and records.
    pub fn word(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::E1000 => "e1000",
            Self::E1000e => "e1000e",
            Self::Vmxnet3 => "vmxnet3",
            Self::Rtl8139 => "rtl8139",
            Self::VirtioLegacy => "virtio-legacy",
        }
    }

    /// The kernel's drivers, by their module names, that its packets go through.
    pub fn drivers(self) -> &'static [&'static str] {
        match self {
            Self::Virtio | Self::VirtioLegacy => &["virtio_pci", "virtio_net"],
            Self::E1000 => &["e1000"],
            Self::E1000e => &["e1000e"],
            Self::Vmxnet3 => &["vmxnet3"],
            Self::Rtl8139 => &["8139cp"],
        }
    }

    /// Whether it is a virtio device.
    pub fn is_virtio(self) -> bool {
        matches!(self, Self::Virtio | Self::VirtioLegacy)
    }
}

impl fmt::Display for DiskBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for DiskBus {
    type Err = UnknownDevice;

    fn from_str(word: &str) -> Result<Self, UnknownDevice> {
        let mut all = Self::ALL.into_iter();
        all.find(|bus| bus.word() == word)
            .ok_or_else(|| UnknownDevice {
                what: "disk bus",
                found: word.to_owned(),
                words: Self::ALL.map(Self::word).to_vec(),
            })
    }
}

impl FromStr for Card {
    type Err = UnknownDevice;

    fn from_str(word: &str) -> Result<Self, UnknownDevice> {
        let mut all = Self::ALL.into_iter();
        all.find(|card| card.word() == word)
            .ok_or_else(|| UnknownDevice {
                what: "network card",
                found: word.to_owned(),
                words: Self::ALL.map(Self::word).to_vec(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_found_by_its_word() {
        for bus in DiskBus::ALL {
            assert_eq!(bus.word().parse(), Ok(bus));
            assert_eq!(serde_json::to_value(bus).unwrap(), bus.word());
        }
        for card in Card::ALL {
            assert_eq!(card.word().parse(), Ok(card));
            assert_eq!(serde_json::to_value(card).unwrap(), card.word());
        }
        let error = "ide".parse::<DiskBus>().unwrap_err().to_string();
        assert!(
            error.starts_with("disk bus \"ide\": expected one of virtio, nvme"),
            "{error}"
        );
        let error = "ne2k".parse::<Card>().unwrap_err().to_string();
        assert!(error.contains("e1000e, vmxnet3"), "{error}");
    }
}
