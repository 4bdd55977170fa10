//! The formats of images, and the conversion of raw ones by `qemu-img`.
//!
//! Two formats have values that `qemu-img` makes up anew each time, and the name of the file that it wrote to. They are
//! replaced by values that follow from the image's content, so that the same image gives the same file, bit for bit:
//!
//! | format | what is replaced |
//! |---|---|
//! | VMDK, stream-optimized, as OVA archives have it | the content ID, and the file name in the descriptor |
//! | VHD, fixed size, the only kind that Azure takes | in the footer: the time, the UUID, and with them the checksum |
//!
//! A file of fixed size is as large as the disk, and as sparse as the raw image.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use hearth_image::disk::Seed;
use hearth_image::output::Output;

use crate::command::Cmd;
use crate::ui::Ui;

/// Image formats.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// The disk's bytes, in a sparse file
    Raw,
    /// QEMU's format
    Qcow2,
    /// VMware's format, stream-optimized
    Vmdk,
    /// Microsoft's format, of fixed size
    Vhd,
    /// An optical disc, for --installer only
    Iso,
}

/// The unit of a VMDK's header.
const SECTOR: u64 = 512;
/// The length of a VHD's footer.
const FOOTER: usize = 512;

impl Format {
    /// The extension of the names of its files.
    pub(super) fn extension(self) -> &'static str {
        match self {
            Format::Raw => "img",
            Format::Qcow2 => "qcow2",
            Format::Vmdk => "vmdk",
            Format::Vhd => "vhd",
            Format::Iso => "iso",
        }
    }

    /// Whether it is made of a raw image.
    pub(super) fn is_converted(self) -> bool {
        matches!(self, Format::Qcow2 | Format::Vmdk | Format::Vhd)
    }

    /// qemu-img's name of it, and its options.
    fn of_qemu(self) -> (&'static str, Option<&'static str>) {
        match self {
            // A disc is none of a disk's formats.
            Format::Raw | Format::Iso => ("raw", None),
            Format::Qcow2 => ("qcow2", None),
            Format::Vmdk => ("vmdk", Some("subformat=streamOptimized")),
            // Exactly the disk's size: otherwise it is rounded up to whole cylinders of a disk from 1990, and the backup
            // partition table is not at the end.
            Format::Vhd => ("vpc", Some("subformat=fixed,force_size=on")),
        }
    }
}

/// Converts a raw image whose content has this seed; the new one appears when it is complete.
pub(super) fn convert(
    ui: &Ui,
    format: Format,
    raw: &Path,
    seed: Seed,
    destination: &Path,
) -> Result<()> {
    let mut output = Output::create(destination)?;
    let metadata = fs::metadata(raw).with_context(|| format!("cannot read {}", raw.display()))?;
    if metadata.permissions().mode() & 0o077 == 0 {
        output = output.secret()?;
    }
    let (name, options) = format.of_qemu();
    let mut command = Cmd::new("qemu-img");
    // In disk order, as without -W: otherwise the result depends on timing.
    command = command.args(["convert", "-f", "raw", "-O", name]);
    if let Some(options) = options {
        command = command.args(["-o", options]);
    }
    command.arg(raw).arg(output.reachable_path()).run(ui)?;
    let file = output.file();
    match format {
        Format::Raw | Format::Qcow2 | Format::Iso => {}
        Format::Vmdk => settle_vmdk(file, seed)?,
        Format::Vhd => settle_vhd(file, seed)?,
    }
    Ok(output.publish()?)
}

/// Replaces what differs from one conversion to the next in the descriptor of a VMDK.
fn settle_vmdk(file: &File, seed: Seed) -> Result<()> {
    let mut header = [0; 44];
    file.read_exact_at(&mut header, 0)
        .context("cannot read the header of the VMDK")?;
    ensure!(header.starts_with(b"KDMV"), "expected the header of a VMDK");
    let number = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&header[at..at + 8]);
        u64::from_le_bytes(bytes) * SECTOR
    };
    let (start, length) = (number(28), number(36));
    ensure!(length <= 1 << 20, "a descriptor of {length} bytes");
    let mut descriptor = vec![0; length as usize];
    file.read_exact_at(&mut descriptor, start)
        .context("cannot read the descriptor of the VMDK")?;
    let end = descriptor.iter().position(|byte| *byte == 0);
    let text = std::str::from_utf8(&descriptor[..end.unwrap_or(descriptor.len())])
        .context("the descriptor of the VMDK is not text")?;
    let [a, b, c, d, ..] = purpose(seed, "vmdk");
    let line = |line: &str| match line.split_once('=') {
        Some(("CID", _)) => format!("CID={:08x}\n", u32::from_be_bytes([a, b, c, d])),
        _ if line.starts_with("RW ") => match line.split_once('"') {
            Some((extent, _)) => format!("{extent}\"disk.vmdk\"\n"),
            None => format!("{line}\n"),
        },
        _ => format!("{line}\n"),
    };
    let mut settled = text.lines().map(line).collect::<String>().into_bytes();
    ensure!(
        settled.len() <= descriptor.len(),
        "the descriptor of the VMDK is full"
    );
    settled.resize(descriptor.len(), 0);
    file.write_all_at(&settled, start)
        .context("cannot write the descriptor of the VMDK")
}

