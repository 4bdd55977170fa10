//! Small records in files of their own: one protobuf message with a version, written whole and durably.
//!
//! Who keeps a record says once what damage means. What must not be guessed is refused: the roles of a node, the member
//! of etcd that its disk is. What is only a convenience is discarded, with a warning, and begins anew. Absent is neither:
//! a file that is not there was never written.
//!
//! Records in two slots (the sealed configuration, the cluster directory, the boot record) have a codec of their own,
//! `hearth_sys::slots`, for they lie on FAT.

use std::error::Error;
use std::path::{Path, PathBuf};

use hearth_api::private::{StoredAddress, StoredMember, StoredMesh, StoredRoles};
use hearth_sys::files::{self, FileError};
use prost::{DecodeError, Message};
use zeroize::Zeroizing;

/// In bytes; all of them are far below.
const MAX_SIZE: u64 = 64 << 10;

/// What becomes of a record that is there and cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDamage {
    /// An error, until somebody does something about it.
    Refuse,
    /// As if it were absent, with a warning.
    Discard,
}

/// A message that is kept in a file.
pub trait Record: Message + Default {
    /// What it is a record of, for messages: "roles".
    const OF: &'static str;
    /// The only version that this software reads and writes.
    const VERSION: u32;
    /// What becomes of one that cannot be understood.
    const ON_DAMAGE: OnDamage;

    /// The version that it was written with.
    fn version(&self) -> u32;
}

/// Says of a message that it is a record.
macro_rules! records {
    ($($message:ty, $of:literal, $version:literal, $on_damage:ident;)*) => {$(
        impl Record for $message {
            const OF: &'static str = $of;
            const VERSION: u32 = $version;
            const ON_DAMAGE: OnDamage = OnDamage::$on_damage;

            fn version(&self) -> u32 {
                self.version
            }
        }
    )*};
}

records! {
    // Empty roles would stop the control plane.
    StoredRoles, "roles", 1, Refuse;
    // As the wrong member etcd would break what the right one has promised.
    StoredMember, "a member of etcd", 1, Refuse;
    // A key can be made anew, but that somebody else's bytes lie there is nothing to pass over.
    StoredMesh, "the mesh", 1, Refuse;
    // The others tell the counter.
    StoredAddress, "an address", 1, Discard;
}

/// A record is of no use.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read or written. Never taken for damage: a disk that does not answer says nothing about what is
    /// on it.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is no such message.
    #[error("{path}: not a record of {of}")]
    Message {
        /// The file.
        path: PathBuf,
        /// What was expected.
        of: &'static str,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// Another version of this software wrote it.
    #[error("{path}: version {found}, this software knows version {known}")]
    Version {
        /// The file.
        path: PathBuf,
        /// What it has.
        found: u32,
        /// What was expected.
        known: u32,
    },
    /// A field has a value that makes no sense.
    #[error("{path}: not a record of {of}")]
    Content {
        /// The file.
        path: PathBuf,
        /// What was expected.
        of: &'static str,
        /// Which field, and what is wrong with it.
        source: Box<dyn Error + Send + Sync>,
    },
}

/// Reads a record; `read` takes what is needed out of the message. `None` if none was ever written, and for damage that
/// is discarded.
pub fn load<T: Record, V, E>(
    path: &Path,
    read: impl FnOnce(T) -> Result<V, E>,
) -> Result<Option<V>, RecordError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    // Some hold secrets.
    let Some(bytes) = files::read_limited(path, MAX_SIZE)?.map(Zeroizing::new) else {
        return Ok(None);
    };
    match (understand(path, &bytes, read), T::ON_DAMAGE) {
        (Ok(value), _) => Ok(Some(value)),
        (Err(error), OnDamage::Refuse) => Err(error),
        (Err(error), OnDamage::Discard) => {
            tracing::warn!("{}: it begins anew", hearth_api::chain(&error));
            Ok(None)
        }
    }
}

fn understand<T: Record, V, E>(
    path: &Path,
    bytes: &[u8],
    read: impl FnOnce(T) -> Result<V, E>,
) -> Result<V, RecordError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let message = T::decode(bytes).map_err(|source| RecordError::Message {
        path: path.to_owned(),
        of: T::OF,
        source,
    })?;
    if message.version() != T::VERSION {
        return Err(RecordError::Version {
            path: path.to_owned(),
            found: message.version(),
            known: T::VERSION,
        });
    }
    read(message).map_err(|error| RecordError::Content {
        path: path.to_owned(),
        of: T::OF,
        source: error.into(),
    })
}

/// Writes a record, durably. What was there stays whole until the new one is.
pub fn save<T: Record>(path: &Path, record: &T) -> Result<(), RecordError> {
    let bytes = Zeroizing::new(record.encode_to_vec());
    Ok(files::write_atomic(path, &bytes, files::PRIVATE_FILE)?)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::fs;

    use super::*;

    fn whole<T>(message: T) -> Result<T, Infallible> {
        Ok(message)
    }

    #[test]
    fn absent_is_not_damaged_and_damage_is_what_its_record_says() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record.pb");
        assert!(load(&path, whole::<StoredRoles>).unwrap().is_none());
        let roles = StoredRoles {
            version: 1,
            roles: None,
        };
        save(&path, &roles).unwrap();
        assert_eq!(load(&path, whole).unwrap(), Some(roles));

        for (bytes, wrong) in [
            (&b"\xff"[..], "not a record of roles"),
            (b"", "version 0, this software knows version 1"),
            (b"\x08\x02", "version 2, this software knows version 1"),
        ] {
            fs::write(&path, bytes).unwrap();
            let error = load(&path, whole::<StoredRoles>).unwrap_err().to_string();
            assert!(error.ends_with(wrong), "{error}");
            assert!(load(&path, whole::<StoredAddress>).unwrap().is_none());
        }

        save(
            &path,
            &StoredAddress {
                version: 1,
                ..StoredAddress::default()
            },
        )
        .unwrap();
        let read = |_: StoredAddress| -> Result<(), _> { Err("host: expected an address") };
        assert!(load(&path, read).unwrap().is_none());
        // What cannot be read is no damage.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = load(&path, whole::<StoredAddress>).unwrap_err();
        assert!(matches!(error, RecordError::File(_)), "{error}");
    }
}
