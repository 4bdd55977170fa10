//! The log of what a machine has written to its disk, and from it the disks that a power cut may leave behind.
//!
//! QEMU's block driver `blklogwrites` records each write and each flush of a guest. [`Log`] is that record, [`Cut`] names
//! a power cut in it, and [`Replay`] changes a copy of the disk, as it was before, to what the cut leaves. The tests on
//! booted machines record one boot, and boot again from many such disks.
//!
//! # What a power cut leaves
//! A flush is a promise: what was written before it is on the disk. Of what was written after the last flush, a disk may
//! have kept anything: it writes in any order, and a write that is under way may reach some of its sectors. A sector is
//! whole, old or new. So a cut is the number of promises that had been kept, and for each later write which of its
//! sectors are new. A write with FUA is a promise about itself alone.
//!
//! The next promise had not been given when the power was cut, but everything before it may have been written. This is
//! the latest moment that leaves such a disk ([`Log::issued`]); what the machine had said until then must still hold.
//!
//! | module | what |
//! |---|---|
//! | [`log`] | the format: from bytes to entries, with the end of a recording that was itself cut short |
//! | [`cut`] | the names of cuts, and what each keeps |
//! | [`replay`] | the disk |
//!
//! # Invariants
//! - What was promised is always on the disk, and nothing that was written after the next promise.
//! - A name stands for the same disk whenever and wherever it is replayed: the choice of sectors depends on the name and
//!   the log, and on no library's random numbers.
//! - A disk is changed in whole sectors.
//! - A log that contradicts itself is an error with the position, never a disk.
//!
//! # Why not `replay-log`
//! The program of that name from xfstests reads the same format, and replays everything up to a flush. It knows neither
//! lost nor torn writes, and begins again for each position.

pub mod cut;
pub mod log;
pub mod replay;
#[cfg(test)]
mod tests;

pub use cut::{Cut, Kept, NotACut, Pick};
pub use log::{Entry, Kind, Log, LogError, Source};
pub use replay::{Disk, Replay, ReplayError};
