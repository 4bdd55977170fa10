//! The node's WireGuard key and its pod range, on the data partition.

use std::path::Path;

use hearth_api::identity::{KeyError, MeshSecret};
use hearth_api::private::StoredMesh;
use hearth_host::networking::{NetworkingError, PodRange};
use hearth_host::record::{self, Record as _, RecordError};
use zeroize::Zeroize as _;

/// The stored state.
pub(super) struct Kept {
    pub secret: MeshSecret,
    /// The last answer of the curators, if there was one.
    pub range: Option<PodRange>,
}

/// Loads the state, or generates a key, which is stored before it is used.
///
/// A record that cannot be read is an error: a key could be generated again, but unexpected content
/// of the file must not be ignored.
pub(super) fn load_or_make(path: &Path) -> Result<Kept, RecordError> {
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

fn load(path: &Path) -> Result<Option<Kept>, RecordError> {
    record::load(path, |mut stored: StoredMesh| {
        let secret = MeshSecret::try_from(&stored.private_key[..]);
        stored.private_key.zeroize();
        let range = match &stored.pod_range[..] {
            "" => Ok(None),
            range => range.parse().map(Some),
        };
        Ok::<_, FieldError>(Kept {
            secret: secret.map_err(FieldError::Key)?,
            range: range.map_err(FieldError::Range)?,
        })
    })
}

/// A field of the record is invalid.
#[derive(Debug, thiserror::Error)]
enum FieldError {
    #[error("private_key")]
    Key(#[source] KeyError),
    #[error("pod_range")]
    Range(#[source] NetworkingError),
}

/// Stores the state durably.
pub(super) fn save(path: &Path, kept: &Kept) -> Result<(), RecordError> {
    let range = kept.range.map(|range| range.to_string());
    let mut stored = StoredMesh {
        version: StoredMesh::VERSION,
        private_key: kept.secret.expose().to_vec(),
        pod_range: range.unwrap_or_default(),
    };
    let saved = record::save(path, &stored);
    stored.private_key.zeroize();
    saved
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
        let range = "10.208.3.0/24".parse().ok();
        let secret = made.secret;
        let public = secret.public();
        save(&path, &Kept { secret, range }).unwrap();
        let again = load_or_make(&path).unwrap();
        assert_eq!((again.secret.public(), again.range), (public, range));

        for (bytes, said) in [
            (&b"\xff\xff"[..], "not a valid mesh record"),
            (b"", "version: expected 1, got 0"),
            (b"\x08\x01", "private_key"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = hearth_api::chain(&load_or_make(&path).err().unwrap());
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
        let range = "10.208.3.0/24".parse().ok();
        save(&path, &kept(range)).unwrap();
        let written = std::fs::read(&path).unwrap();
        read(stored_form!("mesh.pb", written), range);
    }
}
