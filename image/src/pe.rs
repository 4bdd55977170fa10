//! Appends sections to a PE32+ executable.
//!
//! A unified kernel image is an EFI stub with a few more sections. That takes more rows in the section table, the data
//! after the file's end, and four numbers in the headers. objcopy would be a dependency on the host, needs each
//! section's address computed for it, and silently accepts overlapping sections.
//!
//! The stub is external input, so every number in it is checked before it is used; its own sections are not moved or
//! changed. All reads by offset go through `Bytes`, so a malformed file cannot cause a panic.

/// Why sections could not be appended. Offsets and sizes are bytes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)] // Documented by the messages.
pub enum PeError {
    #[error("the stub is truncated at {length} bytes, inside its {part}")]
    Truncated { part: &'static str, length: usize },
    #[error(
        "the stub is not a PE32+ program for x86-64: {field}: expected {wanted:#x}, got {found:#x}"
    )]
    NotX64 {
        field: &'static str,
        found: u64,
        wanted: u64,
    },
    #[error("the stub's {field}: expected a power of two from 512 to 65536, got {found:#x}")]
    Alignment { field: &'static str, found: u32 },
    #[error("the stub's section {name} and {other} overlap")]
    Overlap { name: String, other: String },
    #[error("expected an unsigned stub: adding sections would break its signature")]
    Signed,
    #[error("the stub's headers have space for {room} more sections, but {wanted} are needed")]
    NoRoom { room: usize, wanted: usize },
    #[error("the stub's headers have data after the section table")]
    RoomInUse,
    #[error("section name: expected 1 to 8 ASCII characters, got {0:?}")]
    Name(String),
    #[error("duplicate section {0}")]
    Duplicate(String),
    #[error("section {0} is empty")]
    Empty(String),
    #[error("the program would grow beyond 2 GiB with section {0}")]
    TooLarge(String),
}

/// A section to append: read-only initialised data.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    /// Name including its dot, at most 8 bytes.
    pub name: &'a str,
    /// Content; not empty.
    pub data: &'a [u8],
}

const ROW: usize = 40;
/// New sections start at pages even if the stub has a smaller alignment: their content is mapped or passed on as a
/// whole.
const PAGE: u32 = 4096;
/// IMAGE_SCN_CNT_INITIALIZED_DATA | IMAGE_SCN_MEM_READ
const READ_ONLY_DATA: u32 = 0x4000_0040;
/// Far larger than any image; sums of two numbers below it cannot overflow.
const LARGEST: u64 = 1 << 31;

/// Returns `stub` with `sections` appended in the order given, and a correct checksum.
pub fn append_sections(stub: &[u8], sections: &[Section<'_>]) -> Result<Vec<u8>, PeError> {
    let headers = Headers::parse(stub)?;
    let first_row = headers.room_for(stub, sections.len())?;
    let mut image = Vec::with_capacity(
        stub.len() + sections.iter().map(|s| s.data.len() + 65536).sum::<usize>(),
    );
    image.extend_from_slice(stub);
    let mut names: Vec<String> = headers.sections.iter().map(|s| s.name.clone()).collect();
    let mut address = headers
        .sections
        .iter()
        .map(|s| s.address + s.loaded())
        .max()
        .unwrap_or(0);
    address = address.max(u64::from(headers.size_of_headers));
    let mut data_size = u64::from(headers.size_of_initialized_data);

    for (index, section) in sections.iter().enumerate() {
        let name = section.name.to_owned();
        if name.is_empty() || name.len() > 8 || !name.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(PeError::Name(name));
        }
        if names.contains(&name) {
            return Err(PeError::Duplicate(name));
        }
        if section.data.is_empty() {
            return Err(PeError::Empty(name));
        }
        address = address.next_multiple_of(u64::from(headers.section_alignment.max(PAGE)));
        let offset = (image.len() as u64).next_multiple_of(u64::from(headers.file_alignment));
        let length = section.data.len() as u64;
        let stored = length.next_multiple_of(u64::from(headers.file_alignment));
        let too_large = || PeError::TooLarge(name.clone());
        let below_limit = |n: u64| {
            u32::try_from(n)
                .ok()
                .filter(|_| n < LARGEST)
                .ok_or_else(too_large)
        };
        data_size += stored;
        let (raw_end, _) = (below_limit(offset + stored)?, below_limit(data_size)?);

        let mut row = [0u8; ROW];
        row[..name.len()].copy_from_slice(name.as_bytes());
        row[8..12].copy_from_slice(&below_limit(length)?.to_le_bytes());
        row[12..16].copy_from_slice(&below_limit(address)?.to_le_bytes());
        row[16..20].copy_from_slice(&below_limit(stored)?.to_le_bytes());
        row[20..24].copy_from_slice(&below_limit(offset)?.to_le_bytes());
        row[36..40].copy_from_slice(&READ_ONLY_DATA.to_le_bytes());
        let at = first_row + index * ROW;
        image[at..at + ROW].copy_from_slice(&row);

        image.resize(offset as usize, 0);
        image.extend_from_slice(section.data);
        image.resize(raw_end as usize, 0);
        address += length;
        below_limit(address)?;
        names.push(name);
    }

    let optional = headers.optional;
    let size_of_image = address.next_multiple_of(u64::from(headers.section_alignment)) as u32;
    put(
        &mut image,
        headers.coff + 2,
        &(names.len() as u16).to_le_bytes(),
    );
    put(&mut image, optional + 8, &(data_size as u32).to_le_bytes());
    put(&mut image, optional + 56, &size_of_image.to_le_bytes());
    let checksum = checksum(&image, optional + 64);
    put(&mut image, optional + 64, &checksum.to_le_bytes());
    Ok(image)
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Checked little-endian reads.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn at<const N: usize>(&self, offset: usize, part: &'static str) -> Result<[u8; N], PeError> {
        offset
            .checked_add(N)
            .and_then(|end| self.0.get(offset..end))
            .and_then(|slice| slice.try_into().ok())
            .ok_or(PeError::Truncated {
                part,
                length: self.0.len(),
            })
    }
    fn u16(&self, offset: usize, part: &'static str) -> Result<u16, PeError> {
        self.at(offset, part).map(u16::from_le_bytes)
    }
    fn u32(&self, offset: usize, part: &'static str) -> Result<u32, PeError> {
        self.at(offset, part).map(u32::from_le_bytes)
    }
}

