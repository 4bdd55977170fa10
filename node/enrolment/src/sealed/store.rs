//! The sealed configuration on the ESP, in two slots.
//!
//! # Formats
//! A configuration that is sealed by a TPM and one that is not are different
//! formats with different magic. The one is never tried as the other: to do so
//! would turn "the TPM refuses" into "this is nonsense", and nonsense into a
//! reason to begin anew. This release writes and reads the plain one, and
//! names the other when it meets it.
//!
//! # Record
//! Length of the message (u32, little-endian), message, zeros. Before MEMBER
//! the message holds a key that must not outlast that phase, DISOWNED holds
//! none at all, and slots are written in place; so the record never shrinks,
//! and a shorter message overwrites all of the longer one before it.

use std::{
    fs,
    sync::{Mutex, MutexGuard, PoisonError},
};

use hearth_host::layout::{Esp, StateFile};
use hearth_sys::files::{self, FileError};
use hearth_sys::slots::{
    Damage, FileSlot, HEADER_LEN, Loaded, MAX_PAYLOAD, SlotError, SlotFormat, SlotPair,
};
use zeroize::Zeroizing;

use super::{Sealed, VERSION};

/// The format that this release reads and writes.
const PLAIN: SlotFormat = SlotFormat {
    magic: *b"HRTHPLSC",
    version: VERSION,
};
/// Begins a configuration that a TPM has sealed. Kept for that alone.
pub(super) const TPM_MAGIC: &[u8; 8] = b"HRTHTPSC";

/// Records are multiples of this with their slot's header.
pub(super) const BLOCK: usize = 4096;

/// Why there is no sealed configuration to be had from what is on the ESP.
#[derive(Debug, thiserror::Error)]
pub enum SealedError {
    /// The slots cannot be read or written, or hold nothing valid.
    #[error(transparent)]
    Slots(#[from] SlotError),
    /// The ESP cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A TPM has sealed it.
    #[error("{place}: sealed by a TPM, which this release cannot unseal")]
    SealedByTpm {
        /// The slot.
        place: String,
    },
    /// Valid slots with a content that makes no sense.
    #[error("{field}: wanted {wanted}, found {found}")]
    Content {
        /// The field.
        field: &'static str,
        /// What it should hold.
        wanted: String,
        /// What it holds; no secret.
        found: String,
    },
}

impl SealedError {
    pub(super) fn content(
        field: &'static str,
        wanted: impl Into<String>,
        found: impl ToString,
    ) -> Self {
        Self::Content {
            field,
            wanted: wanted.into(),
            found: found.to_string(),
        }
    }

    /// Whether it says something about the medium, which may recover, and
    /// nothing about what was written on it.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Slots(SlotError::Corrupt { a, b, .. }) => [a, b]
                .into_iter()
                .any(|damage| matches!(damage, Damage::Unreadable(_) | Damage::Suspect)),
            Self::Slots(SlotError::Io { .. }) | Self::File(_) => true,
            _ => false,
        }
    }
}

/// What the ESP holds.
#[derive(Clone, Debug)]
pub enum Stored {
    /// Nothing: the machine was never a node, or has been wiped.
    Absent,
    /// The very first save was cut off. As good as absent if the data
    /// partition is blank, and only then.
    NeverCompleted,
    /// A configuration.
    Sealed(Sealed),
}

/// The sealed configuration on an ESP. There is one of these in a node: it
/// remembers which slot's last write failed.
#[derive(Debug)]
pub struct SealedStore {
    esp: Esp,
    file: StateFile,
    slots: Mutex<SlotPair<FileSlot>>,
}

impl SealedStore {
    /// The one on this ESP.
    pub fn new(esp: &Esp) -> Self {
        let file = esp.sealed_configuration();
        Self {
            esp: esp.clone(),
            slots: Mutex::new(file.slots(PLAIN)),
            file,
        }
    }

    /// Reads it, and mends a slot that lags behind.
    pub fn load(&self) -> Result<Stored, SealedError> {
        for path in self.file.paths() {
            // One that cannot be read is for the slots to judge: the other
            // one may be enough.
            let slot = files::read_limited(&path, (HEADER_LEN + MAX_PAYLOAD) as u64);
            let slot = slot.ok().flatten();
            if slot.is_some_and(|bytes| Zeroizing::new(bytes).starts_with(TPM_MAGIC)) {
                return Err(SealedError::SealedByTpm {
                    place: path.display().to_string(),
                });
            }
        }
        match self.slots().load()? {
            Loaded::Absent => Ok(Stored::Absent),
            Loaded::NeverCompleted => Ok(Stored::NeverCompleted),
            Loaded::Value { payload, .. } => {
                Ok(Stored::Sealed(Sealed::decode(unframe(&payload)?)?))
            }
        }
    }

    /// Replaces it. Durable when this returns; no byte of the former one is
    /// left in its files.
    pub fn save(&self, sealed: &Sealed) -> Result<(), SealedError> {
        self.esp.make_directories()?;
        let mut slots = self.slots();
        let former = self
            .file
            .paths()
            .map(|path| fs::metadata(path).map_or(0, |metadata| metadata.len() as usize));
        let record = frame(&sealed.encode(), former.into_iter().max().unwrap_or(0));
        slots.save(&record)?;
        Ok(())
    }

    /// Removes it for good.
    pub fn erase(&self) -> Result<(), SealedError> {
        Ok(self.slots().erase()?)
    }

    fn slots(&self) -> MutexGuard<'_, SlotPair<FileSlot>> {
        // A panic leaves no more than a write that failed would.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frames a message so that the slot's file is at least `former` bytes long.
pub(super) fn frame(message: &[u8], former: usize) -> Zeroizing<Vec<u8>> {
    let file = (HEADER_LEN + 4 + message.len())
        .max(former)
        .next_multiple_of(BLOCK)
        .min(HEADER_LEN + MAX_PAYLOAD);
    let mut record = Zeroizing::new(vec![0; file - HEADER_LEN]);
    record[..4].copy_from_slice(&(message.len() as u32).to_le_bytes());
    record[4..4 + message.len()].copy_from_slice(message);
    record
}

pub(super) fn unframe(record: &[u8]) -> Result<&[u8], SealedError> {
    let message = record
        .split_first_chunk::<4>()
        .and_then(|(length, rest)| rest.get(..u32::from_le_bytes(*length) as usize));
    message.ok_or_else(|| {
        SealedError::content(
            "record",
            "a message of the length it announces",
            format!("{} bytes", record.len()),
        )
    })
}
