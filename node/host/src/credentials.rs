//! The node's credentials on its data partition: certificate and CA in DER, the key in PKCS #8 DER.
//!
//! The certificate is written last. If it exists, all three files do; if it does not, the node has
//! no credentials, whatever other files are there.

use hearth_api::identity::{KeyError, NodeCredentials, NodeKey};
use hearth_sys::files::{self, FileError};
use rustls_pki_types::CertificateDer;
use zeroize::Zeroizing;

use crate::layout::KeyFiles;

/// Our certificates and keys are well below 1 KiB.
const LARGEST_FILE: u64 = 64 << 10;

/// Why credentials could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read or written.
    #[error("cannot access the node's credentials")]
    File(#[from] FileError),
    /// The certificate exists, but this file does not.
    #[error("cannot read the node's credentials: {path} is missing")]
    Missing {
        /// The file.
        path: String,
    },
    /// The file is not a valid key.
    #[error("cannot read the node's key {path}")]
    Key {
        /// The file.
        path: String,
        /// Why it is not valid.
        source: KeyError,
    },
}

/// Saves the credentials. Idempotent; they are durable when this returns.
pub fn save(files: &KeyFiles, credentials: &NodeCredentials) -> Result<(), CredentialsError> {
    let key = credentials.key.expose_pkcs8_der();
    files::write_atomic(&files.key(), &key, files::PRIVATE_FILE)?;
    files::write_atomic(&files.ca(), &credentials.ca, files::PRIVATE_FILE)?;
    files::write_atomic(
        &files.certificate(),
        &credentials.certificate,
        files::PRIVATE_FILE,
    )?;
    Ok(())
}

/// Replaces the certificate of saved credentials by a newer one of the same key. It is durable when
/// this returns.
pub fn save_certificate(
    files: &KeyFiles,
    certificate: &CertificateDer<'_>,
) -> Result<(), CredentialsError> {
    files::write_atomic(&files.certificate(), certificate, files::PRIVATE_FILE)?;
    Ok(())
}

/// Reads the credentials; `None` if none have been saved.
pub fn load(files: &KeyFiles) -> Result<Option<NodeCredentials>, CredentialsError> {
    let Some(certificate) = files::read_limited(&files.certificate(), LARGEST_FILE)? else {
        return Ok(None);
    };
    let required = |path: std::path::PathBuf| {
        files::read_limited(&path, LARGEST_FILE)?.ok_or_else(|| CredentialsError::Missing {
            path: path.display().to_string(),
        })
    };
    let key = Zeroizing::new(required(files.key())?);
    let key = NodeKey::from_pkcs8_der(&key).map_err(|source| CredentialsError::Key {
        path: files.key().display().to_string(),
        source,
    })?;
    Ok(Some(NodeCredentials {
        key,
        certificate: CertificateDer::from(certificate),
        ca: CertificateDer::from(required(files.ca())?),
    }))
}

/// Erases the credentials: overwrites the key, then removes all files. Succeeds if there are none.
pub fn erase(files: &KeyFiles) -> Result<(), CredentialsError> {
    files::remove_durably(&files.certificate())?;
    files::erase_durably(&files.key())?;
    files::remove_durably(&files.ca())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_api::stored_form;

    use super::*;
    use crate::layout::Root;

    #[test]
    fn credentials_are_all_there_or_none() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::under(base.path());
        fs::create_dir(root.data.path()).unwrap();
        root.data.make_directories().unwrap();
        let files = root.data.node().credentials();
        let credentials = NodeCredentials {
            key: NodeKey::generate(),
            certificate: CertificateDer::from(b"certificate".to_vec()),
            ca: CertificateDer::from(b"authority".to_vec()),
        };
        save(&files, &credentials).unwrap();
        let loaded = load(&files).unwrap().unwrap();
        assert_eq!(loaded.key.public(), credentials.key.public());
        assert_eq!(loaded.certificate, credentials.certificate);
        assert_eq!(loaded.ca, credentials.ca);

        fs::write(files.key(), "damaged").unwrap();
        assert!(matches!(load(&files), Err(CredentialsError::Key { .. })));
        fs::remove_file(files.key()).unwrap();
        assert!(matches!(
            load(&files),
            Err(CredentialsError::Missing { .. })
        ));
        fs::remove_file(files.certificate()).unwrap();
        assert!(load(&files).unwrap().is_none());

        save(&files, &credentials).unwrap();
        for _ in 0..2 {
            erase(&files).unwrap();
            assert!(load(&files).unwrap().is_none());
            assert_eq!(fs::read_dir(files.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn the_stored_form_stays() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::under(base.path());
        fs::create_dir(root.data.path()).unwrap();
        root.data.make_directories().unwrap();
        let files = root.data.node().credentials();
        let credentials = NodeCredentials {
            key: NodeKey::from_seed([0x11; 32]),
            certificate: CertificateDer::from(b"a certificate".to_vec()),
            ca: CertificateDer::from(b"an authority".to_vec()),
        };
        save(&files, &credentials).unwrap();
        // Certificates are stored as plain DER, without an envelope.
        assert_eq!(fs::read(files.certificate()).unwrap(), b"a certificate");
        assert_eq!(fs::read(files.ca()).unwrap(), b"an authority");
        let key = stored_form!("credentials-key.der", fs::read(files.key()).unwrap());
        fs::write(files.key(), key).unwrap();
        let read = load(&files).unwrap().unwrap();
        assert_eq!(*read.key.expose_seed(), [0x11; 32]);
        assert_eq!(read.certificate, credentials.certificate);
        assert_eq!(read.ca, credentials.ca);
    }
}
