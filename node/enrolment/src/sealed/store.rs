//! The sealed configuration on the ESP, in two slots.
//!
//!
//! # Formats
//! A configuration that is sealed by a TPM and one that is not are different formats with different
//! magic. One is never parsed as the other: that would turn "the TPM refuses" into "corrupt", and
//! corrupt into a reason to enrol again. Which one is written follows from the configuration: from
//! how the cluster wants the TPM to be used, and before that is known, from whether the machine can
//! seal. A plain record of a node that uses its TPM is refused: nobody but the TPM's machine could
//! have written what it says.
//!
//!
//! # Record
//! Length of the message (u32, little-endian), message, zeros; in the TPM's format, as
//! [`super::tpm`] encrypts it. Where the cluster has a recovery recipient, the owner can open that
//! one, too ([`SealedStore::recover`]): a TPM that fails, or has seen another machine, does not take
//! the node's keys with it. Before MEMBER the message has a key
//! that must not outlive that phase, DISOWNED has none at all, and slots are written in place. So
//! the record never shrinks, and a shorter message overwrites all of a longer previous one.

use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_api::recovery::console::WrappedRecordKey;
use hearth_host::esp_writes::LastWrite;
use hearth_host::layout::{Esp, StateFile};
use hearth_sys::files::FileError;
use hearth_sys::slots::{
    Damage, FileSlot, HEADER_LEN, Loaded, MAX_PAYLOAD, SlotError, SlotFormat, SlotPair,
};
use zeroize::Zeroizing;

use super::tpm::{self, Sealer, TpmError};
use super::{Sealed, VERSION};

