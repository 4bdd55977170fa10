//! In which order the blocks of a new authenticated volume, or of its new end, are written so that they can be read.
//!
//! A block that was never written has no valid tag, and reading it fails. XFS reads blocks that it has allocated but not
//! written yet when it recovers its log after a power cut, so every block is written, with zeros, before a file system
//! uses it. That takes from seconds to hours, so it continues after a power cut. No record of its progress is stored: the
//! volume itself tells, because reading succeeds where the wipe has been, and nowhere else.
//!
//! # Invariants
//! - A chunk is written when the one before it is durable. So all chunks before the last one that was begun are complete,
//!   and of those after it nothing is readable.
//! - After an interruption the wipe goes on with the last chunk whose first block can be read. The last one that was begun
//!   is either this one or, if its first block was not written, the next one: what may be incomplete is written again, and
//!   no more than one complete chunk is.
//! - Tags that were made with another key count as none, so what an earlier volume has left on the disk does not matter.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

/// The unit of progress, in bytes. Small enough that a power cut costs little, and large enough that waiting for the disk
/// after each does not.
pub(super) const CHUNK: u64 = 32 << 20;

/// A wipe in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wipe {
    part: Range<u64>,
    next: u64,
}

impl Wipe {
    /// Of a part of a volume in which nothing was written, in bytes.
    pub(super) fn new(part: Range<u64>) -> Self {
        Self {
            next: part.start,
            part,
        }
    }

    /// Goes on where an earlier wipe of the same part, which may have been smaller, was interrupted. `is_readable`: whether
    /// the block at this offset can be read.
    pub(super) fn resumed<E>(
        part: Range<u64>,
        mut is_readable: impl FnMut(u64) -> Result<bool, E>,
    ) -> Result<Self, E> {
        let start_of = |chunk: u64| part.start + chunk * CHUNK;
        // The number of chunks whose first block can be read is between these.
        let mut least = 0;
        let mut most = (part.end - part.start).div_ceil(CHUNK);
        while least < most {
            let middle = least + (most - least) / 2;
            match is_readable(start_of(middle))? {
                true => least = middle + 1,
                false => most = middle,
            }
        }
        Ok(Self {
            next: start_of(least.saturating_sub(1)),
            part,
        })
    }

    /// What is to be written next, durably; `None` at the end.
    pub(super) fn chunk(&self) -> Option<Range<u64>> {
        let end = self.part.end.min(self.next + CHUNK);
        (self.next < end).then_some(self.next..end)
    }

    /// The chunk is durable.
    pub(super) fn written(&mut self) {
        if let Some(chunk) = self.chunk() {
            self.next = chunk.end;
        }
    }

    /// Whether the last chunk that was written is the one in the middle.
    pub(super) fn is_half_done(&self) -> bool {
        let half = self.size() / 2;
        (half..half + CHUNK).contains(&self.done())
    }

    fn done(&self) -> u64 {
        self.next - self.part.start
    }

    fn size(&self) -> u64 {
        self.part.end - self.part.start
    }
}

/// How far a wipe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The number of bytes that were written, in this boot or before.
    pub done: u64,
    /// The number of bytes to write altogether.
    pub size: u64,
    /// The estimated time until the end; none at the beginning.
    pub left: Option<Duration>,
}

impl Progress {
    /// In percent, rounded down.
    pub fn percent(&self) -> u64 {
        self.done.saturating_mul(100) / self.size.max(1)
    }
}

/// `35 % of 512 MiB, about 20 s left`.
impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} % of {} MiB", self.percent(), self.size >> 20)?;
        match self.left.map(|left| left.as_secs()) {
            None => Ok(()),
            Some(seconds @ 0..120) => write!(f, ", about {seconds} s left"),
            Some(seconds) => write!(f, ", about {} min left", seconds.div_ceil(60)),
        }
    }
}

/// Decides when progress is told: at the beginning, then every 5 %, or every half a minute if that takes longer, and at the
/// end.
#[derive(Debug)]
pub(super) struct Pace {
    began: Instant,
    from: u64,
    told: Option<(Instant, u64)>,
}

impl Pace {
    const STEP: u64 = 5;
    const REST: Duration = Duration::from_secs(30);

    pub(super) fn new(wipe: &Wipe, now: Instant) -> Self {
        Self {
            began: now,
            from: wipe.done(),
            told: None,
        }
    }

