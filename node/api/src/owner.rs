//! The owner's files: the owner key and the first-contact secret.
//!
//! The owner creates both before bootstrap, puts the public key and the secret into the first
//! node's parameters, and needs both again to take ownership. The key is PKCS #8 in PEM, which
//! other tools can read and write; the secret is one line of hexadecimal digits. Both are created
//! once, never overwritten, and readable by their owner only: a file that others can read is
//! rejected.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::identity::{FirstContactSecret, OwnerKey};

/// Ours have about a hundred bytes.
const MAX_KEY_FILE_SIZE: u64 = 4096;

/// A file of the owner cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OwnerFileError {
    /// The file exists already.
    #[error("{path} already exists; not overwriting a key that may be in use")]
    Exists {
        /// The file's path.
        path: PathBuf,
    },
    /// The file cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file's path.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file's path.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file is readable by others.
    #[error("{path} is readable by others (mode {mode:03o}); run chmod 600 {path}")]
    Open {
        /// The file's path.
        path: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// The content is not what is expected.
    #[error("{path}: expected {wanted}")]
    Content {
        /// The file's path.
        path: PathBuf,
        /// The expected content.
        wanted: &'static str,
    },
}

/// Generates an owner key and writes it to a new file.
pub fn create_key(path: &Path) -> Result<OwnerKey, OwnerFileError> {
    let key = OwnerKey::generate();
    write_new(path, key.expose_pkcs8_pem().as_bytes())?;
    Ok(key)
}

/// Reads an owner key.
pub fn read_key(path: &Path) -> Result<OwnerKey, OwnerFileError> {
    OwnerKey::from_pkcs8_pem(&read(path)?).map_err(|_| OwnerFileError::Content {
        path: path.to_owned(),
        wanted: "an Ed25519 private key, PKCS #8 in PEM",
    })
}

/// Generates a first-contact secret and writes it to a new file.
pub fn create_first_contact_secret(path: &Path) -> Result<FirstContactSecret, OwnerFileError> {
    let secret = FirstContactSecret::generate();
    let line = Zeroizing::new(format!(
        "{}\n",
        &*Zeroizing::new(hex::encode(secret.expose()))
    ));
    write_new(path, line.as_bytes())?;
    Ok(secret)
}

/// Reads a first-contact secret.
pub fn read_first_contact_secret(path: &Path) -> Result<FirstContactSecret, OwnerFileError> {
    let text = read(path)?;
    let mut bytes = Zeroizing::new([0; 32]);
    hex::decode_to_slice(text.trim(), &mut bytes[..]).map_err(|_| OwnerFileError::Content {
        path: path.to_owned(),
        wanted: "64 hexadecimal digits",
    })?;
    Ok(FirstContactSecret::from_bytes(*bytes))
}

/// Writes a file that must not exist yet, completely or not at all.
fn write_new(path: &Path, content: &[u8]) -> Result<(), OwnerFileError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists => OwnerFileError::Exists {
            path: path.to_owned(),
        },
        _ => OwnerFileError::Write {
            path: path.to_owned(),
            source,
        },
    };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    written.map_err(|error| {
        // Half a key is worse than none; the first error is the one to report.
        let _ = fs::remove_file(path);
        failed(error)
    })
}

fn read(path: &Path) -> Result<Zeroizing<String>, OwnerFileError> {
    let failed = |source| OwnerFileError::Read {
        path: path.to_owned(),
        source,
    };
    let file = fs::File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(OwnerFileError::Open {
            path: path.to_owned(),
            mode,
        });
    }
    let mut text = Zeroizing::new(String::new());
    file.take(MAX_KEY_FILE_SIZE)
        .read_to_string(&mut text)
        .map_err(failed)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn keys_and_secrets_read_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("owner-key.pem");
        let key = create_key(&path).expect("made");
        assert_eq!(read_key(&path).expect("read").public(), key.public());
        let text = fs::read_to_string(&path).expect("text");
        assert!(text.starts_with("-----BEGIN PRIVATE KEY-----\n"), "{text}");

        let path = folder.path().join("first-contact-secret");
        let secret = create_first_contact_secret(&path).expect("made");
        assert_eq!(read_first_contact_secret(&path).expect("read"), secret);
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn nothing_is_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let key = create_key(&path).expect("made");
        assert!(matches!(
            create_key(&path),
            Err(OwnerFileError::Exists { .. })
        ));
        assert_eq!(read_key(&path).expect("still there").public(), key.public());
    }

    #[test]
    fn what_others_can_read_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        create_key(&path).expect("made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("chmod");
        let error = read_key(&path).expect_err("refused");
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn other_content_is_told_but_not_shown() {
        let folder = tempfile::tempdir().expect("a folder");
        for content in [
            "",
            "a5a5",
            "-----BEGIN PRIVATE KEY-----\na5a5\n-----END PRIVATE KEY-----\n",
        ] {
            let path = folder.path().join(format!("{}", content.len()));
            write_new(&path, content.as_bytes()).expect("written");
            let error = read_key(&path).expect_err("no key");
            assert!(matches!(error, OwnerFileError::Content { .. }), "{error}");
            assert!(!error.to_string().contains("a5a5"), "{error}");
            let error = read_first_contact_secret(&path).expect_err("no secret");
            assert!(matches!(error, OwnerFileError::Content { .. }), "{error}");
        }
    }
}
