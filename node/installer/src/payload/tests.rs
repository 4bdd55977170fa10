//! Payloads as the image builder writes them, and what is none.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use hearth_image::sector::SectorSize;
use proptest::prelude::*;

use super::*;

/// A payload of an image of 4 MiB with three extents, and the image.
fn payload() -> (Vec<u8>, Vec<u8>, [u8; 32]) {
    let folder = tempfile::tempdir().unwrap();
    let (image, path) = (folder.path().join("image"), folder.path().join("payload"));
    let file = File::create_new(&image).unwrap();
    file.set_len(4 * PIECE).unwrap();
    for (at, byte) in [(0, 1), (PIECE + BLOCK, 2), (4 * PIECE - BLOCK, 3)] {
        file.write_all_at(&[byte; BLOCK as usize], at).unwrap();
    }
    let identity = hearth_image::payload::write(&image, SectorSize::B512, &path).unwrap();
    (fs::read(path).unwrap(), fs::read(image).unwrap(), identity)
}

#[test]
fn what_the_image_builder_writes_is_read() {
    let (bytes, image, identity) = payload();
    let mut reader = &bytes[..];
    let header = Header::read(&mut reader).unwrap();
    assert_eq!((header.sector_size, header.size), (512, 4 * PIECE));
    assert_eq!(header.identity, identity);
    assert_eq!(header.length(), 3 * BLOCK);
    let mut found = vec![0; image.len()];
    for extent in &header.extents {
        let content = read_extent(&mut reader, extent).unwrap();
        let range = extent.range();
        found[range.start as usize..range.end as usize].copy_from_slice(&content);
    }
    assert!(found == image && reader.is_empty());
    let holes = header.holes(PIECE..4 * PIECE);
    let expected = [PIECE..PIECE + BLOCK, PIECE + 2 * BLOCK..4 * PIECE - BLOCK];
    assert_eq!(holes, expected);
}

#[test]
fn every_damaged_byte_is_noticed() {
    let (bytes, ..) = payload();
    let list = FIXED + 3 * ENTRY + DIGEST;
    for at in 0..list {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        assert!(Header::read(&mut &damaged[..]).is_err(), "byte {at}");
    }
    let mut damaged = bytes.clone();
    damaged[BLOCK as usize] ^= 1;
    let mut reader = &damaged[..];
    let header = Header::read(&mut reader).unwrap();
    let error = read_extent(&mut reader, &header.extents[0]).unwrap_err();
    assert!(matches!(error, PayloadError::ExtentDigest { offset: 0 }));
    let short = Header::read(&mut &bytes[..list]).unwrap_err();
    assert!(matches!(short, PayloadError::Short), "{short}");
}

/// A header with these extents, whose digest is right.
fn with_extents(extents: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(512_u32.to_le_bytes());
    bytes.extend((4 * PIECE).to_le_bytes());
    bytes.extend((extents.len() as u32).to_le_bytes());
    bytes.extend([0; 4]);
    for (offset, length) in extents {
        bytes.extend(offset.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend([0; DIGEST]);
    }
    let identity = digest(&SHA256, &bytes);
    bytes.extend(identity.as_ref());
    bytes.resize(bytes.len().next_multiple_of(BLOCK as usize), 0);
    bytes
}

#[test]
fn extents_that_would_be_written_elsewhere_are_refused() {
    for (extents, what) in [
        (&[(1, BLOCK)][..], "whole blocks"),
        (&[(0, 0)], "whole blocks"),
        (&[(BLOCK, BLOCK), (0, BLOCK)], "ascending"),
        (&[(0, 2 * BLOCK), (BLOCK, BLOCK)], "ascending"),
        (&[(PIECE - BLOCK, 2 * BLOCK)], "within a piece"),
        (&[(BLOCK, u64::MAX - BLOCK + 1)], "within a piece"),
        (&[(4 * PIECE, BLOCK)], "within the image"),
        (&[(u64::MAX - BLOCK + 1, BLOCK)], "within the image"),
    ] {
        let bytes = with_extents(extents);
        let error = Header::read(&mut &bytes[..]).unwrap_err().to_string();
        assert!(error.contains(what), "{extents:?}: {error}");
    }
    let none = Header::read(&mut &with_extents(&[])[..]).unwrap_err();
    let expected = "number of extents: expected 1 to 65536, got 0";
    assert_eq!(none.to_string(), expected);
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(mut bytes: Vec<u8>, begins_right: bool) {
        if begins_right {
            bytes.splice(0..0, MAGIC.iter().copied().chain(VERSION.to_le_bytes()));
        }
        drop(Header::read(&mut &bytes[..]));
    }

    #[test]
    fn extents_are_within_the_image_or_refused(extents in proptest::collection::vec((0_u64..1100, 0_u64..300), 1..5)) {
        let extents: Vec<(u64, u64)> = extents.iter().map(|(a, b)| (a * BLOCK, b * BLOCK)).collect();
        let bytes = with_extents(&extents);
        if let Ok(header) = Header::read(&mut &bytes[..]) {
            let mut end = 0;
            for extent in &header.extents {
                prop_assert!(extent.offset >= end && extent.length <= PIECE);
                end = extent.range().end;
            }
            prop_assert!(end <= header.size);
            // Extents and holes together are the whole image.
            let holes: u64 = header.holes(0..header.size).iter().map(|hole| hole.end - hole.start).sum();
            prop_assert_eq!(holes + header.length(), header.size);
        }
    }
}