struct Existing {
    name: String,
    address: u64,
    virtual_size: u64,
    offset: u64,
    stored: u64,
}

impl Existing {
    /// Bytes of address space that the loader fills: the virtual size, or the stored size if that is zero.
    fn loaded(&self) -> u64 {
        if self.virtual_size == 0 {
            self.stored
        } else {
            self.virtual_size
        }
    }
}

struct Headers {
    coff: usize,
    optional: usize,
    table: usize,
    section_alignment: u32,
    file_alignment: u32,
    size_of_headers: u32,
    size_of_initialized_data: u32,
    sections: Vec<Existing>,
}

impl Headers {
    fn parse(stub: &[u8]) -> Result<Headers, PeError> {
        let bytes = Bytes(stub);
        let expect = |field, found: u64, wanted: u64| {
            if found == wanted {
                Ok(())
            } else {
                Err(PeError::NotX64 {
                    field,
                    found,
                    wanted,
                })
            }
        };
        expect(
            "the DOS signature",
            bytes.u16(0, "DOS header")?.into(),
            0x5a4d,
        )?;
        let pe = bytes.u32(0x3c, "DOS header")? as usize;
        expect(
            "the PE signature",
            bytes.u32(pe, "PE header")?.into(),
            0x4550,
        )?;
        // Required by the format; the checksum, which is summed in words, relies on it.
        expect("the PE header's offset modulo 8", pe as u64 % 8, 0)?;
        let coff = pe + 4;
        expect("Machine", bytes.u16(coff, "COFF header")?.into(), 0x8664)?;
        let count = usize::from(bytes.u16(coff + 2, "COFF header")?);
        let optional_size = usize::from(bytes.u16(coff + 16, "COFF header")?);
        let optional = coff + 20;
        let part = "optional header";
        if optional_size < 112 {
            return Err(PeError::Truncated {
                part,
                length: stub.len(),
            });
        }
        expect(
            "the optional header's magic",
            bytes.u16(optional, part)?.into(),
            0x20b,
        )?;
        // Up to and including the certificate directory.
        let directories = bytes.u32(optional + 108, part)?;
        if directories >= 5 && bytes.u32(optional + 112 + 4 * 8 + 4, part)? != 0 {
            return Err(PeError::Signed);
        }
        let alignment = |field, offset| {
            let found = bytes.u32(optional + offset, part)?;
            if found.is_power_of_two() && (512..=65536).contains(&found) {
                Ok(found)
            } else {
                Err(PeError::Alignment { field, found })
            }
        };
        let table = optional + optional_size;
        let headers = Headers {
            coff,
            optional,
            table,
            section_alignment: alignment("SectionAlignment", 32)?,
            file_alignment: alignment("FileAlignment", 36)?,
            size_of_headers: bytes.u32(optional + 60, part)?,
            size_of_initialized_data: bytes.u32(optional + 8, part)?,
            sections: (0..count)
                .map(|index| parse_row(&bytes, table + index * ROW))
                .collect::<Result<_, _>>()?,
        };
        headers.check(stub.len())?;
        Ok(headers)
    }

