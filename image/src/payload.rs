//! The payload of an installer: a disk image without its zeros, each part with its digest.
//!
//! An image is for the most part holes, and an installer reads from slow media. So the payload is a list of *extents*,
//! the parts of the disk that are not zeros, followed by their bytes; the rest of the disk is to be zeros. All numbers
//! are little-endian:
//!
//! ```text
//! 0     8   "HEARTHPL"
//! 8     4   version of this format: 1
//! 12    4   size of the disk's sectors in bytes
//! 16    8   size of the disk image in bytes
//! 24    4   number of extents
//! 28    4   0
//! 32    48  for each extent, in ascending order: offset and length in bytes, SHA-256 of its bytes
//!       32  SHA-256 of all that is before: the identity of the payload
//!           zeros up to a multiple of 4096, then the bytes of all extents, one after the other
//! ```
//!
//! Extents begin and end at multiples of 4096, and none crosses a multiple of 1 MiB: that is what an installer holds in
//! memory and checks before it writes it. The node has the decoder; the two crates do not depend on each other, and a
//! test of the node's reads what is written here.
//!
//! The result depends on the image's bytes only, not on where its file has holes.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use ring::digest::{SHA256, digest};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::output::{Output, OutputError};
use crate::sector::SectorSize;

const MAGIC: &[u8; 8] = b"HEARTHPL";
const VERSION: u32 = 1;
/// What begins and ends an extent.
const BLOCK: usize = 4096;
/// What no extent crosses.
const PIECE: usize = 1 << 20;

/// Why a payload could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Documented by the messages.
pub enum PayloadError {
    #[error("cannot {step} the image {}", path.display())]
    Image {
        step: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("the image {}: expected whole blocks of {BLOCK} bytes, got {size} bytes", path.display())]
    Size { path: PathBuf, size: u64 },
    #[error("cannot write the payload")]
    Write(#[source] io::Error),
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// A part of an image, in bytes.
struct Extent {
    offset: u64,
    length: usize,
    digest: [u8; 32],
}

/// Writes the payload of a raw image to `destination`, which appears when it is complete. Returns its identity.
pub fn write(
    image: &Path,
    sector_size: SectorSize,
    destination: &Path,
) -> Result<[u8; 32], PayloadError> {
    let failed = |step| {
        let path = image.to_owned();
        move |source| PayloadError::Image { step, path, source }
    };
    let file = File::open(image).map_err(failed("open"))?;
    let size = file.metadata().map_err(failed("read"))?.len();
    if size == 0 || !size.is_multiple_of(BLOCK as u64) {
        let path = image.to_owned();
        return Err(PayloadError::Size { path, size });
    }
    let extents = extents(&file, size).map_err(failed("read"))?;
    let header = header(size, sector_size, &extents);
    let identity = sha256(&header);
    let mut front = header;
    front.extend(identity);
    front.resize(front.len().next_multiple_of(BLOCK), 0);
    let mut output = Output::create(destination)?;
    let out = output.file();
    out.write_all(&front).map_err(PayloadError::Write)?;
    let mut buffer = vec![0; PIECE];
    for extent in &extents {
        let bytes = &mut buffer[..extent.length];
        file.read_exact_at(bytes, extent.offset)
            .map_err(failed("read"))?;
        if sha256(bytes) != extent.digest {
            return Err(failed("read")(io::Error::other(
                "it changed while it was read",
            )));
        }
        out.write_all(bytes).map_err(PayloadError::Write)?;
    }
    output.publish()?;
    Ok(identity)
}

fn header(size: u64, sector_size: SectorSize, extents: &[Extent]) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((sector_size.bytes() as u32).to_le_bytes());
    header.extend(size.to_le_bytes());
    header.extend((extents.len() as u32).to_le_bytes());
    header.extend([0; 4]);
    for extent in extents {
        header.extend(extent.offset.to_le_bytes());
        header.extend((extent.length as u64).to_le_bytes());
        header.extend(extent.digest);
    }
    header
}

fn extents(file: &File, size: u64) -> io::Result<Vec<Extent>> {
    let mut extents = Vec::new();
    let mut buffer = vec![0; PIECE];
    let mut at = next_data(file, 0, size)?;
    while at < size {
        let piece = &mut buffer[..(size - at).min(PIECE as u64) as usize];
        file.read_exact_at(piece, at)?;
        let mut from = 0;
        while let Some((start, length)) = next_run(piece, from) {
            extents.push(Extent {
                offset: at + start as u64,
                length,
                digest: sha256(&piece[start..start + length]),
            });
            from = start + length;
        }
        at = next_data(file, at + PIECE as u64, size)?;
    }
    Ok(extents)
}

/// The next piece that is not in a hole of the file, or the file's end.
fn next_data(file: &File, at: u64, size: u64) -> io::Result<u64> {
    if at >= size {
        return Ok(size);
    }
    match seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok(data - data % PIECE as u64),
        Err(Errno::NXIO) => Ok(size),
        // A file system that knows of no holes.
        Err(Errno::INVAL) => Ok(at),
        Err(error) => Err(error.into()),
    }
}

/// Start and length of the next blocks that follow each other and are not zeros.
fn next_run(piece: &[u8], from: usize) -> Option<(usize, usize)> {
    let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
    let mut blocks = piece[from..].chunks(BLOCK);
    let skipped = blocks.position(|block| !is_zero(block))?;
    let start = from + skipped * BLOCK;
    let rest = piece[start..].chunks(BLOCK);
    let count = rest.take_while(|block| !is_zero(block)).count();
    Some((start, (count * BLOCK).min(piece.len() - start)))
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut array = [0; 32];
    array.copy_from_slice(digest(&SHA256, bytes).as_ref());
    array
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_what_is_not_zero_is_in_it_wherever_the_file_has_holes() {
        let folder = tempfile::tempdir().unwrap();
        let (image, out) = (folder.path().join("image"), folder.path().join("payload"));
        let file = File::create_new(&image).unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_all_at(&[1; 100], 8192).unwrap();
        file.write_all_at(&[2; BLOCK * 2], (2 << 20) - BLOCK as u64)
            .unwrap();
        let first = write(&image, SectorSize::B512, &out).unwrap();
        let sparse = fs::read(&out).unwrap();
        // Two extents beside the border of a piece.
        assert_eq!(sparse[24..28], 3_u32.to_le_bytes());
        assert_eq!(sparse.len(), BLOCK + 3 * BLOCK);
        assert_eq!(sparse[BLOCK..][..100], [1; 100]);
        // The same bytes without a hole.
        let bytes = fs::read(&image).unwrap();
        fs::write(&image, bytes).unwrap();
        assert_eq!(write(&image, SectorSize::B512, &out).unwrap(), first);
        assert_eq!(fs::read(&out).unwrap(), sparse);
        assert_ne!(write(&image, SectorSize::B4096, &out).unwrap(), first);

        file.set_len(1000).unwrap();
        fs::write(&image, [1; 1000]).unwrap();
        let error = write(&image, SectorSize::B512, &out).unwrap_err();
        assert!(error.to_string().contains("got 1000 bytes"), "{error}");
    }
}
