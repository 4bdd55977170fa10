//! What a disk is: model, serial number and World Wide Name, as the kernel knows them from its controller.
//!
//! Each kind of controller has them elsewhere in sysfs. All of it may be missing: virtual disks often have none.

use std::fs;
use std::path::Path;

/// What a disk says of itself. Text from devices: printable only after control characters are replaced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Vendor and model.
    pub model: Option<String>,
    /// Serial number.
    pub serial: Option<String>,
    /// World Wide Name, or EUI-64, in hexadecimal digits; see [`plain_wwn`].
    pub wwn: Option<String>,
}

impl Identity {
    /// Of the disk with this directory below `/sys/block`.
    pub fn read(directory: &Path) -> Self {
        // The way to a USB device leads up from where the directory really is.
        let directory = directory
            .canonicalize()
            .unwrap_or_else(|_| directory.to_owned());
        Self {
            model: model(&directory),
            serial: serial(&directory),
            wwn: wwn(&directory),
        }
    }
}

/// A World Wide Name in the form in which two can be compared: small digits without a prefix that says of which kind they
/// are. `None` for what is none.
pub fn plain_wwn(text: &str) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    let prefixes = ["0x", "naa.", "eui.", "uuid."];
    let digits = prefixes
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix))
        .unwrap_or(&text);
    let digits: String = digits.chars().filter(|c| *c != '-').collect();
    let is_it = (8..=32).contains(&digits.len()) && digits.bytes().all(|c| c.is_ascii_hexdigit());
    is_it.then_some(digits)
}

/// The text of an attribute, if it says anything.
fn trimmed(path: &Path) -> Option<String> {
    let text = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

fn model(directory: &Path) -> Option<String> {
    if let Some(file) = trimmed(&directory.join("loop/backing_file")) {
        return Some(format!("loop device of {file}"));
    }
    let device = directory.join("device");
    // SCSI and USB, NVMe, and cards.
    let model = trimmed(&device.join("model")).or_else(|| trimmed(&device.join("name")))?;
    let vendor = trimmed(&device.join("vendor"));
    // ATA disks have no vendor, and PCI devices a number.
    let vendor = vendor.filter(|vendor| vendor != "ATA" && !vendor.starts_with("0x"));
    Some(vendor.map_or_else(|| model.clone(), |vendor| format!("{vendor} {model}")))
}

fn serial(directory: &Path) -> Option<String> {
    let device = directory.join("device");
    // virtio, then NVMe and cards.
    trimmed(&directory.join("serial"))
        .or_else(|| trimmed(&device.join("serial")))
        .or_else(|| {
            // SCSI and ATA: a page with a header of four bytes.
            let page = fs::read(device.join("vpd_pg80")).ok()?;
            let text = String::from_utf8_lossy(page.get(4..)?).trim().to_owned();
            (!text.is_empty()).then_some(text)
        })
        .or_else(|| {
            // USB: that of the device that the disk is in.
            let is_usb = |folder: &&Path| folder.join("idVendor").exists();
            trimmed(&directory.ancestors().find(is_usb)?.join("serial"))
        })
}

fn wwn(directory: &Path) -> Option<String> {
    // NVMe, then SCSI and ATA. Texts of vendors ("t10.ATA …", "nvme.8086-…") are no numbers.
    let paths = [directory.join("wwid"), directory.join("device/wwid")];
    paths.iter().find_map(|path| plain_wwn(&trimmed(path)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with these attributes.
    fn disk(attributes: &[(&str, &[u8])]) -> (tempfile::TempDir, Identity) {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("usb1/host6/block/sdb");
        for (path, content) in attributes {
            let path = directory.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let identity = Identity::read(&directory);
        (root, identity)
    }

    fn identity(model: &str, serial: &str, wwn: Option<&str>) -> Identity {
        Identity {
            model: Some(model.to_owned()),
            serial: Some(serial.to_owned()),
            wwn: wwn.map(str::to_owned),
        }
    }

    #[test]
    fn each_kind_of_disk_has_its_names_elsewhere() {
        let (_root, nvme) = disk(&[
            ("device/model", b"Samsung SSD 990 "),
            ("device/serial", b"S6Z1NJ0W \n"),
            ("wwid", b"eui.0025384331408A2B\n"),
        ]);
        let expected = identity("Samsung SSD 990", "S6Z1NJ0W", Some("0025384331408a2b"));
        assert_eq!(nvme, expected);
        let (_root, sata) = disk(&[
            ("device/vendor", b"ATA     "),
            ("device/model", b"ST4000NM0035    "),
            ("device/vpd_pg80", b"\0\x80\0\x08ZC1A2B3C"),
            ("device/wwid", b"naa.5000c500a1b2c3d4\n"),
        ]);
        let expected = identity("ST4000NM0035", "ZC1A2B3C", Some("5000c500a1b2c3d4"));
        assert_eq!(sata, expected);
        let (_root, usb) = disk(&[
            ("device/vendor", b"SanDisk "),
            ("device/model", b"Ultra Fit"),
            ("../../../idVendor", b"0781\n"),
            ("../../../serial", b"4C530001\n"),
            ("device/wwid", b"t10.SanDisk Ultra Fit"),
        ]);
        assert_eq!(usb, identity("SanDisk Ultra Fit", "4C530001", None));
        let (_root, none) = disk(&[("size", b"0")]);
        assert_eq!(none, Identity::default());
    }

    #[test]
    fn names_are_compared_without_their_prefixes() {
        for text in [
            "0x5000C500A1B2C3D4",
            "naa.5000c500a1b2c3d4",
            "5000c500a1b2c3d4 ",
        ] {
            assert_eq!(plain_wwn(text).as_deref(), Some("5000c500a1b2c3d4"));
        }
        for text in ["", "0x", "ZC1A2B3C", "t10.ATA", "naa.1234567"] {
            assert_eq!(plain_wwn(text), None, "{text}");
        }
    }
}
