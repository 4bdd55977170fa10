//! The name of a Debian package.

use std::fmt;
use std::str::FromStr;

/// The name of a Debian package, in the form that Debian's policy demands: apt takes many other words for options,
/// patterns or files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package(String);

/// A word that is no name of a package.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "package {0:?}: expected two or more of a-z, 0-9, '+', '-' and '.', beginning with a letter or digit"
)]
pub struct NotAPackage(String);

impl Package {
    /// A name that this crate knows.
    pub(crate) fn known(name: &'static str) -> Package {
        Package(name.to_owned())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Package {
    type Err = NotAPackage;

    fn from_str(name: &str) -> Result<Package, NotAPackage> {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let inner = |byte: u8| plain(byte) || b"+-.".contains(&byte);
        let (Some(&first), true) = (name.as_bytes().first(), name.len() >= 2) else {
            return Err(NotAPackage(name.to_owned()));
        };
        // apt reads a final sign as an order to install or remove.
        let last = name.ends_with(['+', '-']);
        if plain(first) && name.bytes().all(inner) && !last {
            Ok(Package(name.to_owned()))
        } else {
            Err(NotAPackage(name.to_owned()))
        }
    }
}

impl fmt::Display for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_names_and_nothing_else() {
        for name in ["firmware-bnx2", "g++-12-x", "0ad"] {
            assert_eq!(name.parse::<Package>().unwrap().as_str(), name);
        }
        for wrong in [
            "",
            "a",
            "-y",
            "firmware-*",
            "bnx2=1",
            "a/b",
            "remove-",
            "A-b",
        ] {
            let error = wrong.parse::<Package>().unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?}")), "{error}");
        }
    }
}
