//! Disks to boot machines from: images, the devices that they are written to, and the parameters on
//! them.
//!
//! Everything here is told what to do and asks nobody; [`crate::commands`] asks. What must hold:
//!
//! - Nothing is written to a device that is mounted, swapped to, held by another device, or opened by
//!   somebody who wants it alone. What [`device`] finds out is for the message; the kernel decides, by
//!   `O_EXCL`, which also knows of mounts in other namespaces.
//! - Whatever an image has as zeros is zeros on the device afterwards: a node decides by blank regions
//!   that a disk is new.
//! - The partition table comes last, so a device that was not written as a whole has none.
//! - A file appears, or is replaced, when it is complete.
//!
//! The backup partition table of an image is in the middle of a larger device. It stays there: at its
//! every boot a node moves it to the end of its disk, for disks do grow.

mod copy;
mod device;
mod esp;
mod layout;
mod target;
mod work;

pub(crate) use copy::CopyError;
pub(crate) use device::{Device, Host};
pub(crate) use target::{Target, TargetError};
pub(crate) use work::{Done, Image, Work, WorkError};

/// A size for people: decimal, as on the labels of disks.
pub(crate) fn size_text(bytes: u64) -> String {
    const UNITS: [(u64, &str); 3] = [
        (1_000_000_000_000, "TB"),
        (1_000_000_000, "GB"),
        (1_000_000, "MB"),
    ];
    let fitting = UNITS.iter().find(|(unit, _)| bytes >= *unit);
    fitting.map_or_else(
        || format!("{bytes} bytes"),
        |(unit, name)| format!("{:.1} {name}", bytes as f64 / *unit as f64),
    )
}

#[cfg(test)]
mod tests {
    use super::size_text;

    #[test]
    fn sizes_are_those_on_labels() {
        for (bytes, text) in [
            (999_999, "999999 bytes"),
            (31_500_000, "31.5 MB"),
            (15_376_318_464, "15.4 GB"),
            (2_000_398_934_016, "2.0 TB"),
        ] {
            assert_eq!(size_text(bytes), text);
        }
    }
}
