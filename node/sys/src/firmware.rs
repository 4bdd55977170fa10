//! What the firmware says about the disk that this machine was booted from.
//!
//! Two EFI variables have it. The boot loader records the GUID of the partition that it was loaded
//! from, which identifies a disk unless there is a copy of it. The firmware's boot entry has the path
//! of the device, from the PCI bridge on, which identifies one of two equal disks; but only if the
//! firmware made the entry itself: one that an installer made may begin with the partition's GUID.
//!
//! # Invariants
//! - A variable that is absent is no error: a kernel that was booted directly has none, and firmware
//!   may leave some out. A loader's variable that cannot be parsed is: it names the disk.
//! - A path that is not understood excludes no disk. It is a hint, used only among disks that the
//!   GUID does not tell apart.

pub mod boot_entry;

use std::fs;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::files::{self, FileError};

/// The directory in which the kernel exposes EFI variables.
pub const EFIVARS: &str = "/sys/firmware/efi/efivars";

/// The variable in which the boot loader records the partition from which it was loaded.
pub(crate) const LOADER_DEVICE: &str = "LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
/// The vendor of the firmware's own variables.
const GLOBAL: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";
/// Variables begin with their attributes.
const ATTRIBUTES: usize = 4;
/// More than any of these variables has.
const LONGEST: u64 = 4096;

/// An EFI variable cannot be read, or cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("EFI variable {path}: {problem}")]
pub struct EfiVariableError {
    /// The variable.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

/// From where this machine was booted, as far as the firmware says it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Booted {
    /// The partition with the boot loader.
    pub partition: Option<Uuid>,
    /// The disk.
    pub disk: Option<DevicePath>,
}

/// The path of a device, from the bridge of its PCI bus on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePath {
    /// Device and function of each PCI device on the way, the controller last.
    pci: Vec<(u8, u8)>,
    /// Where the disk is on its controller.
    place: Place,
}

/// A place on a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// The controller has one disk, or says nothing that is understood here.
    Any,
    /// A namespace of an NVMe controller.
    Namespace(u32),
    /// A port of a SATA controller, from 0.
    SataPort(u16),
    /// Target and logical unit of a SCSI controller.
    Scsi(u16, u16),
    /// The ports of USB hubs on the way, from 0.
    Usb(Vec<u8>),
}

impl Booted {
    /// What the variables in this directory say, which is [`EFIVARS`] except in tests.
    pub fn read(efivars: &Path) -> Result<Self, EfiVariableError> {
        Ok(Self {
            partition: loader_partition(efivars)?,
            disk: boot_entry(efivars).and_then(|entry| DevicePath::of_boot_entry(&entry)),
        })
    }
}

/// The partition from which the boot loader was loaded, if it says so.
fn loader_partition(efivars: &Path) -> Result<Option<Uuid>, EfiVariableError> {
    let path = efivars.join(LOADER_DEVICE);
    let content = read(&path).map_err(|error| EfiVariableError {
        path: path.clone(),
        problem: error.to_string(),
    })?;
    let Some(content) = content else {
        return Ok(None);
    };
    let text = content.get(ATTRIBUTES..).and_then(text);
    let guid = text.as_deref().and_then(|text| Uuid::try_parse(text).ok());
    match guid {
        Some(guid) => Ok(Some(guid)),
        None => Err(EfiVariableError {
            path,
            problem: format!(
                "expected a GUID in UTF-16, got {:?}",
                text.unwrap_or_default()
            ),
        }),
    }
}

/// The load option that the firmware has booted.
fn boot_entry(efivars: &Path) -> Option<Vec<u8>> {
    let variable = |name: &str| {
        let content = read(&efivars.join(format!("{name}-{GLOBAL}"))).ok()??;
        content.get(ATTRIBUTES..).map(<[u8]>::to_vec)
    };
    let number = u16::from_le_bytes(variable("BootCurrent")?.try_into().ok()?);
    variable(&format!("Boot{number:04X}"))
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    files::read_limited(path, LONGEST)
}

/// Zero-terminated UTF-16.
fn text(bytes: &[u8]) -> Option<String> {
    let units: Vec<u16> = bytes
        .chunks_exact(2)
        .map(|unit| u16::from_le_bytes([unit[0], unit[1]]))
        .take_while(|unit| *unit != 0)
        .collect();
    String::from_utf16(&units).ok()
}

