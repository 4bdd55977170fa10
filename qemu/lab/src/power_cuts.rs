//! A sweep of power cuts, as the task that asks for it and the tests that run it see it.

use std::fmt;
use std::str::FromStr;

/// The environment variable with the folder of the recording and the results, from which the sweep goes on.
pub const FOLDER: &str = "HEARTH_POWER_CUTS_FOLDER";

/// The environment variable with the part, a [`Shard`](crate::shard::Shard).
pub const SHARD: &str = "HEARTH_POWER_CUTS_SHARD";

/// The environment variable with the name of the only cut to try.
pub const CUT: &str = "HEARTH_POWER_CUTS_CUT";

/// The environment variable with the number of choices of unflushed writes that are tried for each flush.
pub const CHOICES: &str = "HEARTH_POWER_CUTS_CHOICES";

/// The default of [`CHOICES`].
pub const DEFAULT_CHOICES: usize = 2;

/// What is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// A machine founds a cluster.
    FirstBootstrap,
    /// A machine registers, joins, and becomes a consensus member.
    Join,
}

/// A text that is no scenario.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected first-bootstrap or join, got {0:?}")]
pub struct NotAScenario(String);

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::FirstBootstrap, Self::Join];

    /// Its word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::FirstBootstrap => "first-bootstrap",
            Self::Join => "join",
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Scenario {
    type Err = NotAScenario;

    fn from_str(text: &str) -> Result<Self, NotAScenario> {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|scenario| scenario.word() == text);
        found.ok_or_else(|| NotAScenario(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read() {
        for scenario in Scenario::ALL {
            assert_eq!(scenario.to_string().parse(), Ok(scenario));
        }
        let error = "role".parse::<Scenario>().unwrap_err().to_string();
        assert_eq!(error, "expected first-bootstrap or join, got \"role\"");
    }
}
