//! Names of extensions, and the kernel argument that admits one.
//!
//! The command line is part of the unified kernel image, so what authenticates the image
//! authenticates the root hash in it, and the hash authenticates every block of the extension.
//! Nothing on the disk determines the hash.

use std::fmt;
use std::str::FromStr;

use crate::names::extensions::KERNEL_WORD;

/// A name is a part of kernel arguments, paths and names of device-mapper volumes.
const LONGEST_NAME: usize = 24;

/// An extension's name: 1 to 24 of a–z, 0–9 and `-`, beginning with a letter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtensionName(String);

impl ExtensionName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ExtensionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ExtensionName {
    type Err = ExtensionError;

    fn from_str(text: &str) -> Result<Self, ExtensionError> {
        let fits = (1..=LONGEST_NAME).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_lowercase())
            && text
                .chars()
                .all(|c| matches!(c, 'a'..='z' | '0'..='9' | '-'));
        match fits {
            true => Ok(Self(text.to_owned())),
            false => Err(ExtensionError::Name(text.to_owned())),
        }
    }
}

/// An extension that the kernel command line admits: `hearth.extension=NAME:HASH:BLOCKS:START`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The extension.
    pub name: ExtensionName,
    /// Root hash of the dm-verity tree: version 1, SHA-256, blocks of 4096 bytes, no salt.
    pub root_hash: [u8; 32],
    /// Number of data blocks, at least one. The tree follows directly after them.
    pub blocks: u64,
    /// Where it begins in its slot, in blocks.
    pub start: u64,
}

/// An invalid name or kernel argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtensionError {
    /// Not a name.
    #[error(
        "extension name: expected 1 to {LONGEST_NAME} characters of a-z, 0-9 and \"-\", beginning with a letter, got {0:?}"
    )]
    Name(String),
    /// Not a valid kernel argument.
    #[error("kernel argument: expected {KERNEL_WORD}NAME:HASH:BLOCKS:START, got {0:?}")]
    Word(String),
}

impl fmt::Display for Admitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hash = hex::encode(self.root_hash);
        let (name, blocks, start) = (&self.name, self.blocks, self.start);
        write!(f, "{KERNEL_WORD}{name}:{hash}:{blocks}:{start}")
    }
}

impl FromStr for Admitted {
    type Err = ExtensionError;

    fn from_str(text: &str) -> Result<Self, ExtensionError> {
        let bad = || ExtensionError::Word(text.to_owned());
        let rest = text.strip_prefix(KERNEL_WORD).ok_or_else(bad)?;
        let parts: Vec<&str> = rest.split(':').collect();
        let [name, hash, blocks, start] = parts[..] else {
            return Err(bad());
        };
        let mut root_hash = [0; 32];
        hex::decode_to_slice(hash, &mut root_hash).map_err(|_| bad())?;
        let blocks = blocks.parse().map_err(|_| bad())?;
        if blocks == 0 {
            return Err(bad());
        }
        Ok(Self {
            name: name.parse()?,
            root_hash,
            blocks,
            start: start.parse().map_err(|_| bad())?,
        })
    }
}

impl Admitted {
    /// All extensions that a kernel command line admits, in its order. An argument that cannot be
    /// parsed is returned as an error, with the name that it appears to have.
    pub fn of_command_line(line: &str) -> Vec<Result<Self, (String, ExtensionError)>> {
        let mut all: Vec<Result<Self, (String, ExtensionError)>> = Vec::new();
        for word in line.split_whitespace() {
            let Some(rest) = word.strip_prefix(KERNEL_WORD) else {
                continue;
            };
            let name = rest.split(':').next().unwrap_or_default().to_owned();
            all.push(word.parse().map_err(|error| (name, error)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted() -> Admitted {
        Admitted {
            name: "kubernetes".parse().unwrap(),
            root_hash: std::array::from_fn(|n| n as u8),
            blocks: 12_345,
            start: 678,
        }
    }

    #[test]
    fn a_word_reads_back_from_a_command_line() {
        let line = format!("console=ttyS0 {} quiet\n", admitted());
        assert_eq!(Admitted::of_command_line(&line), [Ok(admitted())]);
        assert_eq!(Admitted::of_command_line("quiet"), []);
    }

    #[test]
    fn words_that_say_too_little_are_named() {
        let hash = "0".repeat(64);
        for rest in [
            String::new(),
            "name".into(),
            format!("name:{hash}"),
            format!("name:{hash}:1"),
            format!("name:{hash}:0:0"),
            format!("name:{hash}:x:0"),
            format!("name:{hash}:1:-1"),
            format!("name:{hash}:1:2:3"),
            format!("name:{}:1:0", &hash[2..]),
            format!("Name:{hash}:1:0"),
            format!("../x:{hash}:1:0"),
        ] {
            let word = format!("{KERNEL_WORD}{rest}");
            assert!(word.parse::<Admitted>().is_err(), "{word}");
            let found = Admitted::of_command_line(&word);
            assert!(matches!(&found[..], [Err(_)]), "{word}");
        }
    }

    #[test]
    fn names_fit_into_paths() {
        let longest = "x".repeat(LONGEST_NAME);
        assert!(longest.parse::<ExtensionName>().is_ok());
        for bad in ["", "-a", "1", "a_b", "a/b", "..", &"x".repeat(25)] {
            assert!(bad.parse::<ExtensionName>().is_err(), "{bad}");
        }
    }

    /// The form is part of installed images.
    #[test]
    fn the_stored_form_stays() {
        let stored = "hearth.extension=kubernetes:\
            000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f:12345:678";
        assert_eq!(admitted().to_string(), stored);
        assert_eq!(stored.parse(), Ok(admitted()));
    }
}