    /// Checks the stub's own sections: appending to a broken stub would only hide the fault.
    fn check(&self, length: usize) -> Result<(), PeError> {
        if self.size_of_headers as usize > length {
            return Err(PeError::Truncated {
                part: "headers",
                length,
            });
        }
        for section in &self.sections {
            if section.offset + section.stored > length as u64 {
                return Err(PeError::Truncated {
                    part: "sections",
                    length,
                });
            }
            if section.address + section.loaded() >= LARGEST {
                return Err(PeError::TooLarge(section.name.clone()));
            }
        }
        let in_memory = |s: &Existing| (s.address, s.loaded());
        let in_file = |s: &Existing| (s.offset, s.stored);
        let headers = u64::from(self.size_of_headers);
        check_overlap(&self.sections, headers, in_memory)?;
        check_overlap(&self.sections, headers, in_file)
    }

    /// The offset of the first new row, if `wanted` of them fit before the headers' end and the first section's data.
    fn room_for(&self, stub: &[u8], wanted: usize) -> Result<usize, PeError> {
        let first_row = self.table + self.sections.len() * ROW;
        let data = self
            .sections
            .iter()
            .filter(|s| s.stored > 0)
            .map(|s| s.offset as usize);
        let end = data
            .min()
            .unwrap_or(usize::MAX)
            .min(self.size_of_headers as usize);
        let room = end.saturating_sub(first_row) / ROW;
        if room < wanted || self.sections.len() + wanted > usize::from(u16::MAX) {
            return Err(PeError::NoRoom { room, wanted });
        }
        if stub[first_row..first_row + wanted * ROW]
            .iter()
            .any(|&b| b != 0)
        {
            return Err(PeError::RoomInUse);
        }
        Ok(first_row)
    }
}

fn parse_row(bytes: &Bytes<'_>, row: usize) -> Result<Existing, PeError> {
    let part = "section table";
    let name: [u8; 8] = bytes.at(row, part)?;
    let number = |offset| bytes.u32(row + offset, part).map(u64::from);
    Ok(Existing {
        name: String::from_utf8_lossy(&name)
            .trim_end_matches('\0')
            .to_owned(),
        virtual_size: number(8)?,
        address: number(12)?,
        stored: number(16)?,
        offset: number(20)?,
    })
}

/// Sections that take space must not overlap each other or the headers.
fn check_overlap(
    sections: &[Existing],
    headers: u64,
    range: impl Fn(&Existing) -> (u64, u64),
) -> Result<(), PeError> {
    let mut taken: Vec<(u64, u64, &str)> = vec![(0, headers, "the headers")];
    taken.extend(sections.iter().map(|s| {
        let (start, length) = range(s);
        (start, length, s.name.as_str())
    }));
    taken.retain(|(_, length, _)| *length > 0);
    taken.sort_by_key(|(start, ..)| *start);
    for pair in taken.windows(2) {
        if pair[0].0 + pair[0].1 > pair[1].0 {
            return Err(PeError::Overlap {
                name: pair[1].2.to_owned(),
                other: pair[0].2.to_owned(),
            });
        }
    }
    Ok(())
}

/// The PE checksum: the 16-bit one's complement sum of the file without the checksum field, plus the file's length.
fn checksum(image: &[u8], field: usize) -> u32 {
    let sum = |bytes: &[u8]| -> u64 {
        // In 32-bit words: with the end-around carry the final fold gives the same sum, in half the time.
        let words = bytes.chunks_exact(4);
        let mut tail = [0u8; 4];
        tail[..words.remainder().len()].copy_from_slice(words.remainder());
        let all: u64 = words
            .map(|w| u64::from(u32::from_le_bytes([w[0], w[1], w[2], w[3]])))
            .sum();
        all + u64::from(u32::from_le_bytes(tail))
    };
    // The field is at an even offset, as are all parts before it; the bytes around it are summed separately.
    let mut total = sum(&image[..field]) + sum(&image[field + 4..]);
    while total > 0xffff {
        total = (total >> 16) + (total & 0xffff);
    }
    total as u32 + image.len() as u32
}
