//! The on-disk format: its records as bytes. All numbers are little-endian.
//!
//! Offsets and names are those of the kernel's `fs/erofs/erofs_fs.h`.

/// Bytes of a block, and of the pages that the index counts.
pub(super) const BLOCK: u64 = 4096;
/// Bytes of a compact inode; inode numbers count in this unit.
pub(super) const INODE: u64 = 32;
/// Offset of the root directory's inode: the first slot after the super block and zstd's settings.
pub(super) const FIRST_INODE: u64 = (SETTINGS + 8).next_multiple_of(INODE);

/// Bytes of a file that are compressed together. The kernel accepts up to 12 MiB. For a Go program, half of this size
/// makes it 4 % larger; twice of it, 0.1 % smaller, and reading a single page costs more.
pub const CHUNK: u64 = 256 * 1024;

/// Content up to this length is stored inline, after its inode.
pub(super) const INLINE: u64 = 2048;

const SUPER_BLOCK: u64 = 1024;
const SUPER_BLOCK_SIZE: u64 = 128;
const SETTINGS: u64 = SUPER_BLOCK + SUPER_BLOCK_SIZE;
const MAGIC: u32 = 0xe0f5_e1e2;
/// Compact inodes take their modification time from the super block.
const COMPATIBLE_MTIME: u32 = 2;
/// Compressed data is aligned to the end of its last block; zeros precede it.
const INCOMPATIBLE_ZERO_PADDING: u32 = 1;
/// The compression settings follow the super block, and chunks may have several blocks.
const INCOMPATIBLE_SETTINGS: u32 = 2;
const ZSTD: u8 = 3;
/// The inode flag for chunks of several blocks.
const ADVICE_BIG_CHUNKS: u16 = 2;
/// In a chunk's second page, marks the number of blocks of the chunk.
const BLOCK_COUNT: u16 = 1 << 11;

/// The type of a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File = 1,
    Directory = 2,
    Symlink = 7,
}

/// The location of an inode's content.
#[derive(Debug, Clone, Copy)]
pub(super) enum Data {
    /// In consecutive blocks from this one on.
    Plain { first: u64 },
    /// Directly after the inode.
    Inline,
    /// In chunks; their index follows the inode.
    Compressed { blocks: u64 },
}

/// A compact inode.
#[derive(Debug)]
pub(super) struct Inode {
    pub(super) mode: u16,
    pub(super) links: u16,
    pub(super) size: u32,
    pub(super) number: u32,
    pub(super) data: Data,
}

impl Inode {
    /// Encodes the inode into `place`, which must be zero.
    pub(super) fn encode(&self, place: &mut [u8]) {
        let (layout, place_of_data) = match self.data {
            Data::Plain { first } => (0, first),
            Data::Compressed { blocks } => (1, blocks),
            Data::Inline => (2, 0),
        };
        put(place, 0, &u16::to_le_bytes(layout << 1));
        put(place, 4, &self.mode.to_le_bytes());
        put(place, 6, &self.links.to_le_bytes());
        put(place, 8, &self.size.to_le_bytes());
        // Both are numbers of blocks, which the plan keeps below 2^32.
        put(place, 16, &(place_of_data as u32).to_le_bytes());
        put(place, 20, &self.number.to_le_bytes());
    }
}

/// Writes the super block and zstd's settings into metadata that is zero there.
pub(super) fn super_block(
    metadata: &mut [u8],
    name: &str,
    uuid: [u8; 16],
    inodes: usize,
    blocks: u64,
) {
    let place = &mut metadata[SUPER_BLOCK as usize..];
    put(place, 0, &MAGIC.to_le_bytes());
    put(place, 8, &COMPATIBLE_MTIME.to_le_bytes());
    place[12] = BLOCK.trailing_zeros() as u8;
    put(place, 14, &((FIRST_INODE / INODE) as u16).to_le_bytes());
    put(place, 16, &(inodes as u64).to_le_bytes());
    put(place, 36, &(blocks as u32).to_le_bytes());
    put(place, 48, &uuid);
    let longest = (0..=15).rev().find(|end| name.is_char_boundary(*end));
    let name = name.get(..longest.unwrap_or(0)).unwrap_or(name);
    put(place, 64, name.as_bytes());
    let incompatible = INCOMPATIBLE_ZERO_PADDING | INCOMPATIBLE_SETTINGS;
    put(place, 80, &incompatible.to_le_bytes());
    put(place, 84, &(1_u16 << ZSTD).to_le_bytes());
    // Length of the settings; their format, 0; the logarithm of the window, at least 10 for zstd.
    let window = CHUNK.trailing_zeros() as u8 - 10;
    put(metadata, SETTINGS as usize, &[6, 0, 0, window, 0, 0, 0, 0]);
}

/// One entry for [`directory`].
#[derive(Debug)]
pub(super) struct DirectoryEntry<'a> {
    pub(super) name: &'a str,
    pub(super) kind: Kind,
    /// Offset of its inode in bytes.
    pub(super) inode: u64,
}

/// Bytes of a directory entry without its name.
const ENTRY: usize = 12;

/// A directory's bytes. The entries, which include `.` and `..`, are sorted by name.
///
/// Every block is independent: its entries, followed by their names.
pub(super) fn directory<'a>(entries: impl Iterator<Item = DirectoryEntry<'a>>) -> Vec<u8> {
    let entries: Vec<_> = entries.collect();
    let mut bytes = Vec::new();
    for block in directory_blocks(entries.iter().map(|entry| entry.name.len())) {
        bytes.resize(bytes.len().next_multiple_of(BLOCK as usize), 0);
        let mut name_at = block.len() * ENTRY;
        for entry in &entries[block.clone()] {
            bytes.extend((entry.inode / INODE).to_le_bytes());
            // Below the block size.
            bytes.extend((name_at as u16).to_le_bytes());
            bytes.extend([entry.kind as u8, 0]);
            name_at += entry.name.len();
        }
        for entry in &entries[block] {
            bytes.extend(entry.name.as_bytes());
        }
    }
    bytes
}

