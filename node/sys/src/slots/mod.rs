//! A small state stored in two slots, for storage without atomic updates.
//!
//! Renames on FAT are not atomic, and a block device has no files. So a state that must survive a
//! power cut at any moment is stored twice, in two slots with fixed names (or offsets), each with
//! magic, version, generation, length and checksum. An update writes and syncs one slot, then the
//! other, and is acknowledged after the second. The newest valid slot wins.
//!
//! # Invariants
//! - While a slot is being written, the other one holds the newest value that has been acknowledged
//!   or returned. So a power cut leaves the old value or the new one.
//! - After an acknowledged write both slots hold the value: losing either one loses nothing.
//! - A value returned by [`SlotPair::load`] is as durable as an acknowledged one: if only one slot
//!   is valid, or an update was interrupted between the slots, the load repairs the other slot
//!   before it returns. If that fails (on a read-only ESP), it returns `repaired: false` and
//!   `whole: false`; every later load and save tries again.
//! - Corrupt is never treated as absent.
//!
//! # What each pair of slots means
//! The first save writes A completely (including the sync of the file and of its directory) before
//! it touches B. That decides the cases without a value:
//!
//! | A | B | meaning |
//! |---|---|---|
//! | absent | absent | [`Loaded::Absent`]: nothing was ever saved |
//! | damaged or empty | absent | [`Loaded::NeverCompleted`]: a first save was interrupted in A. An acknowledged value would be in B too |
//! | unreadable | absent | [`SlotError::Corrupt`]: A may be valid |
//! | damaged | damaged | [`SlotError::Corrupt`], even if both are empty |
//! | absent | damaged | [`SlotError::Corrupt`]: no first save leaves this |
//!
//! `NeverCompleted` is a result of its own because one case cannot be excluded: B lost its
//! directory entry *and* A became corrupt. It may be treated as absent only if something
//! independent confirms that nothing depends on the state; for the sealed configuration that is a
//! blank data partition. So a power cut in the very first save does not brick a node, and a corrupt
//! state never leads to a formatted disk.
//!
//! On a raw device, bytes in A that a torn first save cannot have left are foreign: they are
//! `Corrupt` rather than `NeverCompleted`.
//!
//! A slot with a valid checksum and another version was written by other software. That is an error
//! even if the second slot is readable: using its value would undo an acknowledged write.
//!
//! # Formats
//! A pair may have more than one format, each with a magic of its own. Which one a value has is part of the value: it is
//! returned with the value, a repair keeps it, and two slots that differ in it alone contradict each other. A value is
//! never decoded as one of another format.
//!
//! # Why SHA-256
//! It is available (ring), takes microseconds at these sizes, and makes collisions irrelevant: with
//! a 32-bit CRC, a slot of stale sectors would be accepted with a probability of 1 in 2^32. It does
//! not authenticate: whoever can write to the disk can write slots.

mod format;
mod store;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::{fmt, io};

use zeroize::Zeroizing;

pub use format::{HEADER_LEN, MAX_PAYLOAD, SlotFormat, encode};
pub use store::{FileSlot, RegionSlot, SlotStore};

use format::Slot;

/// The content of a pair of slots.
pub enum Loaded {
    /// Nothing was ever saved.
    Absent,
    /// A first save was interrupted before it wrote anything that could have been acknowledged. The
    /// module documentation says when this may be treated as absent.
    NeverCompleted,
    /// The newest value.
    Value {
        /// The format of the saved value.
        format: SlotFormat,
        /// The number of saves, from 1.
        generation: u64,
        /// The saved value. It may hold secrets, and is zeroized on drop.
        payload: Zeroizing<Vec<u8>>,
        /// Whether a missing, damaged or outdated slot was rewritten.
        repaired: bool,
        /// Whether both slots now hold this value. False only if the repair failed.
        whole: bool,
    },
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("Absent"),
            Self::NeverCompleted => f.write_str("NeverCompleted"),
            Self::Value {
                format: _,
                generation,
                payload,
                repaired,
                whole,
            } => f
                .debug_struct("Value")
                .field("generation", generation)
                .field("payload_len", &payload.len())
                .field("repaired", repaired)
                .field("whole", whole)
                .finish(),
        }
    }
}

