//! Items of QEMU's fw_cfg device, which pass parameters to a machine.
//!
//! The guest finds them as files below
//! `/sys/firmware/qemu_fw_cfg/by_name/NAME/raw`, read-only. Contents given as bytes are passed in a file in the
//! machine's folder, readable by its owner only, never on the command line, which every process on the host can read:
//! parameters contain secrets.

use std::fmt;
use std::path::PathBuf;

/// QEMU's limit for a name is 56 bytes, including the final NUL.
const MAX_NAME: usize = 55;

/// The name of an item: `opt/…`, at most 55 bytes of printable ASCII.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Name(String);

impl Name {
    /// Checks a name.
    ///
    /// # Errors
    /// Names the rule that it breaks.
    pub fn new(name: &str) -> Result<Self, NameError> {
        let refuse = |wanted| {
            Err(NameError {
                name: name.to_owned(),
                wanted,
            })
        };
        if name.strip_prefix("opt/").is_none_or(str::is_empty) {
            // QEMU accepts others with a warning and does not support them.
            return refuse("a name under opt/");
        }
        if name.len() > MAX_NAME {
            return refuse("at most 55 bytes");
        }
        if !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return refuse("printable ASCII without spaces");
        }
        if name
            .split('/')
            .any(|part| part.is_empty() || part == "." || part == "..")
        {
            // The guest's kernel makes a directory of each part.
            return refuse("no empty part, \".\" or \"..\" between its slashes");
        }
        Ok(Self(name.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A name that QEMU or the guest's kernel would not accept.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("fw_cfg name {name:?}: expected {wanted}")]
pub struct NameError {
    name: String,
    wanted: &'static str,
}

/// The content of an item.
#[derive(Clone, PartialEq, Eq)]
pub enum Content {
    /// Bytes, which are written to the machine's folder with mode 0600.
    Bytes(Vec<u8>),
    /// An existing file; QEMU reads it once, when it starts.
    File(PathBuf),
    /// Text on the command line, which everyone can read. Not empty, no NUL.
    Text(String),
}

impl fmt::Debug for Content {
    /// Omits the contents: they may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Text(text) => f.debug_tuple("Text").field(text).finish(),
        }
    }
}

/// One item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its name in the guest.
    pub name: Name,
    /// Its content.
    pub content: Content,
}

impl Item {
    /// An item of bytes.
    ///
    /// # Errors
    /// If the name is invalid.
    pub fn bytes(name: &str, bytes: impl Into<Vec<u8>>) -> Result<Self, NameError> {
        Ok(Self {
            name: Name::new(name)?,
            content: Content::Bytes(bytes.into()),
        })
    }

    /// An item whose content is a file.
    ///
    /// # Errors
    /// If the name is invalid.
    pub fn file(name: &str, path: impl Into<PathBuf>) -> Result<Self, NameError> {
        Ok(Self {
            name: Name::new(name)?,
            content: Content::File(path.into()),
        })
    }

    /// An item of text that is not secret.
    ///
    /// # Errors
    /// If the name is invalid.
    pub fn text(name: &str, text: impl Into<String>) -> Result<Self, NameError> {
        Ok(Self {
            name: Name::new(name)?,
            content: Content::Text(text.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_hearth_are_names() {
        for name in [
            hearth_api::names::FW_CFG_PARAMETERS,
            hearth_api::names::FW_CFG_FAILPOINT,
        ] {
            assert_eq!(Name::new(name).expect("a name").as_str(), name);
        }
    }

    #[test]
    fn the_longest_name_has_55_bytes() {
        let longest = format!("opt/{}", "x".repeat(51));
        assert!(Name::new(&longest).is_ok());
        let error = Name::new(&format!("{longest}x")).expect_err("56 bytes");
        assert!(error.to_string().contains("at most 55 bytes"), "{error}");
    }

    #[test]
    fn other_names_are_refused() {
        for name in [
            "", "opt/", "opt", "etc/x", "opt/a b", "opt/ü", "opt//a", "opt/../a", "opt/a/",
            "opt/a\n",
        ] {
            assert!(Name::new(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn bytes_are_not_printed() {
        let item = Item::bytes("opt/a", *b"secret").expect("a name");
        assert!(!format!("{item:?}").contains("secret"));
        assert!(format!("{item:?}").contains("6 bytes"));
    }
}
