//! The packet filter of a node as it is printed.

use serde::Serialize;

use crate::table::printable;

/// A node's packet filter.
#[derive(Debug, Serialize)]
pub(crate) struct Firewall {
    /// In the syntax of nft(8).
    pub rules: String,
}

impl Firewall {
    /// The rules, for people.
    pub(crate) fn text(&self) -> String {
        let line = |line: &str| {
            let rule = line.trim_start_matches('\t');
            let indent = &line[..line.len() - rule.len()];
            format!("{indent}{}\n", printable(rule))
        };
        self.rules.lines().map(line).collect()
    }
}
