//! A small state kept in two slots, for places where nothing is atomic.
//!
//! FAT renames are not atomic and a block device knows no files, so a state
//! that must survive a power cut at any moment is kept twice, in two slots of
//! fixed names (or places), each with magic, version, generation, length and
//! checksum. An update writes and syncs one slot, then the other, and is
//! acknowledged after the second. The newest valid slot wins.
//!
//! # Invariants
//! - While a slot is being written, the other one holds the newest value that
//!   anyone was told of. So a power cut leaves the old value or the new one.
//! - After an acknowledged write both slots hold it: the loss of either one
//!   takes nothing back.
//! - What [`SlotPair::load`] returns may be relied upon as if it had been
//!   acknowledged: a load that finds only one slot good, or an update cut off
//!   between the slots, mends the other one before it returns. Where that
//!   fails (a read-only ESP) it says so by `repaired: false` and
//!   `whole: false`; every later load and save tries again.
//! - Corrupt is never taken for absent.
//!
//! # What each pair of slots means
//! The first save writes A to its end (sync of the file and of its directory
//! included) before B is touched. That decides the cases without a value:
//!
//! | A | B | meaning |
//! |---|---|---|
//! | absent | absent | [`Loaded::Absent`]: nothing was ever saved |
//! | damaged or empty | absent | [`Loaded::NeverCompleted`]: a first save was cut off in A. Whatever was acknowledged would be in B too |
//! | unreadable | absent | [`SlotError::Corrupt`]: it may be whole |
//! | damaged | damaged | [`SlotError::Corrupt`], even if both are empty |
//! | absent | damaged | [`SlotError::Corrupt`]: no first save leaves this |
//!
//! `NeverCompleted` is its own answer because of what it cannot exclude: B
//! lost its directory entry *and* A went bad. It must be taken for absent
//! only where something independent agrees that nothing was ever built on the
//! state, which for the sealed configuration is a blank data partition. So a
//! power cut in the very first save does not brick a node, and a corrupt state
//! still never leads to a formatted disk.
//!
//! On a raw device, bytes in A that no torn first save of ours could have left
//! are somebody else's, and are `Corrupt` rather than `NeverCompleted`.
//!
//! A slot that bears a valid checksum and another version was written by other
//! software. That is an error even when the second slot could be read: to go
//! on with it would go back behind an acknowledged write.
//!
//! # Why SHA-256
//! It is at hand (ring), costs microseconds at these sizes, and lets the
//! checksum be left out of every consideration: with a 32-bit CRC a slot of
//! stale sectors has one chance in four thousand million to be taken for a
//! state. It is no authentication; whoever can write the disk can write slots.

mod format;
mod store;

#[cfg(test)]
mod tests;

use std::{fmt, io, path::Path};

use zeroize::Zeroizing;

pub use format::{HEADER_LEN, MAX_PAYLOAD, SlotFormat, encode};
pub use store::{FileSlot, RegionSlot, SlotStore};

use format::Slot;

