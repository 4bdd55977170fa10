//! Which etcd made the store on the disk, noted beside it.
//!
//! etcd opens the stores of its own minor version and of the one before. A store of an older one makes it panic with a
//! message that names neither of them ("unmarshal should never fail"), after it has opened the write-ahead log. So the
//! version is checked before etcd is started.
//!
//! etcd notes the version in the database itself, but since 3.6 only, and late: with the first cluster version that the
//! members agree on. Reading it would need a reader of that format, of a file that a power cut may have left with two
//! meta pages. Stores are made by this node alone, so a file of ours tells the same: it is written, durably, before
//! etcd makes a store, and a store without it was made by the images before it, all of which had etcd 3.4.
//!
//! A store of the version before is noted as of this one before etcd first opens it. From then on, an image with the
//! version before refuses it, whether or not etcd has changed it yet: when etcd does that depends on the other members.
//! If power is cut in between, the note is ahead of the store, which harms nothing: the etcd that it names opens both.

use std::path::PathBuf;

use hearth_host::layout;
use hearth_sys::files::{self, FileError};

/// The minor version of etcd in the image.
const ETCD: &str = "3.7";

/// The one before, whose stores it opens as well.
const BEFORE: &str = "3.6";

/// The version of the stores that have no note.
const BEFORE_NOTES: &str = "3.4";

/// The longest note, in bytes.
const LONGEST: u64 = 64;

/// The store on the disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum StoreVersionError {
    /// It is of another version.
    #[error(
        "the store in {data} is of etcd {found}, which etcd {ETCD} in this image cannot open (only {BEFORE} and \
         {ETCD}): boot the image that the node had before, or, if other consensus members have the data, decommission the \
         node and register it again"
    )]
    Other {
        /// etcd's data directory.
        data: PathBuf,
        /// The version of the store.
        found: String,
    },
    /// The note could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Refuses a store that the etcd in the image cannot open, and notes durably that this etcd has the others from now on;
/// must precede it.
pub(crate) fn admit(etcd: &layout::Etcd) -> Result<(), StoreVersionError> {
    let noted = files::read_limited(&etcd.store_version(), LONGEST)?;
    let found = noted.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
    let found = found.unwrap_or_else(|| BEFORE_NOTES.to_owned());
    match &found[..] {
        ETCD => Ok(()),
        BEFORE => {
            note(etcd)?;
            tracing::info!("the store of etcd {BEFORE} is one of etcd {ETCD} from now on");
            Ok(())
        }
        _ => Err(StoreVersionError::Other {
            data: etcd.data(),
            found,
        }),
    }
}

/// Notes durably that the etcd in the image makes the store; must precede it.
pub(crate) fn note(etcd: &layout::Etcd) -> Result<(), StoreVersionError> {
    let line = format!("{ETCD}\n");
    Ok(files::write_atomic(
        &etcd.store_version(),
        line.as_bytes(),
        files::PRIVATE_FILE,
    )?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use hearth_host::layout::Root;
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    fn disk() -> (TempDir, layout::Etcd) {
        let directory = tempfile::tempdir().unwrap();
        let data = Root::under(directory.path()).data;
        data.make_directories().unwrap();
        let etcd = data.etcd();
        (directory, etcd)
    }

    /// Admits a store with this note, if any; returns the note afterwards, or the error.
    fn admitted(note: Option<&str>) -> Result<String, String> {
        let (_directory, etcd) = disk();
        if let Some(note) = note {
            std::fs::write(etcd.store_version(), note).unwrap();
        }
        let done = admit(&etcd).map_err(|error| error.to_string());
        let left = std::fs::read_to_string(etcd.store_version()).ok();
        if done.is_err() {
            assert_eq!(
                left.as_deref(),
                note,
                "a store that is refused is left alone"
            );
        }
        done.map(|()| left.unwrap())
    }

    #[test]
    fn a_step_of_one_minor_version_is_noted() {
        for note in ["3.7\n", "3.6\n"] {
            assert_eq!(admitted(Some(note)).as_deref(), Ok("3.7\n"), "{note}");
        }
        let (_directory, etcd) = disk();
        note(&etcd).unwrap();
        admit(&etcd).unwrap();
    }

    #[test]
    fn stores_of_other_versions_are_refused_by_name() {
        let refused = |note| admitted(note).unwrap_err();
        let error = refused(None);
        assert!(error.contains("is of etcd 3.4, which etcd 3.7"), "{error}");
        assert!(error.contains("(only 3.6 and 3.7)"), "{error}");
        for other in ["3.4", "3.5", "3.8", "3.10", "4.7", "37", "3.6.1", "3"] {
            let error = refused(Some(other));
            let told = format!("is of etcd {other}, which");
            assert!(error.contains(&told), "{error}");
        }
    }

    proptest! {
        #[test]
        fn whatever_the_note_is_only_two_versions_are_admitted(
            note in prop_oneof!["\\PC{0,20}", "[ ]?3\\.[0-9]{1,2}\n?"],
        ) {
            let two = ["3.6", "3.7"].contains(&note.trim());
            prop_assert_eq!(admitted(Some(&note)).is_ok(), two);
        }
    }

    /// With a new etcd, both have to move, and there is a new store for the test of the step (`tests.rs`).
    #[test]
    fn the_versions_are_those_of_the_image_and_the_one_before() {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let go_mod = manifest.join("../../image/programs/etcd/go.mod");
        let text = std::fs::read_to_string(go_mod).unwrap();
        let required = format!("go.etcd.io/etcd/server/v3 v{ETCD}.");
        assert!(text.contains(&required), "{text}");
        let minor = |version: &str| version.strip_prefix("3.").unwrap().parse::<u32>();
        assert_eq!(minor(BEFORE).unwrap() + 1, minor(ETCD).unwrap());
    }
}
