//! Which key signs the PCR policy of an image.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use hearth_build::cache;
use hearth_image::key_file;
use hearth_tpm::SigningKey;

/// The file of the user's own key, in the cache folder.
const OWN: &str = "policy-key/private.pem";

/// How an image is signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Signing {
    /// By the user's own key, which is made at its first use.
    Own,
    /// By the key in this file.
    Key(PathBuf),
    /// Not at all: the image that anyone can rebuild.
    Unsigned,
}

impl Signing {
    /// The key, if the image is signed.
    pub(super) fn key(&self) -> Result<Option<Arc<SigningKey>>> {
        let key = match self {
            Signing::Own => key_file::read_or_make(&cache::dir()?.join(OWN))?,
            Signing::Key(path) => key_file::read(path)?,
            Signing::Unsigned => return Ok(None),
        };
        Ok(Some(Arc::new(key)))
    }
}
