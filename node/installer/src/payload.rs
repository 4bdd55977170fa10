//! The decoder of a payload: a disk image without its zeros. `hearth_image::payload` has the format, and the encoder.
//!
//! A medium may be damaged or made by anybody, so nothing of it is believed: numbers are bounded before they are used, and
//! every part has a digest that is checked before it is written. The digest of the list is no signature: whoever can change
//! the medium can change both.

use std::io::{self, Read};
use std::ops::Range;

use ring::digest::{Context, SHA256, digest};

const MAGIC: &[u8; 8] = b"HEARTHPL";
const VERSION: u32 = 1;
/// What begins and ends an extent.
const BLOCK: u64 = 4096;
/// What no extent crosses.
pub const PIECE: u64 = 1 << 20;
/// More extents than an image of 64 GiB with whole pieces has.
const MOST_EXTENTS: u32 = 1 << 16;
/// Of the fixed part, of an extent, and of a digest.
const FIXED: usize = 32;
const ENTRY: usize = 48;
const DIGEST: usize = 32;
/// An image has a partition table at its begin and its end, and something between them.
const SMALLEST: u64 = 3 * PIECE;

/// Why a payload cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub enum PayloadError {
    #[error("cannot read it")]
    Read(#[from] io::Error),
    #[error("it ends early")]
    Short,
    #[error("{field}: expected {wanted}, got {found}")]
    Field {
        field: &'static str,
        wanted: String,
        found: String,
    },
    #[error("extent {number}: {what}")]
    Extent { number: usize, what: &'static str },
    #[error("the digest of its list of extents does not match: the medium is damaged")]
    Digest,
    #[error("the digest of the extent at {offset} does not match: the medium is damaged")]
    ExtentDigest { offset: u64 },
}

/// A part of the image that is not zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins in the image, in bytes.
    pub offset: u64,
    /// Its length in bytes, at most [`PIECE`].
    pub length: u64,
    /// SHA-256 of its bytes.
    pub digest: [u8; DIGEST],
}

impl Extent {
    /// Where it is in the image.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.length
    }

    /// Whether these are its bytes.
    pub fn is(&self, bytes: &[u8]) -> bool {
        digest(&SHA256, bytes).as_ref() == self.digest
    }
}

/// What is before the bytes of the extents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sectors of the disks that the image is for, in bytes.
    pub sector_size: u32,
    /// The size of the image in bytes.
    pub size: u64,
    /// In ascending order.
    pub extents: Vec<Extent>,
    /// The digest of all of the above.
    pub identity: [u8; DIGEST],
}

impl Header {
    /// Reads the header. Then the reader is where the bytes of the first extent begin.
    ///
    /// # Errors
    /// If it is not one, or is damaged.
    pub fn read(from: &mut impl Read) -> Result<Self, PayloadError> {
        let fixed = exactly(from, FIXED)?;
        let number = |at: usize| le(&fixed[at..at + 4]) as u32;
        if !fixed.starts_with(MAGIC) {
            return Err(field("signature", "HEARTHPL", "something else"));
        }
        if number(8) != VERSION {
            return Err(field("version", VERSION, number(8)));
        }
        let (sector_size, size, count) = (number(12), le(&fixed[16..24]), number(24));
        if ![512, 4096].contains(&sector_size) {
            return Err(field("sector size", "512 or 4096", sector_size));
        }
        if size < SMALLEST || !size.is_multiple_of(BLOCK) {
            let wanted = format!("whole blocks of {BLOCK} bytes, {SMALLEST} or more");
            return Err(field("image size", wanted, size));
        }
        if !(1..=MOST_EXTENTS).contains(&count) {
            let wanted = format!("1 to {MOST_EXTENTS}");
            return Err(field("number of extents", wanted, count));
        }
        let list = exactly(from, count as usize * ENTRY)?;
        let identity = exactly(from, DIGEST)?;
        let mut context = Context::new(&SHA256);
        context.update(&fixed);
        context.update(&list);
        if context.finish().as_ref() != identity {
            return Err(PayloadError::Digest);
        }
        let before = FIXED + list.len() + DIGEST;
        exactly(from, before.next_multiple_of(BLOCK as usize) - before)?;
        Ok(Self {
            sector_size,
            size,
            extents: extents(&list, size)?,
            identity: array(&identity),
        })
    }

    /// The number of bytes of all extents.
    pub fn length(&self) -> u64 {
        self.extents.iter().map(|extent| extent.length).sum()
    }

    /// What is zeros in a part of the image, in ascending order.
    pub fn holes(&self, within: Range<u64>) -> Vec<Range<u64>> {
        let mut holes = Vec::new();
        let mut at = within.start;
        for extent in &self.extents {
            let Range { start, end } = extent.range();
            if start >= within.end {
                break;
            }
            if start > at {
                holes.push(at..start);
            }
            at = at.max(end);
        }
        if at < within.end {
            holes.push(at..within.end);
        }
        holes
    }
}

/// Reads the bytes of an extent, and checks them.
///
/// # Errors
/// If they cannot be read, or are others.
pub fn read_extent(from: &mut impl Read, extent: &Extent) -> Result<Vec<u8>, PayloadError> {
    let bytes = exactly(from, extent.length as usize)?;
    match extent.is(&bytes) {
        true => Ok(bytes),
        false => Err(PayloadError::ExtentDigest {
            offset: extent.offset,
        }),
    }
}

fn extents(list: &[u8], size: u64) -> Result<Vec<Extent>, PayloadError> {
    let (entries, _) = list.as_chunks::<ENTRY>();
    let mut end = 0;
    let parse = |(number, entry): (usize, &[u8; ENTRY])| {
        let refused = |what| PayloadError::Extent { number, what };
        let (offset, length) = (le(&entry[..8]), le(&entry[8..16]));
        if !offset.is_multiple_of(BLOCK) || !length.is_multiple_of(BLOCK) || length == 0 {
            return Err(refused("expected whole blocks"));
        }
        if offset < end {
            return Err(refused("expected ascending extents that do not overlap"));
        }
        if length > PIECE || offset % PIECE > PIECE - length {
            return Err(refused("expected it within a piece of 1 MiB"));
        }
        // Below 2^64 by what was checked before.
        if length > size || offset > size - length {
            return Err(refused("expected it within the image"));
        }
        end = offset + length;
        Ok(Extent {
            offset,
            length,
            digest: array(&entry[16..]),
        })
    };
    entries.iter().enumerate().map(parse).collect()
}

/// Reads this many bytes. Allocates no more than there are.
fn exactly(from: &mut impl Read, length: usize) -> Result<Vec<u8>, PayloadError> {
    let mut bytes = Vec::new();
    from.take(length as u64).read_to_end(&mut bytes)?;
    match bytes.len() == length {
        true => Ok(bytes),
        false => Err(PayloadError::Short),
    }
}

fn field(field: &'static str, wanted: impl ToString, found: impl ToString) -> PayloadError {
    PayloadError::Field {
        field,
        wanted: wanted.to_string(),
        found: found.to_string(),
    }
}

/// A little-endian number of at most eight bytes.
fn le(bytes: &[u8]) -> u64 {
    let digits = bytes.iter().rev();
    digits.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn array(bytes: &[u8]) -> [u8; DIGEST] {
    let mut array = [0; DIGEST];
    array.copy_from_slice(&bytes[..DIGEST]);
    array
}

#[cfg(test)]
mod tests;