/// Why a pair of slots cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// The slots are not absent, and neither is valid.
    #[error("no valid slot: {a_place}: {a}; {b_place}: {b}")]
    Corrupt {
        /// The path of the first slot.
        a_place: String,
        /// What is wrong with it.
        a: Damage,
        /// The path of the second slot.
        b_place: String,
        /// What is wrong with it.
        b: Damage,
    },
    /// A slot was written by software with another version.
    #[error("{place}: version: expected {known}, got {found}")]
    OtherVersion {
        /// The path of the slot.
        place: String,
        /// The actual version.
        found: u32,
        /// The expected version.
        known: u32,
    },
    /// Both slots are valid, with the same generation and different contents.
    #[error("generation {generation} has different contents in {a_place} and {b_place}")]
    Contradiction {
        /// The generation of both.
        generation: u64,
        /// The path of the first slot.
        a_place: String,
        /// The path of the second slot.
        b_place: String,
    },
    /// The slots have the last generation there is, which no node has written.
    #[error("generation {} cannot be followed by another one", u64::MAX)]
    LastGeneration,
    /// The payload is too large for the slot.
    #[error("{place}: payload: expected at most {max} bytes, got {length}")]
    TooLarge {
        /// The path of the slot.
        place: String,
        /// The length of the payload in bytes.
        length: usize,
        /// The maximum length in bytes.
        max: usize,
    },
    /// A slot cannot be written or erased. The save was not acknowledged; the next load returns
    /// either the old value or the new one.
    #[error("{place}: cannot {step}")]
    Io {
        /// The path of the slot.
        place: String,
        /// The operation, as a verb.
        step: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// What is wrong with a slot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// It does not exist, although the other slot implies that it should.
    #[error("absent")]
    Absent,
    /// It exists and has no content.
    #[error("empty")]
    Empty,
    /// It is shorter than its header says, or than a header.
    #[error("truncated after {0} bytes")]
    Short(usize),
    /// It does not begin with the expected magic.
    #[error("wrong magic number")]
    Magic,
    /// Its payload would be longer than the maximum.
    #[error("invalid payload length {0}")]
    Length(u64),
    /// Its content does not match its checksum.
    #[error("checksum mismatch")]
    Checksum,
    /// The last attempt to write it failed, so its content is undefined.
    #[error("the last write failed")]
    Suspect,
    /// It cannot be read.
    #[error("cannot read it: {0}")]
    Unreadable(String),
}

/// Two slots that store one state. A pair has one owner, and only the owner writes.
#[derive(Debug)]
pub struct SlotPair<S> {
    /// At least one; the first one is that of [`SlotPair::save`].
    formats: &'static [SlotFormat],
    a: S,
    b: S,
    /// Slots whose last write failed. After a failed sync the kernel's cache may return bytes that
    /// never reached the disk, so the content of such a slot is not used until it has been written
    /// again.
    suspect: [bool; 2],
}

impl SlotPair<FileSlot> {
    /// The files `NAME.0` and `NAME.1` in a directory.
    pub fn in_directory(formats: &'static [SlotFormat], directory: &Path, name: &str) -> Self {
        let slot = |index| FileSlot::new(directory.join(format!("{name}.{index}")));
        Self::new(formats, slot(0), slot(1))
    }
}

impl<S: SlotStore> SlotPair<S> {
    /// A pair of these stores, with at least one format; a first save writes A first.
    pub fn new(formats: &'static [SlotFormat], a: S, b: S) -> Self {
        assert!(!formats.is_empty(), "a pair of slots has a format");
        Self {
            formats,
            a,
            b,
            suspect: [false; 2],
        }
    }

    /// Reads the newest value and writes nothing. For storage that may belong to someone else; a
    /// caller that relies on the value needs [`Self::load`].
    pub fn peek(&self) -> Result<Loaded, SlotError> {
        let (a, b) = (self.examine(Which::A), self.examine(Which::B));
        Ok(match self.judge(a, b)? {
            Judgement::Absent => Loaded::Absent,
            Judgement::NeverCompleted => Loaded::NeverCompleted,
            Judgement::Value(value, mend) => Loaded::Value {
                format: value.format,
                generation: value.generation,
                payload: value.payload,
                repaired: false,
                whole: mend.is_none(),
            },
        })
    }

    /// Reads the newest value, and repairs the other slot if necessary.
    pub fn load(&mut self) -> Result<Loaded, SlotError> {
        let (a, b) = (self.examine(Which::A), self.examine(Which::B));
        let (value, mend) = match self.judge(a, b)? {
            Judgement::Absent => return Ok(Loaded::Absent),
            Judgement::NeverCompleted => return Ok(Loaded::NeverCompleted),
            Judgement::Value(value, mend) => (value, mend),
        };
        let repaired = match mend {
            None => false,
            Some(which) => {
                let record = encode(&value.format, value.generation, &value.payload);
                match self.write(which, &record) {
                    Ok(()) => true,
                    Err(error) => {
                        let slot = self.store(which).place();
                        tracing::warn!(%slot, %error, "cannot repair the slot");
                        false
                    }
                }
            }
        };
        Ok(Loaded::Value {
            format: value.format,
            generation: value.generation,
            payload: value.payload,
            repaired,
            whole: mend.is_none() || repaired,
        })
    }

    /// Replaces the value, in the first format. When this returns, both slots hold it.
    ///
    /// # Errors
    /// As [`SlotPair::save_as`].
    pub fn save(&mut self, payload: &[u8]) -> Result<u64, SlotError> {
        self.save_as(self.formats[0], payload)
    }

