//! PCI devices that no driver has claimed.
//!
//! The kernel has no modules: a disk or a network card without a driver is not there for the node,
//! and nothing else on the machine says so. The errors about a missing disk or card therefore list
//! the devices of that kind that the bus has and no driver has claimed, by the numbers that
//! identify them to everyone else. A device may also have a driver that has failed; then the
//! kernel's log says why.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

/// The directory in which the kernel lists the devices, below sysfs.
const DEVICES: &str = "bus/pci/devices";

/// Why the devices cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// A file or directory in sysfs cannot be read.
    #[error("cannot read {path}")]
    Sysfs {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// An attribute of a device has an invalid value.
    #[error("{path}: expected a hexadecimal number, got {found:?}")]
    Attribute {
        /// The file.
        path: PathBuf,
        /// The actual content.
        found: String,
    },
}

/// What a device is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Reaching a disk: storage controllers, SD card readers, and USB controllers.
    Disk,
    /// Reaching a network.
    Network,
}

impl Purpose {
    /// Whether devices of this class serve it. The class is that of the PCI specification: base
    /// class, subclass and programming interface, one byte each.
    fn is_served_by(self, class: u32) -> bool {
        match self {
            Self::Disk => class >> 16 == 0x01 || class >> 8 == 0x08_05 || class >> 8 == 0x0c_03,
            Self::Network => class >> 16 == 0x02,
        }
    }
}

/// A PCI device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its place on the bus, such as `0000:00:04.0`.
    pub address: String,
    /// The number of its vendor.
    pub vendor: u32,
    /// The vendor's number for it.
    pub device: u32,
    /// Its class.
    pub class: u32,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, class) = (&self.address, self.class);
        let (vendor, device) = (self.vendor, self.device);
        write!(
            f,
            "{vendor:04x}:{device:04x} (class {class:06x}) at {address}"
        )
    }
}

/// The devices for this purpose that no driver has claimed, sorted by address. `sys` is `/sys`
/// except in tests. A machine without a PCI bus has none.
pub fn unclaimed(sys: &Path, purpose: Purpose) -> Result<Vec<Device>, PciError> {
    let directory = sys.join(DEVICES);
    let failed = |source| PciError::Sysfs {
        path: directory.clone(),
        source,
    };
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut devices = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if path.join("driver").exists() {
            continue;
        }
        match read(&path) {
            Ok(device) if purpose.is_served_by(device.class) => devices.push(device),
            Ok(_other) => {}
            // Removed meanwhile.
            Err(PciError::Sysfs { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    devices.sort_by(|a, b| a.address.cmp(&b.address));
    Ok(devices)
}

fn read(path: &Path) -> Result<Device, PciError> {
    let name = path.file_name().unwrap_or_default();
    Ok(Device {
        address: name.to_string_lossy().into_owned(),
        vendor: number(&path.join("vendor"))?,
        device: number(&path.join("device"))?,
        class: number(&path.join("class"))?,
    })
}

/// A number as sysfs shows it: `0x010802`.
fn number(path: &Path) -> Result<u32, PciError> {
    let text = fs::read_to_string(path).map_err(|source| PciError::Sysfs {
        path: path.to_owned(),
        source,
    })?;
    let text = text.trim();
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u32::from_str_radix(digits, 16).map_err(|_| PciError::Attribute {
        path: path.to_owned(),
        found: text.to_owned(),
    })
}

/// The devices for this purpose that no driver has claimed, as the end of a message; empty if there
/// are none. If they cannot be listed, the reason is logged: the message is about something else.
pub fn without_driver(sys: &Path, purpose: Purpose) -> String {
    let devices = unclaimed(sys, purpose).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot list PCI devices");
        Vec::new()
    });
    if devices.is_empty() {
        return String::new();
    }
    let devices: Vec<String> = devices.iter().map(Device::to_string).collect();
    format!(
        "; PCI devices without a driver in this kernel: {}",
        devices.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bus(tempfile::TempDir);

    impl Bus {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn add(&self, address: &str, vendor: &str, device: &str, class: &str) -> PathBuf {
            let path = self.0.path().join(DEVICES).join(address);
            fs::create_dir_all(&path).unwrap();
            for (name, value) in [("vendor", vendor), ("device", device), ("class", class)] {
                fs::write(path.join(name), format!("{value}\n")).unwrap();
            }
            path
        }
    }

    #[test]
    fn devices_are_listed_by_purpose_unless_a_driver_has_them() {
        let bus = Bus::new();
        bus.add("0000:00:1f.2", "0x8086", "0x2922", "0x010601");
        bus.add("0000:00:04.0", "0x1b36", "0x0010", "0x010802");
        bus.add("0000:00:05.0", "0x1b36", "0x0007", "0x080501");
        bus.add("0000:00:06.0", "0x1b36", "0x000d", "0x0c0330");
        bus.add("0000:00:07.0", "0x14e4", "0x164e", "0x020000");
        bus.add("0000:00:00.0", "0x8086", "0x29c0", "0x060000");
        let driven = bus.add("0000:00:08.0", "0x1af4", "0x1001", "0x010000");
        fs::create_dir(driven.join("driver")).unwrap();

        let listed = |purpose| {
            let devices = unclaimed(bus.0.path(), purpose).unwrap();
            devices.iter().map(Device::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            listed(Purpose::Disk),
            [
                "1b36:0010 (class 010802) at 0000:00:04.0",
                "1b36:0007 (class 080501) at 0000:00:05.0",
                "1b36:000d (class 0c0330) at 0000:00:06.0",
                "8086:2922 (class 010601) at 0000:00:1f.2",
            ]
        );
        assert_eq!(
            listed(Purpose::Network),
            ["14e4:164e (class 020000) at 0000:00:07.0"]
        );
        assert_eq!(
            without_driver(bus.0.path(), Purpose::Network),
            "; PCI devices without a driver in this kernel: \
             14e4:164e (class 020000) at 0000:00:07.0"
        );
    }

    #[test]
    fn a_machine_without_a_bus_has_no_devices() {
        let bus = Bus::new();
        assert_eq!(unclaimed(bus.0.path(), Purpose::Disk).unwrap(), []);
        assert_eq!(without_driver(bus.0.path(), Purpose::Disk), "");
    }

    #[test]
    fn a_device_that_goes_away_hides_no_other_and_nonsense_is_named() {
        let bus = Bus::new();
        let gone = bus.add("0000:00:04.0", "0x1b36", "0x0010", "0x010802");
        fs::remove_file(gone.join("class")).unwrap();
        bus.add("0000:00:05.0", "0x1b36", "0x0010", "0x010802");
        assert_eq!(unclaimed(bus.0.path(), Purpose::Disk).unwrap().len(), 1);
        bus.add("0000:00:06.0", "nonsense", "0x0010", "0x010802");
        let error = unclaimed(bus.0.path(), Purpose::Disk).unwrap_err();
        let error = error.to_string();
        assert!(
            error.ends_with("0000:00:06.0/vendor: expected a hexadecimal number, got \"nonsense\""),
            "{error}"
        );
    }
}
