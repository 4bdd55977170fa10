//! Power cuts: their names, what each keeps, and which of them a sweep tries.
//!
//! Which later writes a cut keeps is drawn from its seed, write by write: lost, whole, or torn, so that only its first or
//! only its last sectors are new. How many are lost on average depends on the seed as well: whether few or nearly all
//! writes have reached a disk makes a difference to a journal.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::log::{Entry, Kind, Log};

/// A power cut: `12` is after the 12th promise, `12+all` and `12+seed7` keep writes since then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cut {
    /// How many promises had been given.
    pub after: usize,
    /// What is kept of later writes.
    pub pick: Pick,
}

/// What is kept of the writes that no promise covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pick {
    /// Nothing.
    None,
    /// What this seed says.
    Seed(u64),
    /// Everything.
    All,
}

/// What is kept of an entry that no flush covers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kept {
    /// Its index.
    pub entry: usize,
    /// Its sectors, counted from the first one of the entry; at least one.
    pub sectors: Range<u64>,
}

/// A text that names no cut.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a cut such as 12, 12+all or 12+seed7, got {0:?}")]
pub struct NotACut(pub(crate) String);

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let after = self.after;
        match self.pick {
            Pick::None => write!(f, "{after}"),
            Pick::All => write!(f, "{after}+all"),
            Pick::Seed(seed) => write!(f, "{after}+seed{seed}"),
        }
    }
}

impl FromStr for Cut {
    type Err = NotACut;

    fn from_str(text: &str) -> Result<Self, NotACut> {
        let (after, pick) = match text.split_once('+') {
            None => (text, Some(Pick::None)),
            Some((after, "all")) => (after, Some(Pick::All)),
            Some((after, pick)) => {
                let seed = pick.strip_prefix("seed");
                (after, seed.and_then(number).map(Pick::Seed))
            }
        };
        let cut = number(after).zip(pick);
        let cut = cut.map(|(after, pick)| Self { after, pick });
        cut.ok_or_else(|| NotACut(text.to_owned()))
    }
}

/// A number as it is printed: a cut has one name.
fn number<T: FromStr + ToString>(text: &str) -> Option<T> {
    let number: T = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

impl Log {
    /// How many entries a flush covers: all of them are on the disk.
    pub fn flushed(&self, after: usize) -> usize {
        let given = self.promises().iter().take(after).rev().copied();
        let is_flush = |index: &usize| self.entries()[*index].kind == Kind::Flush;
        given
            .into_iter()
            .find(is_flush)
            .map_or(0, |flush| flush + 1)
    }

    /// How many entries were complete at the latest moment that leaves such a disk. What was said when no more were
    /// complete must hold.
    pub fn issued(&self, after: usize) -> usize {
        let next = self.promises().get(after);
        next.copied().unwrap_or(self.entries().len())
    }

    /// The entries that may have changed the disk and that no flush covers, with whether a promise covers them.
    fn open(&self, after: usize) -> impl Iterator<Item = (usize, &Entry, bool)> {
        // A write with FUA that had not been promised yet may have been under way.
        let end = (self.issued(after) + 1).min(self.entries().len());
        let flushed = self.flushed(after);
        let given: HashSet<usize> = self.promises().iter().take(after).copied().collect();
        let entries = self.entries()[flushed..end].iter().enumerate();
        let entries = entries.map(move |(index, entry)| (flushed + index, entry));
        entries
            .filter(|(_, entry)| entry.changes())
            .map(move |(index, entry)| (index, entry, given.contains(&index)))
    }

    /// What a cut keeps of the entries after [`Self::flushed`], in order; none if there is no such cut.
    pub fn kept(&self, cut: Cut) -> Option<Vec<Kept>> {
        if cut.after > self.promise_count() {
            return None;
        }
        let mut numbers = match cut.pick {
            Pick::Seed(seed) => Some(Draw::of(seed, cut.after)),
            Pick::None | Pick::All => None,
        };
        let kept = self.open(cut.after).filter_map(|(index, entry, given)| {
            let whole = 0..entry.sectors;
            let drawn = numbers
                .as_mut()
                .map(|numbers| numbers.of_write(entry.sectors));
            let sectors = match (given, cut.pick) {
                (true, _) | (false, Pick::All) => whole,
                (false, _) => drawn.unwrap_or(0..0),
            };
            let entry = index;
            (!sectors.is_empty()).then_some(Kept { entry, sectors })
        });
        Some(kept.collect())
    }

    /// The cuts of a sweep: at each promise without any later write, and with this many different choices of later
    /// writes, where there are so many. No two leave the same disk for a reason that can be seen in the log: of such
    /// cuts it has the last one, at which most has been said.
    pub fn cuts(&self, choices: usize) -> Vec<Cut> {
        /// Seeds that are tried for each choice: few writes have few choices.
        const ATTEMPTS: u64 = 8;
        let mut seen = HashSet::new();
        // From the end: of cuts with the same disk, the last one stays.
        let windows = (0..=self.promise_count()).rev().map(|after| {
            let cut = |pick| Cut { after, pick };
            let kept = |pick| self.kept(cut(pick)).unwrap_or_default();
            let (none, all) = (kept(Pick::None), kept(Pick::All));
            let next = self.promises().get(after);
            let flushes_all = next.is_some_and(|next| self.entries()[*next].kind == Kind::Flush);
            if flushes_all {
                // The next cut has this disk.
                seen.insert((self.flushed(after), all.clone()));
            }
            let mut is_new = |kept| seen.insert((self.flushed(after), kept));
            let mut cuts = vec![cut(Pick::None), cut(Pick::All)];
            cuts.retain(|cut| is_new(kept(cut.pick)));
            if none != all {
                let seeds = (0..ATTEMPTS * choices as u64).map(Pick::Seed);
                let different = seeds.filter(|seed| is_new(kept(*seed)));
                cuts.extend(different.take(choices).map(cut));
            }
            cuts
        });
        let windows: Vec<Vec<Cut>> = windows.collect();
        windows.into_iter().rev().flatten().collect()
    }
}

/// Numbers that follow from a seed: SplitMix64.
struct Draw {
    state: u64,
    /// Of eight writes.
    lost: u64,
}

impl Draw {
    /// Torn writes, of eight.
    const TORN: u64 = 2;

    fn of(seed: u64, after: usize) -> Self {
        let mut draw = Self {
            state: seed ^ (after as u64).rotate_left(32),
            lost: 0,
        };
        draw.lost = draw.next() % (8 - Self::TORN + 1);
        draw
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// The sectors that are kept of a write of this many. Takes as many numbers for each write.
    fn of_write(&mut self, sectors: u64) -> Range<u64> {
        let (fate, place) = (self.next() % 8, self.next());
        if fate < self.lost {
            return 0..0;
        }
        if fate >= self.lost + Self::TORN || sectors < 2 {
            return 0..sectors;
        }
        let edge = 1 + (place >> 1) % (sectors - 1);
        match place & 1 {
            0 => 0..edge,
            _ => edge..sectors,
        }
    }
}
