//! The node's key of the mesh, and the range that was given for it, on the data
//! partition.

use std::path::{Path, PathBuf};

use hearth_api::identity::{KeyError, MeshSecret};
use hearth_api::private::StoredMesh;
use hearth_host::networking::{NetworkingError, PodRange};
use hearth_sys::files::{self, FileError};
use prost::Message as _;
use zeroize::{Zeroize as _, Zeroizing};

const VERSION: u32 = 1;
const MAX_SIZE: u64 = 4 << 10;
const PRIVATE: u32 = 0o600;

/// What is kept.
pub(super) struct Kept {
    pub secret: MeshSecret,
    /// As the curators have answered last, if they have.
    pub range: Option<PodRange>,
}

/// What is kept is of no use.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeptError {
    /// The disk.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is no such record.
    #[error("{path}: not a record of the mesh")]
    Content {
        path: PathBuf,
        source: prost::DecodeError,
    },
    /// It was written by another version.
    #[error("{path}: version {found}, this software knows version {VERSION}")]
    Version { path: PathBuf, found: u32 },
    /// Its key is none.
    #[error("{path}: private_key")]
    Key { path: PathBuf, source: KeyError },
    /// Its range is none.
    #[error("{path}")]
    Range {
        path: PathBuf,
        source: NetworkingError,
    },
}

/// What is on disk, or a new key, which is there before it is used.
///
/// A record that cannot be read stops whoever asks: a key can be made anew, but
/// that somebody else's bytes lie there is nothing to pass over.
pub(super) fn load_or_make(path: &Path) -> Result<Kept, KeptError> {
    if let Some(kept) = load(path)? {
        return Ok(kept);
    }
    let kept = Kept {
        secret: MeshSecret::generate(),
        range: None,
    };
    save(path, &kept)?;
    Ok(kept)
}

fn load(path: &Path) -> Result<Option<Kept>, KeptError> {
    let Some(bytes) = files::read_limited(path, MAX_SIZE)? else {
        return Ok(None);
    };
    let bytes = Zeroizing::new(bytes);
    let path = || path.to_owned();
    let mut stored = StoredMesh::decode(&bytes[..]).map_err(|source| KeptError::Content {
        path: path(),
        source,
    })?;
    let secret = MeshSecret::try_from(&stored.private_key[..]);
    stored.private_key.zeroize();
    if stored.version != VERSION {
        return Err(KeptError::Version {
            path: path(),
            found: stored.version,
        });
    }
    let range = match &stored.pod_range[..] {
        "" => Ok(None),
        range => range.parse().map(Some),
    };
    Ok(Some(Kept {
        secret: secret.map_err(|source| KeptError::Key {
            path: path(),
            source,
        })?,
        range: range.map_err(|source| KeptError::Range {
            path: path(),
            source,
        })?,
    }))
}

/// Keeps it, durably.
pub(super) fn save(path: &Path, kept: &Kept) -> Result<(), KeptError> {
    let range = kept.range.map(|range| range.to_string());
    let mut stored = StoredMesh {
        version: VERSION,
        private_key: kept.secret.expose().to_vec(),
        pod_range: range.unwrap_or_default(),
    };
    let bytes = Zeroizing::new(stored.encode_to_vec());
    stored.private_key.zeroize();
    Ok(files::write_atomic(path, &bytes, PRIVATE)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use hearth_api::stored_form;

    use super::*;

    #[test]
    fn a_key_is_made_once_and_nonsense_is_no_key() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mesh.pb");
        let made = load_or_make(&path).unwrap();
        assert_eq!(made.range, None);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let range = PodRange::all().nth(3);
        let secret = made.secret;
        let public = secret.public();
        save(&path, &Kept { secret, range }).unwrap();
        let again = load_or_make(&path).unwrap();
        assert_eq!((again.secret.public(), again.range), (public, range));

        for (bytes, said) in [
            (&b"\xff\xff"[..], "not a record"),
            (b"", "version 0"),
            (b"\x08\x01", "private_key"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = load_or_make(&path).err().unwrap().to_string();
            assert!(error.contains(said), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), bytes, "it stays");
        }
    }

    #[test]
    fn the_stored_form_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mesh.pb");
        let kept = |range| Kept {
            secret: MeshSecret::try_from(&[0x11; 32][..]).unwrap(),
            range,
        };
        let read = |stored: Vec<u8>, range| {
            std::fs::write(&path, stored).unwrap();
            let read = load(&path).unwrap().unwrap();
            assert_eq!(read.secret.expose(), kept(range).secret.expose());
            assert_eq!(read.range, range);
        };
        save(&path, &kept(None)).unwrap();
        let written = std::fs::read(&path).unwrap();
        read(stored_form!("mesh-without-range.pb", written), None);
        let range = PodRange::all().nth(3);
        save(&path, &kept(range)).unwrap();
        let written = std::fs::read(&path).unwrap();
        read(stored_form!("mesh.pb", written), range);
    }
}
