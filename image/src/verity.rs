//! dm-verity: a hash tree after the data, so that one hash in a trusted place authenticates every block.
//!
//! Version 1 of the kernel's format, SHA-256 over blocks of 4096 bytes for data and hashes alike. There is no super
//! block (its content is passed with the root hash) and no salt: a salt prevents collisions from being reused for other
//! images, and none are known for SHA-256. Level by level, starting with the single block of the highest level, each
//! block is the hashes of the 128 blocks below it; the root hash is that of the first block.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ring::digest::{SHA256, digest};

/// Bytes of a data block and of a hash block.
pub const BLOCK: u64 = 4096;
/// Bytes of a hash.
const HASH: usize = 32;
/// Bytes per read.
const STRETCH: u64 = 1 << 20;

/// A root hash: SHA-256.
pub type RootHash = [u8; HASH];

/// Writes the hash tree of a file's first `blocks` blocks, at least one, directly after them; returns the root hash.
/// The file ends with the tree.
pub fn append(file: &mut File, blocks: u64) -> io::Result<RootHash> {
    if blocks == 0 {
        return Err(io::Error::other("expected at least one block, got none"));
    }
    let mut levels = vec![hash_data(file, blocks)?];
    loop {
        let hashes = levels.last().map_or(&[][..], Vec::as_slice);
        if hashes.len() <= HASH {
            break;
        }
        let above = fill(hashes)
            .chunks(BLOCK as usize)
            .flat_map(|block| digest(&SHA256, block).as_ref().to_vec())
            .collect();
        levels.push(above);
    }
    let mut root = [0; HASH];
    root.copy_from_slice(&levels.pop().unwrap_or_default());
    let mut at = blocks * BLOCK;
    for level in levels.iter().rev() {
        let level = fill(level);
        file.write_all_at(&level, at)?;
        at += level.len() as u64;
    }
    file.set_len(at)?;
    Ok(root)
}

/// The concatenated hashes of the data blocks.
fn hash_data(file: &File, blocks: u64) -> io::Result<Vec<u8>> {
    let mut hashes = Vec::with_capacity(blocks as usize * HASH);
    let mut stretch = vec![0; STRETCH as usize];
    let end = blocks * BLOCK;
    for start in (0..end).step_by(STRETCH as usize) {
        let stretch = &mut stretch[..(end - start).min(STRETCH) as usize];
        file.read_exact_at(stretch, start)?;
        for block in stretch.chunks(BLOCK as usize) {
            hashes.extend(digest(&SHA256, block).as_ref());
        }
    }
    Ok(hashes)
}

/// Pads to whole blocks with zeros.
fn fill(hashes: &[u8]) -> Vec<u8> {
    let mut filled = hashes.to_vec();
    filled.resize(hashes.len().next_multiple_of(BLOCK as usize), 0);
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same by definition: a block of the tree hashes 128 blocks below it.
    fn root_of(mut level: Vec<Vec<u8>>) -> Vec<u8> {
        loop {
            let hashes: Vec<Vec<u8>> = level
                .iter()
                .map(|block| digest(&SHA256, block).as_ref().to_vec())
                .collect();
            if let [one] = &hashes[..] {
                return one.clone();
            }
            level = hashes
                .chunks(128)
                .map(|hashes| {
                    let mut block = hashes.concat();
                    block.resize(4096, 0);
                    block
                })
                .collect();
        }
    }

    #[test]
    fn every_level_is_there_and_the_root_vouches_for_it() {
        for (blocks, tree_blocks) in [(1, 0), (2, 1), (128, 1), (129, 3), (16_385, 129 + 2 + 1)] {
            let mut file = tempfile::tempfile().unwrap();
            let data: Vec<Vec<u8>> = (0..blocks)
                .map(|n: u64| n.to_le_bytes().repeat(512))
                .collect();
            file.write_all_at(&data.concat(), 0).unwrap();
            let root = append(&mut file, blocks).unwrap();
            assert_eq!(root.to_vec(), root_of(data), "{blocks}");
            let length = file.metadata().unwrap().len();
            assert_eq!(length / 4096, blocks + tree_blocks, "{blocks}");
        }
    }

    #[test]
    fn nothing_cannot_be_protected() {
        let mut file = tempfile::tempfile().unwrap();
        assert!(append(&mut file, 0).is_err());
    }
}