/// What a pair of slots holds.
pub enum Loaded {
    /// Nothing was ever saved.
    Absent,
    /// A first save was cut off before it wrote anything that could be
    /// acknowledged. See the module's doc for when this is as good as absent.
    NeverCompleted,
    /// The newest value.
    Value {
        /// Counts the saves, from 1.
        generation: u64,
        /// What was saved. It may hold secrets, and is wiped when dropped.
        payload: Zeroizing<Vec<u8>>,
        /// One slot was missing, damaged or behind, and has been rewritten.
        repaired: bool,
        /// Both slots now hold this value. False only if mending failed.
        whole: bool,
    },
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("Absent"),
            Self::NeverCompleted => f.write_str("NeverCompleted"),
            Self::Value {
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

/// Why a pair of slots could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// There is something in the slots, and nothing valid.
    #[error("no valid slot: {a_place}: {a}; {b_place}: {b}")]
    Corrupt {
        /// Where the first slot is.
        a_place: String,
        /// What is wrong with it.
        a: Damage,
        /// Where the second slot is.
        b_place: String,
        /// What is wrong with it.
        b: Damage,
    },
    /// A slot was written by software that knows another version.
    #[error("{place}: holds version {found}, this software knows version {known}")]
    OtherVersion {
        /// Where the slot is.
        place: String,
        /// The version it bears.
        found: u32,
        /// The version wanted.
        known: u32,
    },
    /// Two valid slots bear the same generation and different contents.
    #[error("generation {generation} has two contents: {a_place}, {b_place}")]
    Contradiction {
        /// The generation of both.
        generation: u64,
        /// Where the first slot is.
        a_place: String,
        /// Where the second slot is.
        b_place: String,
    },
    /// The payload does not fit.
    #[error("{place}: a payload of {length} bytes, {max} at most")]
    TooLarge {
        /// Where the slot is.
        place: String,
        /// The payload's length in bytes.
        length: usize,
        /// The bound in bytes.
        max: usize,
    },
    /// A slot could not be written or erased. The save was not acknowledged;
    /// the next load gives either the old value or the new one.
    #[error("{place}: cannot {step}")]
    Io {
        /// Where the slot is.
        place: String,
        /// The step, as a verb.
        step: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// What is wrong with one slot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// It is not there, and the other one's state says that it should be.
    #[error("absent")]
    Absent,
    /// It is there and holds no byte.
    #[error("empty")]
    Empty,
    /// It is shorter than it says, or than any slot.
    #[error("cut off after {0} bytes")]
    Short(usize),
    /// It does not begin with the magic wanted.
    #[error("not of this kind (wrong magic)")]
    Magic,
    /// It claims more than a slot can hold.
    #[error("claims a payload of {0} bytes")]
    Length(u64),
    /// Its content does not match its checksum.
    #[error("checksum mismatch")]
    Checksum,
    /// The last attempt to write it failed, so it may hold anything.
    #[error("its last write failed")]
    Suspect,
    /// Reading it failed.
    #[error("cannot be read: {0}")]
    Unreadable(String),
}

/// Two slots that hold one state. It has one owner, who alone writes.
#[derive(Debug)]
pub struct SlotPair<S> {
    format: SlotFormat,
    a: S,
    b: S,
    /// Slots whose last write failed. After a failed sync the kernel's cache
    /// may show bytes that never reached the disk, so what such a slot says
    /// is not believed until it has been written again.
    suspect: [bool; 2],
}

impl SlotPair<FileSlot> {
    /// The files `NAME.0` and `NAME.1` in a directory.
    pub fn in_directory(format: SlotFormat, directory: &Path, name: &str) -> Self {
        let slot = |index| FileSlot::new(directory.join(format!("{name}.{index}")));
        Self::new(format, slot(0), slot(1))
    }
}

impl<S: SlotStore> SlotPair<S> {
    /// A pair of these stores, in which A is the one a first save begins with.
    pub fn new(format: SlotFormat, a: S, b: S) -> Self {
        Self {
            format,
            a,
            b,
            suspect: [false; 2],
        }
    }

    /// Reads the newest value and writes nothing. For places that may turn out
    /// to be somebody else's; what is built on the value needs [`Self::load`].
    pub fn peek(&self) -> Result<Loaded, SlotError> {
        let (a, b) = (self.examine(Which::A), self.examine(Which::B));
        Ok(match self.judge(a, b)? {
            Judgement::Absent => Loaded::Absent,
            Judgement::NeverCompleted => Loaded::NeverCompleted,
            Judgement::Value(value, mend) => Loaded::Value {
                generation: value.generation,
                payload: value.payload,
                repaired: false,
                whole: mend.is_none(),
            },
        })
    }

    /// Reads the newest value, and mends the other slot if it needs it.
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
                let record = encode(&self.format, value.generation, &value.payload);
                match self.write(which, &record) {
                    Ok(()) => true,
                    Err(error) => {
                        let slot = self.store(which).place();
                        tracing::warn!(%slot, %error, "cannot mend the slot");
                        false
                    }
                }
            }
        };
        Ok(Loaded::Value {
            generation: value.generation,
            payload: value.payload,
            repaired,
            whole: mend.is_none() || repaired,
        })
    }

    /// Replaces the value. When this returns, both slots hold it.
    ///
    /// Refused while the slots are corrupt or of another version: what is
    /// there is not overwritten by accident. [`SlotPair::erase`] does it on
    /// purpose.
    pub fn save(&mut self, payload: &[u8]) -> Result<u64, SlotError> {
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
            Judgement::Absent | Judgement::NeverCompleted => (1, [Which::A, Which::B]),
            // The slot to mend goes first: the other one is all there is.
            Judgement::Value(value, Some(Which::B)) => (value.generation + 1, [Which::B, Which::A]),
            Judgement::Value(value, _) => (value.generation + 1, [Which::A, Which::B]),
        };
        let record = encode(&self.format, generation, payload);
        for which in order {
            self.write(which, &record).map_err(|source| SlotError::Io {
                place: self.store(which).place(),
                step: "write and sync the slot",
                source,
            })?;
        }
        Ok(generation)
    }

    /// Overwrites and removes both slots, whatever they hold.
    ///
    /// A power cut on the way leaves the value, or `NeverCompleted`, and
    /// never a pair that is refused as corrupt: B goes first.
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
            Ok(Some(bytes)) => self.format.decode(&Zeroizing::new(bytes)),
            Err(error) => Slot::unreadable(&error),
        }
    }

    fn judge(&self, a: Slot, b: Slot) -> Result<Judgement, SlotError> {
        for (store, slot) in [(&self.a, &a), (&self.b, &b)] {
            if let Slot::OtherVersion(found) = *slot {
                return Err(SlotError::OtherVersion {
                    place: store.place(),
                    found,
                    known: self.format.version,
                });
            }
        }
        match (a, b) {
            (Slot::Valid(a), Slot::Valid(b)) => self.newest(a, b),
            (Slot::Valid(a), _) => Ok(Judgement::Value(a, Some(Which::B))),
            (_, Slot::Valid(b)) => Ok(Judgement::Value(b, Some(Which::A))),
            (Slot::Absent, Slot::Absent) => Ok(Judgement::Absent),
            // One that cannot be read may well be whole.
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
            std::cmp::Ordering::Equal if a.payload == b.payload => Judgement::Value(a, None),
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

/// What two slots amount to, and which of them lags behind.
enum Judgement {
    Absent,
    NeverCompleted,
    Value(format::Valid, Option<Which>),
}
