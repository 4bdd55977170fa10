//! Wipes the keys of a node that its cluster has removed.
//!
//! First the sealed configuration is saved in phase DISOWNED, without keys. From then on the node
//! has no identity, whatever else is on its disk; a later run, in this boot or the next, wipes the
//! rest.
//!
//! An encrypted data partition is lost with the node unlock key in the sealed configuration. On an
//! INSECURE one everything that opens anything is overwritten and removed: the credentials, the key
//! of the pod network, the roles, and the etcd member with its data, which have the cluster's
//! certificate authorities and all nodes' unlock keys. On a running node the keys and the roles are
//! removed at once ([`forget`]); etcd's directory is removed by the control plane once etcd has
//! exited ([`wipe`]), since a running etcd would create parts of it again.

use hearth_host::credentials::{self, CredentialsError};
use hearth_host::failpoint;
use hearth_host::layout::Data;
use hearth_sys::files::{self, FileError};

use super::sealed::{Disowned, Sealed, SealedError, SealedStore};

/// Why the data could not be wiped.
#[derive(Debug, thiserror::Error)]
pub enum WipeError {
    /// The credentials could not be erased.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// A file could not be removed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Removes the keys from the sealed configuration, permanently.
pub fn seal(store: &SealedStore, disowned: Disowned) -> Result<(), SealedError> {
    failpoint!("enrolment.sealed_disowned.before");
    store.save(&Sealed::Disowned(disowned))?;
    failpoint!("enrolment.sealed_disowned.after");
    Ok(())
}

/// Removes the keys and the roles from a mounted data partition, while programs may still run. May
/// be repeated.
pub fn forget(data: &Data) -> Result<(), WipeError> {
    credentials::erase(&data.node().credentials())?;
    credentials::erase(&data.etcd().peer())?;
    files::erase_durably(&data.node().mesh())?;
    files::remove_durably(&data.node().roles())?;
    Ok(())
}

/// Removes everything of a member from a mounted data partition. etcd must have exited. May be
/// repeated.
pub fn wipe(data: &Data) -> Result<(), WipeError> {
    failpoint!("disowning.wiped.before");
    forget(data)?;
    files::erase_directory(data.etcd().path())?;
    failpoint!("disowning.wiped.after");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_host::layout::Root;

    use super::*;

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
        fs::write(data.node().mesh(), "secret").unwrap();
        fs::create_dir(data.etcd().data()).unwrap();
        fs::write(data.etcd().data().join("db"), "records").unwrap();
        fs::write(data.etcd().authorities(), "CA").unwrap();

        // Files that etcd may have open stay until it has exited.
        forget(data).unwrap();
        assert!(data.etcd().data().join("db").exists());
        for files in [data.node().credentials(), data.etcd().peer()] {
            assert_eq!(fs::read_dir(files.path()).unwrap().count(), 0);
        }
        assert!(!data.node().roles().exists());
        assert!(!data.node().mesh().exists());

        // Twice, as after a power cut.
        for _ in 0..2 {
            wipe(data).unwrap();
            assert!(!data.etcd().path().exists());
            assert!(!data.node().roles().exists());
            let credentials = fs::read_dir(data.node().credentials().path()).unwrap();
            assert_eq!(credentials.count(), 0);
        }
    }
}
