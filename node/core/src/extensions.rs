//! Extensions: what rides along with an image beside the initramfs.
//!
//! A static fact of a boot: found, checked and mounted before the roles start,
//! and the same until the machine goes down. Whoever needs one asks
//! [`Extensions::get`] and says, where it is missing, what [`Missing`] says:
//! an image without an extension is a whole image, and a node never pretends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The extensions of this boot.
#[derive(Clone, Debug, Default)]
pub struct Extensions {
    /// By name: where it is mounted, or why it is refused.
    by_name: BTreeMap<String, Result<PathBuf, String>>,
}

/// Why there is no such extension.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// The image was built without it.
    #[error("the image of this node has no extension {name}")]
    NotInstalled {
        /// The extension.
        name: String,
    },
    /// It is there, and not what the image was built with, or cannot be used.
    #[error("extension {name} is refused: {why}")]
    Refused {
        /// The extension.
        name: String,
        /// For an operator.
        why: String,
    },
}

impl Extensions {
    /// Of an image that has none.
    pub fn none() -> Self {
        Self::default()
    }

    /// The same with one more, which lies at a path.
    #[must_use]
    pub fn with(mut self, name: &str, path: impl Into<PathBuf>) -> Self {
        self.by_name.insert(name.to_owned(), Ok(path.into()));
        self
    }

    /// The same with one more, which is refused.
    #[must_use]
    pub fn with_refused(mut self, name: &str, why: &str) -> Self {
        self.by_name.insert(name.to_owned(), Err(why.to_owned()));
        self
    }

    /// Where an extension is mounted.
    pub fn get(&self, name: &str) -> Result<&Path, Missing> {
        let name = || name.to_owned();
        match self.by_name.get(&name()) {
            Some(Ok(path)) => Ok(path),
            Some(Err(why)) => Err(Missing::Refused {
                name: name(),
                why: why.clone(),
            }),
            None => Err(Missing::NotInstalled { name: name() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_says_why() {
        let extensions = Extensions::none()
            .with("here", "/somewhere")
            .with_refused("broken", "its root hash differs");
        assert_eq!(extensions.get("here"), Ok(Path::new("/somewhere")));
        assert_eq!(
            extensions.get("broken").unwrap_err().to_string(),
            "extension broken is refused: its root hash differs"
        );
        assert_eq!(
            extensions.get("absent").unwrap_err(),
            Missing::NotInstalled {
                name: "absent".into()
            }
        );
    }
}