/// A record that anyone can read.
pub(super) const PLAIN: SlotFormat = SlotFormat {
    magic: *b"HRTHPLSC",
    version: VERSION,
};
/// A record that a TPM has sealed.
const TPM: SlotFormat = SlotFormat {
    magic: *b"HRTHTPSC",
    version: VERSION,
};

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
    /// It is, or has to be, sealed by a TPM, and this machine cannot do that.
    #[error("the node's keys are sealed by a TPM, and this machine has none that can be used")]
    NoTpm,
    /// The TPM failed or refused.
    #[error(transparent)]
    Tpm(#[from] TpmError),
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
            Self::Tpm(error) => error.is_transient(),
            _ => false,
        }
    }

    /// Whether the configuration is whole, as far as anyone can see, but does not open on this machine in its present
    /// state.
    pub fn is_locked(&self) -> bool {
        matches!(self, Self::NoTpm | Self::Tpm(TpmError::Unseal(_)))
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
/// failed, and what the slots have: a TPM takes its time.
#[derive(Debug)]
pub struct SealedStore {
    esp: Esp,
    file: StateFile,
    state: Mutex<State>,
    sealer: Option<Arc<Sealer>>,
    last_write: LastWrite,
}

#[derive(Debug)]
struct State {
    slots: SlotPair<FileSlot>,
    /// What was loaded or saved last; `None` if that failed.
    known: Option<Stored>,
}

impl SealedStore {
    /// The store on this ESP, on a machine that can seal, or cannot.
    pub fn new(esp: &Esp, sealer: Option<Arc<Sealer>>) -> Self {
        let file = esp.sealed_configuration();
        Self {
            esp: esp.clone(),
            state: Mutex::new(State {
                slots: file.slots(&[PLAIN, TPM]),
                known: None,
            }),
            file,
            sealer,
            last_write: LastWrite::none(),
        }
    }

    /// How the last write ended.
    pub fn last_write(&self) -> &LastWrite {
        &self.last_write
    }

    /// Whether this machine can seal with a TPM.
    pub fn can_seal(&self) -> bool {
        self.sealer.is_some()
    }

    /// The configuration. The first call reads it, and repairs a slot that is out of date.
    pub fn load(&self) -> Result<Stored, SealedError> {
        let mut state = self.state();
        if let Some(known) = &state.known {
            return Ok(known.clone());
        }
        let stored = self.read(&mut state.slots)?;
        state.known = Some(stored.clone());
        Ok(stored)
    }

    fn read(&self, slots: &mut SlotPair<FileSlot>) -> Result<Stored, SealedError> {
        let (format, payload) = match slots.load()? {
            Loaded::Absent => return Ok(Stored::Absent),
            Loaded::NeverCompleted => return Ok(Stored::NeverCompleted),
            Loaded::Value {
                format,
                payload,
                whole,
                ..
            } => {
                self.last_write.note_repair(whole);
                (format, payload)
            }
        };
        if format == TPM {
            let record = self.sealer()?.unseal(&payload)?;
            return Ok(Stored::Sealed(Sealed::from_record(&record)?));
        }
        let sealed = Sealed::from_record(&payload)?;
        if sealed.uses_tpm() == Some(true) {
            return Err(SealedError::content(
                "record",
                "one that is sealed by the TPM, which this node uses",
                "one that is not",
            ));
        }
        Ok(Stored::Sealed(sealed))
    }

    /// Repairs a slot whose last write has failed; [`Self::last_write`] tells whether it could.
    ///
    /// # Errors
    ///
    /// Neither slot can be read.
    pub fn repair(&self) -> Result<(), SealedError> {
        if let Loaded::Value { whole, .. } = self.state().slots.load()? {
            self.last_write.note_repair(whole);
        }
        Ok(())
    }

    /// The key of the configuration for the owner; `None` if it has none.
    pub fn recovery(&self) -> Result<Option<WrappedRecordKey>, SealedError> {
        match self.state().slots.load()? {
            Loaded::Value {
                format, payload, ..
            } if format == TPM => owners_key(&payload),
            _ => Ok(None),
        }
    }

    /// Opens the configuration with its key, which the owner has given, and seals it anew to what
    /// the TPM measures now, if there is one. Until the next boot it is open in either case.
    pub fn recover(&self, key: &[u8; 32]) -> Result<(), SealedError> {
        let sealed = {
            let mut state = self.state();
            let Loaded::Value { payload, .. } = state.slots.load()? else {
                return Err(SealedError::content("record", "one", "none"));
            };
            let sealed = Sealed::from_record(&tpm::open(&payload, key)?)?;
            state.known = Some(Stored::Sealed(sealed.clone()));
            sealed
        };
        if let Err(error) = self.save(&sealed) {
            tracing::warn!(
                "cannot seal the node's keys again; the next boot needs the recovery key, too: {}",
                hearth_api::chain(&error)
            );
            self.state().known = Some(Stored::Sealed(sealed));
        }
        Ok(())
    }

    /// Replaces the configuration. It is durable when this returns; no byte of the previous one is
    /// left in the files.
    pub fn save(&self, sealed: &Sealed) -> Result<(), SealedError> {
        self.last_write.note(self.write(sealed))
    }

    fn write(&self, sealed: &Sealed) -> Result<(), SealedError> {
        self.esp.make_directories()?;
        let mut state = self.state();
        state.known = None;
        let former = self
            .file
            .paths()
            .map(|path| fs::metadata(path).map_or(0, |metadata| metadata.len() as usize));
        let record = frame(&sealed.encode(), former.into_iter().max().unwrap_or(0));
        let format = self.format_of(sealed);
        if format == TPM {
            let recipient = sealed.recovery_recipient();
            let record = self.sealer()?.seal(&record, recipient.as_ref())?;
            state.slots.save_as(TPM, &record)?;
        } else {
            state.slots.save_as(PLAIN, &record)?;
        }
        state.known = Some(Stored::Sealed(sealed.clone()));
        Ok(())
    }

    /// The format of this configuration.
    fn format_of(&self, sealed: &Sealed) -> SlotFormat {
        // Where the cluster has not said yet how the TPM is to be used, it protects what it can.
        match sealed.uses_tpm().unwrap_or(self.can_seal()) {
            true => TPM,
            false => PLAIN,
        }
    }

    fn sealer(&self) -> Result<&Sealer, SealedError> {
        self.sealer.as_deref().ok_or(SealedError::NoTpm)
    }

    /// Erases the configuration.
    pub fn erase(&self) -> Result<(), SealedError> {
        let mut state = self.state();
        state.known = None;
        Ok(state.slots.erase()?)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic has the same effect as a failed write.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sealed {
    /// Decodes a record that anyone can read.
    pub fn from_record(record: &[u8]) -> Result<Self, SealedError> {
        Self::decode(unframe(record)?)
    }
}

/// The key for the owner in a record that a TPM has sealed, if it has one.
pub fn owners_key(record: &[u8]) -> Result<Option<WrappedRecordKey>, SealedError> {
    Ok(tpm::recovery(record)?)
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
