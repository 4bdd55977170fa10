//! The Authenticode digest of a PE32+ program: what UEFI firmware measures when it loads one.
//!
//! It covers the file except the checksum, the entry for the certificate table and the certificates, so it is the same
//! before and after a signature for Secure Boot is added. Tools that sign pad the file to a multiple of eight bytes for
//! the digest; the firmware (TianoCore's DxeTpm2MeasureBootLib) measures what it got, and so does this module. `goblin`
//! pads, and indexes by the file's own numbers without a check.

use hearth_tpm::Digest;
use ring::digest::{Context, SHA256};

/// Why a file has no digest. Offsets and sizes are bytes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)] // Documented by the messages.
pub enum AuthenticodeError {
    #[error("truncated at {length} bytes, inside its {part}")]
    Truncated { part: &'static str, length: usize },
    #[error("{field}: expected {expected:#x}, got {got:#x}")]
    NotPe {
        field: &'static str,
        expected: u32,
        got: u32,
    },
    #[error("certificate table: expected at most {room} bytes, got {size}")]
    Certificates { room: usize, size: usize },
}

/// The digest of `program`.
pub fn sha256(program: &[u8]) -> Result<Digest, AuthenticodeError> {
    let file = File(program);
    let pe = file.headers()?;
    let optional = pe + 24;
    let headers = file.u32(optional + 60, "optional header")? as usize;
    let checksum = optional + 64;
    let has_certificates = file.u32(optional + 108, "optional header")? > 4;
    let entry = optional + 144;

    let mut hash = Context::new(&SHA256);
    let part = "headers";
    hash.update(file.range(0, checksum, part)?);
    let certificates = if has_certificates {
        hash.update(file.range(checksum + 4, entry, part)?);
        hash.update(file.range(entry + 8, headers, part)?);
        file.u32(entry + 4, part)? as usize
    } else {
        hash.update(file.range(checksum + 4, headers, part)?);
        0
    };
    let mut hashed = headers;
    for (start, length) in file.sections(pe)? {
        hash.update(file.range(start, start + length, "sections")?);
        hashed += length;
    }
    if program.len() > hashed {
        let room = program.len() - hashed;
        if certificates > room {
            return Err(AuthenticodeError::Certificates {
                room,
                size: certificates,
            });
        }
        hash.update(&program[hashed..program.len() - certificates]);
    }
    let mut digest = [0; 32];
    digest.copy_from_slice(hash.finish().as_ref());
    Ok(Digest(digest))
}

/// A file, with checked reads.
struct File<'a>(&'a [u8]);

impl<'a> File<'a> {
    fn range(
        &self,
        start: usize,
        end: usize,
        part: &'static str,
    ) -> Result<&'a [u8], AuthenticodeError> {
        self.0.get(start..end).ok_or(AuthenticodeError::Truncated {
            part,
            length: self.0.len(),
        })
    }

    fn u16(&self, at: usize, part: &'static str) -> Result<u16, AuthenticodeError> {
        let bytes = self.range(at, at + 2, part)?;
        Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    fn u32(&self, at: usize, part: &'static str) -> Result<u32, AuthenticodeError> {
        let (low, high) = (self.u16(at, part)?, self.u16(at + 2, part)?);
        Ok(u32::from(high) << 16 | u32::from(low))
    }

    /// Offset of the PE header, after the checks that there is one and that its offsets are those of PE32+.
    fn headers(&self) -> Result<usize, AuthenticodeError> {
        let expect = |field, expected, got| match expected == got {
            true => Ok(()),
            false => Err(AuthenticodeError::NotPe {
                field,
                expected,
                got,
            }),
        };
        expect(
            "the DOS signature",
            0x5a4d,
            self.u16(0, "DOS header")?.into(),
        )?;
        let pe = self.u32(0x3c, "DOS header")? as usize;
        expect("the PE signature", 0x4550, self.u32(pe, "PE header")?)?;
        let magic = self.u16(pe + 24, "optional header")?;
        expect("the optional header's magic", 0x20b, magic.into())?;
        Ok(pe)
    }

    /// Offset and length of the data of each section that has some, in the order of the file.
    fn sections(&self, pe: usize) -> Result<Vec<(usize, usize)>, AuthenticodeError> {
        let count = usize::from(self.u16(pe + 6, "COFF header")?);
        let table = pe + 24 + usize::from(self.u16(pe + 20, "COFF header")?);
        let mut sections = Vec::with_capacity(count);
        for row in (0..count).map(|index| table + index * 40) {
            let length = self.u32(row + 16, "section table")? as usize;
            let start = self.u32(row + 20, "section table")? as usize;
            if length > 0 {
                sections.push((start, length));
            }
        }
        sections.sort_unstable();
        Ok(sections)
    }
}