    /// The progress, if it is to be told now.
    pub(super) fn tells(&mut self, wipe: &Wipe, now: Instant) -> Option<Progress> {
        let (done, size) = (wipe.done(), wipe.size());
        let written = done - self.from;
        let left = (written > 0).then(|| {
            let ahead = (size - done) as f64 / written as f64;
            // A clock that jumps must not end the wipe.
            Duration::try_from_secs_f64((now - self.began).as_secs_f64() * ahead)
                .unwrap_or(Duration::MAX)
        });
        let progress = Progress { done, size, left };
        let is_due = self.told.is_none_or(|(at, percent)| {
            let more = progress.percent() - percent;
            let is_end = done == size && more > 0;
            more >= Self::STEP || is_end || now - at >= Self::REST
        });
        is_due.then(|| {
            self.told = Some((now, progress.percent()));
            progress
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    const BLOCK: u64 = CHUNK / 4;

    /// A volume of few blocks, which can be read once they were written.
    struct Volume {
        readable: Vec<bool>,
        start: u64,
    }

    impl Volume {
        fn part(&self, blocks: usize) -> Range<u64> {
            self.start..self.start + blocks as u64 * BLOCK
        }

        fn index(&self, offset: u64) -> usize {
            ((offset - self.start) / BLOCK) as usize
        }

        fn resume(&self, blocks: usize) -> Wipe {
            let is_readable = |at| Ok::<_, Infallible>(self.readable[self.index(at)]);
            Wipe::resumed(self.part(blocks), is_readable).unwrap()
        }

        /// Writes those blocks of the chunk that `which` has, the lowest bit first.
        fn write(&mut self, chunk: &Range<u64>, which: u8) {
            for block in self.index(chunk.start)..self.index(chunk.end - 1) + 1 {
                let bit = block - self.index(chunk.start);
                self.readable[block] |= which & 1 << bit != 0;
            }
        }
    }

    proptest! {
        /// Any number of power cuts, each after some chunks and in the middle of the next one, of which any blocks were
        /// written. The volume may have grown meanwhile.
        #[test]
        fn every_block_is_written_whatever_is_interrupted(
            start in 0..3_u64,
            boots in prop::collection::vec((1..40_usize, 0..12_usize, any::<u8>()), 1..6),
        ) {
            let most = boots.iter().map(|(blocks, ..)| *blocks).max().unwrap_or(1);
            let mut volume = Volume { readable: vec![false; most], start: start * BLOCK };
            let (mut blocks, mut reached) = (1, 0);
            for (size, chunks, torn) in boots {
                blocks = blocks.max(size);
                let mut wipe = volume.resume(blocks);
                prop_assert!(wipe.done() + CHUNK >= reached, "{wipe:?} went back from {reached}");
                for _ in 0..chunks {
                    if let Some(chunk) = wipe.chunk() {
                        volume.write(&chunk, u8::MAX);
                        wipe.written();
                    }
                }
                reached = wipe.done();
                if let Some(chunk) = wipe.chunk() {
                    volume.write(&chunk, torn);
                }
            }
            let mut wipe = volume.resume(blocks);
            while let Some(chunk) = wipe.chunk() {
                volume.write(&chunk, u8::MAX);
                wipe.written();
            }
            prop_assert_eq!(wipe.done(), wipe.size());
            prop_assert!(volume.readable[..blocks].iter().all(|readable| *readable));
        }

        /// Few blocks are read: each failure takes time, and the kernel logs it.
        #[test]
        fn few_blocks_are_read_to_resume(chunks in 0..1_000_000_u64, begun in 0..1_000_000_u64) {
            let mut reads = 0;
            let wipe = Wipe::resumed(0..chunks * CHUNK, |at| {
                reads += 1;
                Ok::<_, Infallible>(at / CHUNK < begun)
            }).unwrap();
            prop_assert_eq!(wipe.done(), chunks.min(begun).saturating_sub(1) * CHUNK);
            prop_assert!(reads <= 20);
        }
    }

    #[test]
    fn progress_is_told_every_five_percent_or_half_a_minute() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut wipe = Wipe::new(0..100 * CHUNK);
        let mut pace = Pace::new(&wipe, began);
        let first = pace.tells(&wipe, began).expect("the beginning is told");
        assert_eq!(first.to_string(), "0 % of 3200 MiB");
        let told = (1..=100).filter_map(|second| {
            wipe.written();
            pace.tells(&wipe, at(second))
        });
        let told: Vec<_> = told.map(|progress| progress.to_string()).collect();
        assert_eq!(told.len(), 20, "{told:?}");
        assert_eq!(told[0], "5 % of 3200 MiB, about 95 s left");
        assert_eq!(told[19], "100 % of 3200 MiB, about 0 s left");

        let mut wipe = Wipe::new(0..10_000 * CHUNK);
        let mut pace = Pace::new(&wipe, began);
        let told = (0..100).filter_map(|second| {
            let told = pace.tells(&wipe, at(second));
            wipe.written();
            told
        });
        let told: Vec<_> = told.map(|progress| progress.to_string()).collect();
        assert_eq!(told.len(), 4, "{told:?}");
        assert_eq!(told[3], "0 % of 320000 MiB, about 166 min left");
        let mut wipe = Wipe::new(0..33 * CHUNK);
        let mut pace = Pace::new(&wipe, began);
        let mut last = None;
        while wipe.chunk().is_some() {
            wipe.written();
            last = pace.tells(&wipe, began).or(last);
        }
        assert_eq!(last.map(|progress| progress.percent()), Some(100));
        assert_eq!(pace.tells(&wipe, began), None, "the end is told once");
    }
}
