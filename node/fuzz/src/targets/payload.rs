//! The header of an installer's payload, on a medium that anybody may have made.

use hearth_installer::payload::{Header, PIECE};
use ring::digest::{SHA256, digest};

use crate::parts::Parts;
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "payload",
    // As much as it reads at once, and the list once more.
    allocates: 64 << 10,
    check,
    seeds,
};

/// The digest is corrected.
const CORRECT: u8 = 1;
const FIXED: usize = 32;
const ENTRY: usize = 48;
const BLOCK: usize = 4096;

fn check(input: &[u8]) {
    let mut parts = Parts::of(input);
    let flags = parts.byte();
    let mut bytes = parts.rest().to_vec();
    if flags & CORRECT != 0 {
        correct(&mut bytes);
    }
    let Ok(header) = Header::read(&mut &bytes[..]) else {
        return;
    };
    let mut end = 0;
    for extent in &header.extents {
        assert!(extent.offset >= end && (1..=PIECE).contains(&extent.length));
        end = extent.range().end;
    }
    assert!(end <= header.size, "{end} of {}", header.size);
    let holes = header.holes(0..header.size).into_iter();
    let holes: u64 = holes.map(|hole| hole.end - hole.start).sum();
    assert_eq!(holes + header.length(), header.size);
}

/// Puts the right digest behind the list, and what follows it.
fn correct(bytes: &mut Vec<u8>) {
    let Some(count) = bytes.get(24..28) else {
        return;
    };
    let count = count
        .iter()
        .rev()
        .fold(0, |all, byte| all << 8 | usize::from(*byte));
    let end = FIXED + count.saturating_mul(ENTRY);
    if end > bytes.len() {
        return;
    }
    bytes.truncate(end);
    let identity = digest(&SHA256, bytes);
    bytes.extend(identity.as_ref());
    bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
}

fn seeds() -> Seeds {
    let header = |extents: &[(u64, u64)]| {
        let mut bytes = vec![CORRECT];
        bytes.extend(b"HEARTHPL");
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(512_u32.to_le_bytes());
        bytes.extend((4 * PIECE).to_le_bytes());
        bytes.extend((extents.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        for (offset, length) in extents {
            bytes.extend(offset.to_le_bytes());
            bytes.extend(length.to_le_bytes());
            bytes.extend([0; 32]);
        }
        bytes
    };
    vec![
        ("one", header(&[(0, PIECE)])),
        (
            "three",
            header(&[(0, 8192), (PIECE, 4096), (4 * PIECE - 4096, 4096)]),
        ),
        ("beyond", header(&[(4 * PIECE, 4096)])),
    ]
}
