//! The two slots of a small state: what is loaded, repaired, saved over it and erased.

use std::io;

use hearth_sys::slots::{
    HEADER_LEN, Loaded, MAX_PAYLOAD, SlotError, SlotFormat, SlotPair, SlotStore, encode,
};

use crate::parts::{Parts, sized};
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "slots",
    allocates: 64 << 10,
    check,
    seeds,
};

const FORMATS: &[SlotFormat] = &[
    SlotFormat {
        magic: *b"FUZZED-A",
        version: 1,
    },
    SlotFormat {
        magic: *b"FUZZED-B",
        version: 1,
    },
];

const A_IS_ABSENT: u8 = 1;
const B_IS_ABSENT: u8 = 2;
const CORRECT_A: u8 = 4;
const CORRECT_B: u8 = 8;
const NOT_OURS_ALONE: u8 = 16;

/// A slot in memory.
struct Memory {
    content: Option<Vec<u8>>,
    is_ours_alone: bool,
}

impl SlotStore for Memory {
    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.content.clone())
    }
    fn write_sync(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.content = Some(bytes.to_vec());
        Ok(())
    }
    fn erase_sync(&mut self) -> io::Result<()> {
        self.content = None;
        Ok(())
    }
    fn capacity(&self) -> usize {
        HEADER_LEN + MAX_PAYLOAD
    }
    fn place(&self) -> String {
        "memory".to_owned()
    }
    fn is_ours_alone(&self) -> bool {
        self.is_ours_alone
    }
}

/// Flags; the first slot with its length; the second one.
fn check(input: &[u8]) {
    let mut parts = Parts::of(input);
    let flags = parts.byte();
    let (a, b) = (parts.sized(), parts.rest());
    let slot = |bytes: &[u8], absent, correct| Memory {
        content: (flags & absent == 0).then(|| match flags & correct {
            0 => bytes.to_vec(),
            _ => corrected(bytes),
        }),
        is_ours_alone: flags & NOT_OURS_ALONE == 0,
    };
    let mut pair = SlotPair::new(
        FORMATS,
        slot(a, A_IS_ABSENT, CORRECT_A),
        slot(b, B_IS_ABSENT, CORRECT_B),
    );
    let seen = pair.peek().ok().and_then(value);
    let Ok(loaded) = pair.load() else {
        pair.save(b"new")
            .expect_err("what is corrupt is not overwritten");
        pair.erase().expect("memory can be written");
        assert!(matches!(pair.load(), Ok(Loaded::Absent)));
        return;
    };
    if let Some(loaded) = value(loaded) {
        assert_eq!(seen.as_ref(), Some(&loaded));
        let again = pair.load().expect("it was repaired");
        assert!(matches!(
            again,
            Loaded::Value {
                whole: true,
                repaired: false,
                ..
            }
        ));
        assert_eq!(value(again), Some(loaded));
    }
    match pair.save(b"new") {
        Ok(_) => {}
        Err(SlotError::LastGeneration) => return,
        Err(error) => panic!("what was loaded can be replaced: {error}"),
    }
    let saved = pair.load().ok().and_then(value).expect("it was saved");
    assert_eq!((saved.0, &saved.2[..]), (FORMATS[0].magic, &b"new"[..]));
}

fn value(loaded: Loaded) -> Option<([u8; 8], u64, Vec<u8>)> {
    match loaded {
        Loaded::Absent | Loaded::NeverCompleted => None,
        Loaded::Value {
            format,
            generation,
            payload,
            ..
        } => Some((format.magic, generation, payload.to_vec())),
    }
}

/// The slot with a length and a checksum that are right.
fn corrected(bytes: &[u8]) -> Vec<u8> {
    let Some((header, payload)) = bytes.split_at_checked(HEADER_LEN) else {
        return bytes.to_vec();
    };
    let format = SlotFormat {
        magic: std::array::from_fn(|at| header[at]),
        version: u32::from_le_bytes(std::array::from_fn(|at| header[8 + at])),
    };
    let generation = u64::from_le_bytes(std::array::from_fn(|at| header[12 + at]));
    encode(&format, generation, payload).to_vec()
}

/// The payload of a slot, without what is stored behind it.
pub(super) fn payload_of(slot: &[u8]) -> Vec<u8> {
    let length = u32::from_le_bytes(std::array::from_fn(|at| slot[20 + at]));
    slot[HEADER_LEN..][..length as usize].to_vec()
}

fn seeds() -> Seeds {
    let slot = |format: usize, generation, payload: &[u8]| {
        encode(&FORMATS[format], generation, payload).to_vec()
    };
    let pair = |flags: u8, a: &[u8], b: &[u8]| [&[flags][..], &sized(a), b].concat();
    let (old, new) = (slot(0, 1, b"old"), slot(0, 2, b"new"));
    vec![
        ("absent", pair(A_IS_ABSENT | B_IS_ABSENT, &[], &[])),
        ("whole", pair(0, &new, &new)),
        ("interrupted", pair(CORRECT_A | CORRECT_B, &new, &old)),
        ("first", pair(B_IS_ABSENT, &new, &[])),
        ("torn", pair(B_IS_ABSENT | NOT_OURS_ALONE, &[0; 8], &[])),
        (
            "formats",
            pair(CORRECT_A | CORRECT_B, &slot(1, 7, b"x"), &old),
        ),
    ]
}
