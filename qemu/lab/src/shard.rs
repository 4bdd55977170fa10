//! Parts of long runs that can be had one by one, here or on several hosts.

use std::fmt;
use std::str::FromStr;

/// Each N-th of a list, from the I-th on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    number: usize,
    of: usize,
}

/// A text that is no part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected I/N with I from 1 to N, such as 3/20, got {0:?}")]
pub struct ShardError(String);

impl Shard {
    /// Everything.
    pub const ALL: Self = Self { number: 1, of: 1 };

    /// The first of this many parts.
    ///
    /// # Panics
    /// If there are no parts.
    pub const fn first_of(of: usize) -> Self {
        assert!(of > 0);
        Self { number: 1, of }
    }

    /// Its part of a list.
    pub fn select<T: Copy>(self, all: &[T]) -> Vec<T> {
        let own = all.iter().skip(self.number - 1).step_by(self.of);
        own.copied().collect()
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let parsed = text.split_once('/').and_then(|(number, of)| {
            let (number, of) = (number.parse().ok()?, of.parse().ok()?);
            (1..=of).contains(&number).then_some(Self { number, of })
        });
        parsed.ok_or_else(|| ShardError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_together_are_everything_once() {
        let all: Vec<String> = (0..47).map(|number| format!("{number:02}")).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let part = |number: usize| format!("{number}/20").parse::<Shard>().unwrap();
        let parts: Vec<_> = (1..=20).map(|number| part(number).select(&all)).collect();
        assert!(parts.iter().all(|part| (2..=3).contains(&part.len())));
        let mut together = parts.concat();
        together.sort_unstable();
        assert_eq!(together, all);
        assert_eq!(Shard::ALL.select(&all), all);
        assert_eq!(Shard::first_of(40).select(&all), ["00", "40"]);
    }

    #[test]
    fn what_is_no_part_is_refused() {
        assert_eq!("02/20".parse::<Shard>().unwrap().to_string(), "2/20");
        for wrong in ["", "all", "0/3", "4/3", "1/0", "-1/2", "1/2/3", "1"] {
            assert_eq!(wrong.parse::<Shard>(), Err(ShardError(wrong.to_owned())));
        }
    }
}
