//! Images that somebody has altered on a disk: the machine boots as before, but not what was built.
//!
//! The unified kernel image is changed in place, without any knowledge of its format: its parts stand in it as they were
//! made, and none changes its length.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use hearth_qemu::artifacts::Image;

/// The first bytes of a program, with those of the header that no kernel reads.
const ELF: [u8; 4] = *b"\x7fELF";
/// A byte of the header's padding.
const ELF_PADDING: usize = 15;

/// zstd's level for the altered initramfs. Higher than that of the image, so that it fits into its place.
const LEVEL: i32 = 15;

/// The unified kernel image with one other byte in a program of its initramfs.
///
/// # Errors
/// If a file cannot be read, or the altered initramfs does not fit.
pub fn initramfs(image: &Image) -> anyhow::Result<Vec<u8>> {
    let compressed = read(&image.initramfs)?;
    let mut archive = zstd::decode_all(&compressed[..]).context("cannot decompress")?;
    let program = position(&archive, &ELF).context("no program in the initramfs")?;
    archive[program + ELF_PADDING] ^= 1;
    let mut altered = zstd::encode_all(&archive[..], LEVEL)?;
    ensure!(
        altered.len() <= compressed.len(),
        "{} bytes instead of {}",
        altered.len(),
        compressed.len()
    );
    // The kernel passes over zeros between and after archives.
    altered.resize(compressed.len(), 0);
    replaced(read(&image.uki)?, &compressed, &altered)
}

/// The unified kernel image with `to` instead of `from` in its command line; both have the same length.
///
/// # Errors
/// If the image cannot be read, or has no such word.
pub fn command_line(image: &Image, from: &str, to: &str) -> anyhow::Result<Vec<u8>> {
    let altered = image.cmdline.replacen(from, to, 1);
    ensure!(altered != image.cmdline, "no {from:?} in {}", image.cmdline);
    replaced(
        read(&image.uki)?,
        image.cmdline.as_bytes(),
        altered.as_bytes(),
    )
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

fn replaced(mut bytes: Vec<u8>, from: &[u8], to: &[u8]) -> anyhow::Result<Vec<u8>> {
    ensure!(
        from.len() == to.len(),
        "{} bytes for {}",
        to.len(),
        from.len()
    );
    let at = position(&bytes, from).context("the image does not have this part")?;
    bytes[at..at + from.len()].copy_from_slice(to);
    Ok(bytes)
}

fn position(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes
        .windows(wanted.len())
        .position(|window| window == wanted)
}
