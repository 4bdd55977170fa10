//! The parts of a volume in which a label is looked for.

use std::io;

use hearth_sys::volume::{self, Kind, Readable, testing};

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "volume",
    allocates: 64 << 10,
    check,
    seeds,
};

const DESCRIPTOR: u64 = 16 * 2048;
const DESCRIPTOR_LENGTH: usize = 72;

/// A volume with these parts of the input; the rest of it is the directory, wherever that is.
struct Device<'a> {
    descriptor: &'a [u8],
    boot: &'a [u8],
    directory: &'a [u8],
}

impl Readable for Device<'_> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<Option<()>> {
        let part = match offset {
            0 => self.boot,
            DESCRIPTOR => self.descriptor,
            _ => self.directory,
        };
        let length = part.len().min(buffer.len());
        buffer[..length].copy_from_slice(&part[..length]);
        Ok((!part.is_empty()).then_some(()))
    }
}

fn check(input: &[u8]) {
    let (descriptor, rest) = input.split_at(input.len().min(DESCRIPTOR_LENGTH));
    let (boot, directory) = rest.split_at(rest.len().min(512));
    let device = Device {
        descriptor,
        boot,
        directory,
    };
    let volume = volume::of(&device).expect("memory can be read");
    if let Some(volume) = volume {
        let longest = match volume.kind {
            Kind::Fat => 11,
            Kind::Iso9660 => 32,
        };
        assert!(volume.label.len() <= longest, "{volume:?}");
    }
}

fn seeds() -> Seeds {
    const LABEL: &[u8; 11] = b"HEARTH-CONF";
    const NONE: &[u8; 11] = b"NO NAME    ";
    let parts = |volume: &[u8], directory: usize| {
        let descriptor = &volume[DESCRIPTOR as usize..][..DESCRIPTOR_LENGTH];
        [descriptor, &volume[..512], &volume[directory..][..160]].concat()
    };
    vec![
        ("fat16", parts(&testing::fat16(NONE, Some(LABEL)), 7 * 4096)),
        ("fat32", parts(&testing::fat32(NONE, Some(LABEL)), 53 * 512)),
        ("fat32_boot", parts(&testing::fat32(LABEL, None), 0)),
        ("iso9660", parts(&testing::iso9660("HEARTH-CONF"), 0)),
    ]
}
