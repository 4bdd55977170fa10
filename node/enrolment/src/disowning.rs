//! What a node does that its cluster has removed: it forgets its keys.
//!
//! The sealed configuration goes first, to phase DISOWNED. From then on the
//! node is nobody, whatever else still lies on its disk; the rest is wiped by
//! whoever comes next, this boot or a later one.
//!
//! An encrypted data partition is lost with the node unlock key that the sealed
//! configuration held. What lies on an INSECURE one is removed: the credentials,
//! the roles, and the member of consensus with all that it has. Of a node that
//! runs the keys and the roles go at once ([`forget`]); etcd's directory goes
//! when etcd has ended, so the control plane does that ([`wipe`]): removed below
//! a running etcd it would be half there again.

use std::{fs, io, path::PathBuf};

use hearth_host::credentials::{self, CredentialsError};
use hearth_host::failpoint;
use hearth_host::layout::Data;
use hearth_sys::files::{self, FileError};

use super::sealed::{Disowned, Sealed, SealedError, SealedStore};

/// Why something is left.
#[derive(Debug, thiserror::Error)]
pub enum WipeError {
    /// The credentials.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A directory.
    #[error("cannot remove {}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Takes the keys out of the sealed configuration, for ever.
pub fn seal(store: &SealedStore, disowned: Disowned) -> Result<(), SealedError> {
    failpoint!("enrolment.sealed_disowned.before");
    store.save(&Sealed::Disowned(disowned))?;
    failpoint!("enrolment.sealed_disowned.after");
    Ok(())
}

/// Removes the keys and the roles from a data partition that is mounted,
/// whatever still runs. May be repeated.
pub fn forget(data: &Data) -> Result<(), WipeError> {
    credentials::erase(&data.node().credentials())?;
    credentials::erase(&data.etcd().peer())?;
    files::remove_durably(&data.node().roles())?;
    Ok(())
}

/// Removes all that a member keeps on a data partition that is mounted. etcd
/// must have ended. May be repeated.
pub fn wipe(data: &Data) -> Result<(), WipeError> {
    failpoint!("disowning.wiped.before");
    forget(data)?;
    let etcd = data.etcd().path().to_owned();
    match fs::remove_dir_all(&etcd) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(WipeError::Directory { path: etcd, source });
        }
        _ => files::sync_dir(data.path())?,
    }
    failpoint!("disowning.wiped.after");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_host::layout::Root;

    #[test]
    fn nothing_of_a_member_is_left() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::under(base.path());
        fs::create_dir(root.data.path()).unwrap();
        root.data.make_directories().unwrap();
        let data = &root.data;
        for files in [data.node().credentials(), data.etcd().peer()] {
            for path in [files.ca(), files.certificate(), files.key()] {
                fs::write(path, "secret").unwrap();
            }
        }
        fs::write(data.node().roles(), "roles").unwrap();
        fs::create_dir(data.etcd().data()).unwrap();
        fs::write(data.etcd().data().join("db"), "records").unwrap();
        fs::write(data.etcd().authorities(), "CA").unwrap();

        // What etcd may have open stays until it has ended.
        forget(data).unwrap();
        assert!(data.etcd().data().join("db").exists());
        for files in [data.node().credentials(), data.etcd().peer()] {
            assert_eq!(fs::read_dir(files.path()).unwrap().count(), 0);
        }
        assert!(!data.node().roles().exists());

        // Again and again, as after power cuts.
        for _ in 0..2 {
            wipe(data).unwrap();
            assert!(!data.etcd().path().exists());
            assert!(!data.node().roles().exists());
            let credentials = fs::read_dir(data.node().credentials().path()).unwrap();
            assert_eq!(credentials.count(), 0);
        }
    }
}
