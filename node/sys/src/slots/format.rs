//! The format of a slot.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 4 | version, little-endian |
//! | 12 | 8 | generation, little-endian, from 1 |
//! | 20 | 4 | length of the payload, little-endian |
//! | 24 | 32 | SHA-256 over bytes 0–23 and the payload |
//! | 56 | length | payload |
//!
//! This header is the same for every version; the version is that of the payload. Bytes after the
//! payload are ignored: a region of a device always has some, and a file may have some if its
//! truncation was lost.

use std::io;

use ring::digest;
use zeroize::Zeroizing;

use super::Damage;

/// The length of the header, in bytes.
pub const HEADER_LEN: usize = 56;

/// The maximum length of the payload, in bytes. Our states have a few KiB.
pub const MAX_PAYLOAD: usize = 1024 * 1024;

const CHECKSUM_AT: usize = 24;

/// The kind of state in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotFormat {
    /// Identifies the kind of state. Must not contain a zero byte, so that a torn first write can
    /// be distinguished from foreign data.
    pub magic: [u8; 8],
    /// The version of the payload.
    pub version: u32,
}

pub(super) struct Valid {
    pub format: SlotFormat,
    pub generation: u64,
    pub payload: Zeroizing<Vec<u8>>,
}

/// The state of one slot.
pub(super) enum Slot {
    Absent,
    Valid(Valid),
    OtherVersion {
        found: u32,
        known: u32,
    },
    Damaged {
        damage: Damage,
        /// Whether an interrupted first write may have left this.
        torn_write: bool,
    },
}

impl Slot {
    pub(super) fn unreadable(error: &io::Error) -> Self {
        Self::Damaged {
            damage: Damage::Unreadable(error.to_string()),
            torn_write: false,
        }
    }

    pub(super) fn suspect() -> Self {
        Self::Damaged {
            damage: Damage::Suspect,
            // This process wrote the slot.
            torn_write: true,
        }
    }

    pub(super) fn damage(self) -> Damage {
        match self {
            Self::Damaged { damage, .. } => damage,
            // The other states are never reported as damage; an absent slot is, next to a damaged
            // one.
            _ => Damage::Absent,
        }
    }
}

/// Encodes a slot with this payload.
pub fn encode(format: &SlotFormat, generation: u64, payload: &[u8]) -> Zeroizing<Vec<u8>> {
    // Reserved at once: growing the vector would leave copies of secrets behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(HEADER_LEN + payload.len()));
    bytes.extend_from_slice(&format.magic);
    bytes.extend_from_slice(&format.version.to_le_bytes());
    bytes.extend_from_slice(&generation.to_le_bytes());
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    let sum = checksum(&bytes, payload);
    bytes.extend_from_slice(sum.as_ref());
    bytes.extend_from_slice(payload);
    bytes
}

/// Decodes a slot that may have any of these formats.
pub(super) fn decode(formats: &[SlotFormat], bytes: &[u8]) -> Slot {
    let has_magic = |format: &&SlotFormat| bytes.starts_with(&format.magic);
    // Without a magic, all formats find the same damage.
    let format = formats.iter().find(has_magic).unwrap_or(&formats[0]);
    format
        .try_decode(bytes)
        .unwrap_or_else(|damage| Slot::Damaged {
            damage,
            torn_write: formats.iter().any(|format| format.may_be_torn(bytes)),
        })
}

impl SlotFormat {
    fn try_decode(&self, bytes: &[u8]) -> Result<Slot, Damage> {
        if bytes.is_empty() {
            return Err(Damage::Empty);
        }
        let Some((header, rest)) = bytes.split_at_checked(HEADER_LEN) else {
            return Err(Damage::Short(bytes.len()));
        };
        if header[..8] != self.magic {
            return Err(Damage::Magic);
        }
        let length = u32_at(header, 20) as usize;
        if length > MAX_PAYLOAD {
            return Err(Damage::Length(length as u64));
        }
        let payload = rest.get(..length).ok_or(Damage::Short(bytes.len()))?;
        if checksum(&header[..CHECKSUM_AT], payload).as_ref() != &header[CHECKSUM_AT..] {
            return Err(Damage::Checksum);
        }
        let version = u32_at(header, 8);
        if version != self.version {
            return Ok(Slot::OtherVersion {
                found: version,
                known: self.version,
            });
        }
        Ok(Slot::Valid(Valid {
            format: *self,
            generation: u64_at(header, 12),
            payload: Zeroizing::new(payload.to_vec()),
        }))
    }

    /// Whether each byte of the magic is either correct or still zero.
    fn may_be_torn(&self, bytes: &[u8]) -> bool {
        bytes
            .iter()
            .zip(&self.magic)
            .all(|(byte, wanted)| byte == wanted || *byte == 0)
    }
}

fn checksum(header: &[u8], payload: &[u8]) -> digest::Digest {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(header);
    context.update(payload);
    context.finish()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}
