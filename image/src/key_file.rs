//! The file of the key that signs PCR policies ([`SigningKey`]): a builder's own, or one that is made at its first use.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hearth_tpm::{GenerateError, KeyError, SigningKey};

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It cannot be read.
    #[error("cannot read the signing key {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// It cannot be made.
    #[error("cannot make the signing key {}", path.display())]
    Make {
        /// Path of the file.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// There is no key for it.
    #[error("cannot make a signing key")]
    Generate(#[from] GenerateError),
    /// It has no key that can sign.
    #[error("cannot use the signing key {}", path.display())]
    Key {
        /// Path of the file.
        path: PathBuf,
        /// What was expected, and what it has.
        source: KeyError,
    },
}

/// Reads the key in this file.
///
/// # Errors
/// If the file cannot be read, or its content cannot sign.
pub fn read(path: &Path) -> Result<SigningKey, KeyFileError> {
    let text = fs::read(path).map_err(|source| KeyFileError::Read {
        path: path.to_owned(),
        source,
    })?;
    SigningKey::from_pem(&text).map_err(|source| KeyFileError::Key {
        path: path.to_owned(),
        source,
    })
}

/// Reads the key in this file. If there is none, makes a P-256 key that only the user can read (mode 0600), and its
/// folder. Of several processes that do so at once, one makes the key for all.
///
/// # Errors
/// If the file cannot be made or read, or its content cannot sign.
pub fn read_or_make(path: &Path) -> Result<SigningKey, KeyFileError> {
    if !path.exists() {
        let text = SigningKey::generate()?;
        make(path, text.as_bytes()).map_err(|source| KeyFileError::Make {
            path: path.to_owned(),
            source,
        })?;
    }
    read(path)
}

/// Makes a private file, complete or not at all, unless it exists.
fn make(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // Such files have mode 0600.
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    match file.persist_noclobber(path) {
        Err(error) if error.error.kind() != io::ErrorKind::AlreadyExists => Err(error.error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_is_made_once_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys/policy.pem");
        let first = read_or_make(&path).unwrap().public().clone();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(read_or_make(&path).unwrap().public(), &first);
        assert_eq!(read(&path).unwrap().public(), &first);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn errors_name_the_file_and_what_was_expected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key.pem");
        let error = read(&path).unwrap_err().to_string();
        assert!(error.ends_with("key.pem"), "{error}");
        fs::write(&path, "no key").unwrap();
        let error = read(&path).unwrap_err();
        let reason = error.source().unwrap().to_string();
        assert!(error.to_string().ends_with("key.pem"), "{error}");
        assert!(
            reason.contains("expected one PEM block \"PRIVATE KEY\""),
            "{reason}"
        );
        // What is there is never replaced.
        assert!(read_or_make(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"no key");
    }
}