/// Length in bytes of a directory whose names have these lengths.
pub(super) fn directory_length(names: impl Iterator<Item = usize>) -> u64 {
    let names: Vec<_> = names.collect();
    let blocks = directory_blocks(names.iter().copied());
    let last = blocks.last().cloned().unwrap_or_default();
    let used: usize = names[last].iter().map(|name| ENTRY + name).sum();
    (blocks.len() as u64).saturating_sub(1) * BLOCK + used as u64
}

/// The entries of each block.
fn directory_blocks(names: impl Iterator<Item = usize>) -> Vec<std::ops::Range<usize>> {
    let mut blocks: Vec<std::ops::Range<usize>> = Vec::new();
    let mut used = 0;
    for (number, name) in names.enumerate() {
        let needed = ENTRY + name;
        match blocks.last_mut() {
            Some(block) if used + needed <= BLOCK as usize => {
                block.end += 1;
                used += needed;
            }
            _ => {
                blocks.push(number..number + 1);
                used = needed;
            }
        }
    }
    blocks
}

/// How one chunk of a compressed file is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placed {
    /// Compressed, in this many blocks.
    Compressed { blocks: u16 },
    /// Uncompressed.
    Stored,
}

/// Length in bytes of a compressed file's index.
pub(super) fn index_length(length: u64) -> u64 {
    16 + length.div_ceil(BLOCK) * 8
}

/// A compressed file's index: a header of 8 bytes, 8 unused bytes, and 8 for each page of the file.
///
/// A page is either the head of a chunk, with the chunk's first block, or has its distances from the head before it and
/// the head after it. A chunk's second page has the chunk's number of blocks in place of the first distance. A chunk
/// that is stored uncompressed has a head for each of its pages.
pub(super) fn index(first: u64, length: u64, chunks: impl Iterator<Item = Placed>) -> Vec<u8> {
    const HEAD_PLAIN: u16 = 0;
    const HEAD: u16 = 1;
    const NO_HEAD: u16 = 2;
    let mut bytes = Vec::with_capacity(index_length(length) as usize);
    bytes.extend([0; 4]);
    bytes.extend(ADVICE_BIG_CHUNKS.to_le_bytes());
    bytes.extend([ZSTD, 0]);
    bytes.extend([0; 8]);
    let head = |bytes: &mut Vec<u8>, kind: u16, block: u64| {
        bytes.extend(kind.to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend((block as u32).to_le_bytes());
    };
    let mut block = first;
    let mut left = length;
    for chunk in chunks {
        let in_chunk = left.min(CHUNK);
        // A chunk has at most 64 pages.
        let pages = in_chunk.div_ceil(BLOCK) as u16;
        left -= in_chunk;
        match chunk {
            Placed::Stored => {
                for page in 0..u64::from(pages) {
                    head(&mut bytes, HEAD_PLAIN, block + page);
                }
                block += u64::from(pages);
            }
            Placed::Compressed { blocks } => {
                head(&mut bytes, HEAD, block);
                for page in 1..pages {
                    let back = if page == 1 {
                        BLOCK_COUNT | blocks
                    } else {
                        page
                    };
                    bytes.extend(NO_HEAD.to_le_bytes());
                    bytes.extend([0; 2]);
                    bytes.extend(back.to_le_bytes());
                    bytes.extend((pages - page).to_le_bytes());
                }
                block += u64::from(blocks);
            }
        }
    }
    bytes
}

fn put(place: &mut [u8], at: usize, bytes: &[u8]) {
    place[at..at + bytes.len()].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_fills_blocks_one_by_one() {
        let names: Vec<String> = (0..300).map(|n| format!("entry-{n:04}")).collect();
        let entries = names.iter().map(|name| DirectoryEntry {
            name,
            kind: Kind::File,
            inode: 64,
        });
        let bytes = directory(entries);
        let lengths = names.iter().map(String::len);
        assert_eq!(bytes.len() as u64, directory_length(lengths));
        // 186 of 22 bytes are 4092.
        let first_name = u16::from_le_bytes([bytes[8], bytes[9]]);
        assert_eq!(usize::from(first_name), 186 * ENTRY);
        assert_eq!(bytes[4092..4096], [0; 4]);
        assert_eq!(bytes[4096..4104], 2_u64.to_le_bytes());
    }

    #[test]
    fn an_index_counts_pages_back_and_forth() {
        let chunks = [Placed::Compressed { blocks: 5 }, Placed::Stored];
        let length = CHUNK + BLOCK + 1;
        let bytes = index(7, length, chunks.into_iter());
        assert_eq!(bytes.len() as u64, index_length(length));
        let page = |n: usize| &bytes[16 + 8 * n..24 + 8 * n];
        assert_eq!(page(0), [1, 0, 0, 0, 7, 0, 0, 0]);
        let pages = (CHUNK / BLOCK) as u8;
        assert_eq!(page(1), [2, 0, 0, 0, 5, 8, pages - 1, 0]);
        assert_eq!(page(2), [2, 0, 0, 0, 2, 0, pages - 2, 0]);
        assert_eq!(page(pages.into()), [0, 0, 0, 0, 12, 0, 0, 0]);
        assert_eq!(page(usize::from(pages) + 1), [0, 0, 0, 0, 13, 0, 0, 0]);
    }
}
