//! Small records, each in a file of its own: one versioned protobuf message, written atomically and
//! durably.
//!
//! Each record type defines how corruption is handled. If guessing would be wrong, the record is
//! rejected: the roles of a node, the etcd member on its disk. If the record is only a convenience,
//! it is discarded with a warning. Absent is different from corrupt: a file that does not exist was
//! never written.
//!
//! Records in two slots (the sealed configuration, the cluster directory, the boot record) use
//! `hearth_sys::slots` instead, because they are stored on FAT.

use std::error::Error;
use std::path::{Path, PathBuf};

use hearth_api::private::{
    StoredAddress, StoredControllerKey, StoredDisk, StoredMember, StoredMesh, StoredRoles,
    StoredStarts,
};
use hearth_sys::files::{self, FileError};
use prost::{DecodeError, Message};
use zeroize::Zeroizing;

/// Maximum size in bytes; all records are far smaller.
const MAX_SIZE: u64 = 64 << 10;

/// How a record is handled that exists but is corrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDamage {
    /// Return an error until an operator repairs it.
    Refuse,
    /// Treat it as absent and log a warning.
    Discard,
}

/// A message that is stored in a file.
pub trait Record: Message + Default {
    /// The kind of record, for messages: "roles".
    const OF: &'static str;
    /// The only version that this software reads and writes.
    const VERSION: u32;
    /// How a corrupt record is handled.
    const ON_DAMAGE: OnDamage;

    /// The version with which the message was written.
    fn version(&self) -> u32;
}

/// Implements [`Record`] for messages.
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
    // Running as the wrong member would break the guarantees of etcd.
    StoredMember, "etcd member", 1, Refuse;
    // A disk that went back in time would pass for the right one.
    StoredStarts, "etcd starts", 1, Refuse;
    // A key could be generated again, but foreign bytes in the file must not be ignored.
    StoredMesh, "mesh", 1, Refuse;
    StoredDisk, "disk of a volume", 1, Refuse;
    // Without it the node opens no Secret any more.
    StoredControllerKey, "controller key", 1, Refuse;
    // The counter can be recovered from other nodes.
    StoredAddress, "address", 1, Discard;
}

/// A record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read or written. Never treated as corruption: an I/O error says nothing
    /// about the content.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not such a message.
    #[error("{path}: not a valid {of} record")]
    Message {
        /// The file.
        path: PathBuf,
        /// The kind of record.
        of: &'static str,
        /// The error of the decoder.
        source: DecodeError,
    },
    /// The record has another version.
    #[error("{path}: version: expected {known}, got {found}")]
    Version {
        /// The file.
        path: PathBuf,
        /// The actual version.
        found: u32,
        /// The supported version.
        known: u32,
    },
    /// A field has an invalid value.
    #[error("{path}: not a valid {of} record")]
    Content {
        /// The file.
        path: PathBuf,
        /// The kind of record.
        of: &'static str,
        /// The field, and why it is invalid.
        source: Box<dyn Error + Send + Sync>,
    },
}

/// Reads a record; `read` converts the message. `None` if none was ever written, and for a corrupt
/// record that is discarded.
pub fn load<T: Record, V, E>(
    path: &Path,
    read: impl FnOnce(T) -> Result<V, E>,
) -> Result<Option<V>, RecordError>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    // Some records hold secrets.
    let Some(bytes) = files::read_limited(path, MAX_SIZE)?.map(Zeroizing::new) else {
        return Ok(None);
    };
    match (understand(path, &bytes, read), T::ON_DAMAGE) {
        (Ok(value), _) => Ok(Some(value)),
        (Err(error), OnDamage::Refuse) => Err(error),
        (Err(error), OnDamage::Discard) => {
            tracing::warn!("{}: discarding the record", hearth_api::chain(&error));
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

/// Writes a record, atomically and durably.
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
            settings: Vec::new(),
        };
        save(&path, &roles).unwrap();
        assert_eq!(load(&path, whole).unwrap(), Some(roles));

        for (bytes, wrong) in [
            (&b"\xff"[..], "not a valid roles record"),
            (b"", "version: expected 1, got 0"),
            (b"\x08\x02", "version: expected 1, got 2"),
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
        // A read error is not corruption.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = load(&path, whole::<StoredAddress>).unwrap_err();
        assert!(matches!(error, RecordError::File(_)), "{error}");
    }
}