impl DevicePath {
    /// The device of a load option: attributes (four bytes), the length of the path (two), a
    /// zero-terminated description in UTF-16, the path. `None` if it does not begin at a PCI bridge.
    fn of_boot_entry(entry: &[u8]) -> Option<Self> {
        let length = usize::from(u16_at(entry, 4)?);
        let description = entry.get(6..)?;
        let end = description
            .chunks_exact(2)
            .position(|unit| unit == [0, 0])?;
        let path = description.get(2 * (end + 1)..)?.get(..length)?;
        Self::parse(path)
    }

    /// A path is a list of nodes: type, subtype, length (two bytes) with these four, data.
    fn parse(mut path: &[u8]) -> Option<Self> {
        let (mut pci, mut place, mut usb) = (Vec::new(), Place::Any, Vec::new());
        while let [kind, subtype, ..] = *path {
            let length = usize::from(u16_at(path, 2)?);
            let data = path.get(4..length)?;
            match (kind, subtype) {
                (1, 1) => pci.push((*data.get(1)?, *data.first()?)),
                (3, 2) => place = Place::Scsi(u16_at(data, 0)?, u16_at(data, 2)?),
                (3, 5) => usb.push(*data.first()?),
                (3, 18) => place = Place::SataPort(u16_at(data, 0)?),
                (3, 23) => {
                    let namespace = data.first_chunk()?;
                    place = Place::Namespace(u32::from_le_bytes(*namespace));
                }
                (0x7f, _) => break,
                _ => {}
            }
            path = path.get(length..)?;
        }
        if !usb.is_empty() {
            place = Place::Usb(usb);
        }
        (!pci.is_empty()).then_some(Self { pci, place })
    }

    /// Whether the disk with this name is the one at this path. `sys` is `/sys` except in tests.
    pub fn is(&self, sys: &Path, disk: &str) -> bool {
        let Ok(device) = fs::canonicalize(sys.join("block").join(disk)) else {
            return false;
        };
        let steps: Vec<&str> = device.iter().filter_map(|step| step.to_str()).collect();
        let pci: Vec<(u8, u8)> = steps.iter().filter_map(|step| pci_address(step)).collect();
        pci == self.pci && self.place.is(sys, &device, &steps)
    }
}

impl Place {
    fn is(&self, sys: &Path, device: &Path, steps: &[&str]) -> bool {
        match self {
            Self::Any => true,
            Self::Namespace(namespace) => number(device.join("nsid")) == Some(*namespace),
            Self::SataPort(port) => {
                let ata = steps.iter().find(|step| is_numbered(step, "ata"));
                let path = ata.map(|ata| sys.join("class/ata_port").join(ata).join("port_no"));
                // Counted from 1.
                path.and_then(number) == Some(u32::from(*port) + 1)
            }
            Self::Scsi(target, unit) => {
                let address = steps.iter().rev().find_map(|step| scsi_address(step));
                address == Some((*target, *unit))
            }
            Self::Usb(ports) => {
                let counted = |port: &u8| (u16::from(*port) + 1).to_string();
                let ports: Vec<String> = ports.iter().map(counted).collect();
                let wanted = ports.join(".");
                // `1-2.3:1.0`: bus, ports, configuration and interface.
                let interface = steps.iter().filter_map(|step| step.split_once(':'));
                let mut ports = interface.filter_map(|(device, _)| device.split_once('-'));
                ports.any(|(_, ports)| ports == wanted)
            }
        }
    }
}

/// `0000:00:1f.2` is device 0x1f, function 2.
fn pci_address(step: &str) -> Option<(u8, u8)> {
    let mut parts = step.split(':');
    let (domain, bus, rest) = (parts.next()?, parts.next()?, parts.next()?);
    let (device, function) = rest.split_once('.')?;
    let is_address = domain.len() == 4 && bus.len() == 2 && parts.next().is_none();
    let hex = |text: &str| u8::from_str_radix(text, 16).ok();
    is_address.then_some((hex(device)?, hex(function)?))
}

/// `2:0:3:1` is target 3, unit 1 of host 2.
fn scsi_address(step: &str) -> Option<(u16, u16)> {
    let parts = step.split(':').map(|part| part.parse().ok());
    match parts.collect::<Option<Vec<u16>>>()?[..] {
        [_, _, target, unit] => Some((target, unit)),
        _ => None,
    }
}

fn is_numbered(step: &str, prefix: &str) -> bool {
    let number = step.strip_prefix(prefix);
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

fn number(path: PathBuf) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests;
