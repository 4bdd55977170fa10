//! The sealed configuration on the ESP, in two slots.
//!
//!
//! # Formats
//! A configuration that is sealed by a TPM and one that is not are different formats with different
//! magic. One is never parsed as the other: that would turn "the TPM refuses" into "corrupt", and
//! corrupt into a reason to enrol again. This release writes and reads the plain format, and
//! reports the other one.
//!
//!
//! # Record
//! Length of the message (u32, little-endian), message, zeros. Before MEMBER the message has a key
//! that must not outlive that phase, DISOWNED has none at all, and slots are written in place. So
//! the record never shrinks, and a shorter message overwrites all of a longer previous one.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

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
/// Magic of a configuration sealed by a TPM. Only used to detect one.
pub(super) const TPM_MAGIC: &[u8; 8] = b"HRTHTPSC";

/// A record with its slot's header is a multiple of this size.
pub(super) const BLOCK: usize = 4096;

/// Why the sealed configuration cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SealedError {
    /// The slots cannot be read or written, or neither is valid.
    #[error(transparent)]
    Slots(#[from] SlotError),
    /// The ESP cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is sealed by a TPM.
    #[error("{place}: sealed by a TPM, which this release cannot unseal")]
    SealedByTpm {
        /// Path of the slot.
        place: String,
    },
    /// The slots are valid, but the content is not.
    #[error("{field}: expected {wanted}, got {found}")]
    Content {
        /// The field.
        field: &'static str,
        /// The expected value.
        wanted: String,
        /// The actual value; never a secret.
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

    /// Whether the error is caused by the medium, and may go away, rather than by the content.
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

/// The content of the ESP.
#[derive(Clone, Debug)]
pub enum Stored {
    /// Nothing: the machine was never enrolled, or has been wiped.
    Absent,
    /// The very first save was interrupted. Equivalent to `Absent` if the data partition is blank,
    /// and only then.
    NeverCompleted,
    /// A configuration.
    Sealed(Sealed),
}

/// The store on an ESP. A node has one instance, because it remembers which slot's last write
/// failed.
#[derive(Debug)]
pub struct SealedStore {
    esp: Esp,
    file: StateFile,
    slots: Mutex<SlotPair<FileSlot>>,
}

impl SealedStore {
    /// The store on this ESP.
    pub fn new(esp: &Esp) -> Self {
        let file = esp.sealed_configuration();
        Self {
            esp: esp.clone(),
            slots: Mutex::new(file.slots(PLAIN)),
            file,
        }
    }

    /// Reads the configuration, and repairs a slot that is out of date.
    pub fn load(&self) -> Result<Stored, SealedError> {
        for path in self.file.paths() {
            // A read error is left to the slots: the other one may be sufficient.
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

    /// Replaces the configuration. It is durable when this returns; no byte of the previous one is
    /// left in the files.
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

    /// Erases the configuration.
    pub fn erase(&self) -> Result<(), SealedError> {
        Ok(self.slots().erase()?)
    }

    fn slots(&self) -> MutexGuard<'_, SlotPair<FileSlot>> {
        // A panic has the same effect as a failed write.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frames a message such that the slot's file has at least `former` bytes.
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
            "a message of the encoded length",
            format!("{} bytes", record.len()),
        )
    })
}