/// Replaces what differs from one conversion to the next in the footer of a VHD.
fn settle_vhd(file: &File, seed: Seed) -> Result<()> {
    const TIME: std::ops::Range<usize> = 24..28;
    const CHECKSUM: std::ops::Range<usize> = 64..68;
    const UUID: std::ops::Range<usize> = 68..84;
    let length = file.metadata().map(|metadata| metadata.len());
    let start = length.and_then(|length| {
        let start = length.checked_sub(FOOTER as u64);
        start.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    });
    let start = start.context("cannot find the footer of the VHD")?;
    let mut footer = [0; FOOTER];
    file.read_exact_at(&mut footer, start)
        .context("cannot read the footer of the VHD")?;
    ensure!(
        footer.starts_with(b"conectix"),
        "expected the footer of a VHD"
    );
    // Seconds since 2000, when the format's time begins.
    footer[TIME].fill(0);
    footer[UUID].copy_from_slice(&purpose(seed, "vhd")[..16]);
    footer[CHECKSUM].fill(0);
    let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
    footer[CHECKSUM].copy_from_slice(&(!sum).to_be_bytes());
    file.write_all_at(&footer, start)
        .context("cannot write the footer of the VHD")
}

fn purpose(seed: Seed, name: &str) -> [u8; 32] {
    Seed::of(&[&seed.0, name.as_bytes()]).0
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use hearth_image::disk::{Disk, Partition, PartitionContent};
    use hearth_image::layout;
    use hearth_image::sector::SectorSize;

    use super::*;

    /// A raw image that is secret, and its seed.
    fn raw(folder: &Path) -> (std::path::PathBuf, Seed) {
        let path = folder.join("raw");
        let seed = Seed::of(&[b"x"]);
        let disk = Disk {
            seed,
            sector_size: SectorSize::B512,
            is_secret: true,
            partitions: vec![Partition {
                label: "A".to_owned(),
                type_guid: layout::DATA_TYPE,
                size: 62 << 20,
                content: PartitionContent::Bytes(vec![(1 << 20, vec![7; 100_000].into())]),
            }],
        };
        disk.write(&path).unwrap();
        (path, seed)
    }

    #[test]
    fn each_format_holds_the_same_disk_each_time() {
        let ui = Ui::new(false);
        let folder = tempfile::tempdir().unwrap();
        let (raw, seed) = raw(folder.path());
        for format in [Format::Qcow2, Format::Vmdk, Format::Vhd] {
            let (name, _) = format.of_qemu();
            let [first, second] = ["1", "another"]
                .map(|stem| folder.path().join(stem).with_extension(format.extension()));
            convert(&ui, format, &raw, seed, &first).unwrap();
            convert(&ui, format, &raw, seed, &second).unwrap();
            Cmd::new("cmp").arg(&first).arg(&second).run(&ui).unwrap();
            let metadata = fs::metadata(&first).unwrap();
            let mode = metadata.permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "others can read the parameters");
            assert!(
                metadata.blocks() * 512 < 8 << 20,
                "{format:?} is not sparse"
            );
            Cmd::new("qemu-img")
                .args(["compare", "-f", "raw", "-F", name])
                .arg(&raw)
                .arg(&first)
                .run(&ui)
                .unwrap();
        }
    }

    #[test]
    fn what_cannot_be_converted_leaves_no_file() {
        let ui = Ui::new(false);
        let folder = tempfile::tempdir().unwrap();
        let absent = folder.path().join("absent");
        let destination = folder.path().join("disk.vmdk");
        let seed = Seed::of(&[]);
        assert!(convert(&ui, Format::Vmdk, &absent, seed, &destination).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_checksum_of_a_settled_footer_is_right() {
        let file = tempfile::tempfile().unwrap();
        let mut footer = [0; FOOTER];
        footer[..8].copy_from_slice(b"conectix");
        footer[24..28].copy_from_slice(b"time");
        file.write_all_at(&footer, 4096).unwrap();
        settle_vhd(&file, Seed::of(&[b"x"])).unwrap();
        file.read_exact_at(&mut footer, 4096).unwrap();
        assert_eq!(footer[24..28], [0; 4]);
        let mut checksum = [0; 4];
        checksum.copy_from_slice(&footer[64..68]);
        footer[64..68].fill(0);
        let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
        assert_eq!(u32::from_be_bytes(checksum), !sum);
        assert!(settle_vmdk(&file, Seed::of(&[b"x"])).is_err(), "no VMDK");
    }
}