    /// Replaces the value, in one of the pair's formats. When this returns, both slots hold it.
    ///
    /// Fails while the slots are corrupt, or have another version or the last generation, so that their content is not
    /// overwritten by accident. [`SlotPair::erase`] does so on purpose.
    pub fn save_as(&mut self, format: SlotFormat, payload: &[u8]) -> Result<u64, SlotError> {
        for store in [&self.a, &self.b] {
            let max = store.capacity().saturating_sub(HEADER_LEN).min(MAX_PAYLOAD);
            if payload.len() > max {
                return Err(SlotError::TooLarge {
                    place: store.place(),
                    length: payload.len(),
                    max,
                });
            }
        }
        let (a, b) = (self.examine(Which::A), self.examine(Which::B));
        let (generation, order) = match self.judge(a, b)? {
            Judgement::Absent | Judgement::NeverCompleted => (0, [Which::A, Which::B]),
            // The slot to be repaired goes first, because the other one holds the only copy.
            Judgement::Value(value, Some(Which::B)) => (value.generation, [Which::B, Which::A]),
            Judgement::Value(value, _) => (value.generation, [Which::A, Which::B]),
        };
        let generation = generation.checked_add(1).ok_or(SlotError::LastGeneration)?;
        let record = encode(&format, generation, payload);
        for which in order {
            self.write(which, &record).map_err(|source| SlotError::Io {
                place: self.store(which).place(),
                step: "write and sync the slot",
                source,
            })?;
        }
        Ok(generation)
    }

    /// Replaces the value, also one that nobody can read any more: for a state that is not needed to go on.
    ///
    /// # Errors
    /// A slot has another version, or cannot be written.
    pub fn save_over(&mut self, payload: &[u8]) -> Result<u64, SlotError> {
        match self.save(payload) {
            Err(
                SlotError::Corrupt { .. }
                | SlotError::Contradiction { .. }
                | SlotError::LastGeneration,
            ) => {
                self.erase()?;
                self.save(payload)
            }
            saved => saved,
        }
    }

    /// Overwrites and removes both slots, whatever their content.
    ///
    /// A power cut meanwhile leaves the value or `NeverCompleted`, and never a pair that is
    /// rejected as corrupt: B is erased first.
    pub fn erase(&mut self) -> Result<(), SlotError> {
        for store in [&mut self.b, &mut self.a] {
            store.erase_sync().map_err(|source| SlotError::Io {
                place: store.place(),
                step: "erase the slot",
                source,
            })?;
        }
        self.suspect = [false; 2];
        Ok(())
    }

    fn store(&self, which: Which) -> &S {
        match which {
            Which::A => &self.a,
            Which::B => &self.b,
        }
    }

    fn write(&mut self, which: Which, record: &[u8]) -> io::Result<()> {
        let store = match which {
            Which::A => &mut self.a,
            Which::B => &mut self.b,
        };
        let written = store.write_sync(record);
        self.suspect[which as usize] = written.is_err();
        written
    }

    fn examine(&self, which: Which) -> Slot {
        if self.suspect[which as usize] {
            return Slot::suspect();
        }
        match self.store(which).read() {
            Ok(None) => Slot::Absent,
            Ok(Some(bytes)) => format::decode(self.formats, &Zeroizing::new(bytes)),
            Err(error) => Slot::unreadable(&error),
        }
    }

    fn judge(&self, a: Slot, b: Slot) -> Result<Judgement, SlotError> {
        for (store, slot) in [(&self.a, &a), (&self.b, &b)] {
            if let Slot::OtherVersion { found, known } = *slot {
                return Err(SlotError::OtherVersion {
                    place: store.place(),
                    found,
                    known,
                });
            }
        }
        match (a, b) {
            (Slot::Valid(a), Slot::Valid(b)) => self.newest(a, b),
            (Slot::Valid(a), _) => Ok(Judgement::Value(a, Some(Which::B))),
            (_, Slot::Valid(b)) => Ok(Judgement::Value(b, Some(Which::A))),
            (Slot::Absent, Slot::Absent) => Ok(Judgement::Absent),
            // A slot that cannot be read may be valid.
            (Slot::Damaged { damage, torn_write }, Slot::Absent)
                if !matches!(damage, Damage::Unreadable(_))
                    && (torn_write || self.a.is_ours_alone()) =>
            {
                Ok(Judgement::NeverCompleted)
            }
            (a, b) => Err(SlotError::Corrupt {
                a_place: self.a.place(),
                a: a.damage(),
                b_place: self.b.place(),
                b: b.damage(),
            }),
        }
    }

    fn newest(&self, a: format::Valid, b: format::Valid) -> Result<Judgement, SlotError> {
        Ok(match a.generation.cmp(&b.generation) {
            std::cmp::Ordering::Greater => Judgement::Value(a, Some(Which::B)),
            std::cmp::Ordering::Less => Judgement::Value(b, Some(Which::A)),
            std::cmp::Ordering::Equal if a.format == b.format && a.payload == b.payload => {
                Judgement::Value(a, None)
            }
            std::cmp::Ordering::Equal => {
                return Err(SlotError::Contradiction {
                    generation: a.generation,
                    a_place: self.a.place(),
                    b_place: self.b.place(),
                });
            }
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    A,
    B,
}

/// The meaning of both slots, and which of them needs a repair.
enum Judgement {
    Absent,
    NeverCompleted,
    Value(format::Valid, Option<Which>),
}
