//! The cluster directory on the ESP: the curators that a node contacts after a reboot.
//!
//! The directory is optional: if it is lost or corrupt, the node continues without it. The node may
//! be a curator itself, or get addresses from other nodes. So corruption is reported, and the next
//! save overwrites it.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_api::identity::NodeId;
use hearth_api::private::StoredDirectory;
use hearth_api::v1::ClusterDirectory;
use hearth_sys::files::FileError;
use hearth_sys::slots::{FileSlot, Loaded, SlotError, SlotFormat, SlotPair};
use prost::{DecodeError, Message};

use crate::esp_writes::LastWrite;
use crate::layout::Esp;

const VERSION: u32 = 1;
const FORMAT: SlotFormat = SlotFormat {
    magic: *b"HRTHCDIR",
    version: VERSION,
};

/// Why the directory could not be read or saved.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The slots cannot be read or written, or neither is valid.
    #[error("cannot access the cluster directory on the ESP")]
    Slots(#[from] SlotError),
    /// The directory of the state files cannot be created.
    #[error("cannot create the cluster directory on the ESP")]
    File(#[from] FileError),
    /// A slot is valid, but its content cannot be decoded.
    #[error("cannot decode the cluster directory on the ESP")]
    Content(#[from] DecodeError),
}

/// The directory on an ESP. A node has one instance, because it remembers which slot's last write failed.
#[derive(Debug)]
pub struct DirectoryStore {
    esp: Esp,
    /// Locked while the ESP is written: the writing thread may outlive a worker that is cancelled.
    slots: Mutex<SlotPair<FileSlot>>,
    last_write: LastWrite,
}

impl DirectoryStore {
    /// The store on this ESP.
    pub fn new(esp: &Esp) -> Self {
        Self {
            esp: esp.clone(),
            slots: Mutex::new(esp.cluster_directory().slots(&[FORMAT])),
            last_write: LastWrite::none(),
        }
    }

    /// How the last write ended.
    pub fn last_write(&self) -> &LastWrite {
        &self.last_write
    }

    /// Reads the directory; `None` if none has been saved.
    pub fn load(&self) -> Result<Option<ClusterDirectory>, DirectoryError> {
        directory_of(self.slots().load()?)
    }

    /// Has the ESP hold this directory, durably and in both slots; returns whether it had to be written. Corrupt slots
    /// are overwritten.
    pub fn save(&self, directory: &ClusterDirectory) -> Result<bool, DirectoryError> {
        self.last_write.note(self.keep(directory))
    }

    fn keep(&self, directory: &ClusterDirectory) -> Result<bool, DirectoryError> {
        let mut slots = self.slots();
        match slots.load() {
            Ok(loaded @ Loaded::Value { whole: true, .. }) => match directory_of(loaded) {
                Ok(Some(saved)) if saved == *directory => return Ok(false),
                Ok(_) => {}
                Err(error) => warn(&error),
            },
            // With one slot only, it would not survive the loss of that one.
            Ok(_) => {}
            Err(error) => warn(&error.into()),
        }
        self.esp.make_directories()?;
        let record = encode(directory);
        slots.save_over(&record)?;
        Ok(true)
    }

    fn slots(&self) -> MutexGuard<'_, SlotPair<FileSlot>> {
        // A panic has the same effect as a failed write.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn warn(error: &DirectoryError) {
    let error = hearth_api::chain(error);
    tracing::warn!("replacing the unreadable cluster directory: {error}");
}

fn directory_of(loaded: Loaded) -> Result<Option<ClusterDirectory>, DirectoryError> {
    match loaded {
        Loaded::Absent | Loaded::NeverCompleted => Ok(None),
        Loaded::Value { payload, .. } => Ok(decode(&payload)?),
    }
}

/// Decodes the record in a slot. `None` if it has no directory.
pub fn decode(record: &[u8]) -> Result<Option<ClusterDirectory>, DecodeError> {
    Ok(StoredDirectory::decode(record)?.directory)
}

/// The record in a slot.
pub fn encode(directory: &ClusterDirectory) -> Vec<u8> {
    let record = StoredDirectory {
        version: VERSION,
        directory: Some(directory.clone()),
    };
    record.encode_to_vec()
}

/// The IDs of the nodes in the directory. `None` if a node has no ID, as in a directory written by
/// hand: then any node may be meant.
pub fn nodes(directory: &ClusterDirectory) -> Option<BTreeSet<NodeId>> {
    let nodes = directory.nodes.iter();
    nodes.map(|node| node.id.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_api::stored_form;
    use hearth_api::v1::NodeRoles;
    use hearth_api::v1::cluster_directory::{Address, Node};
    use hearth_api::v1::node_roles::ConsensusMember;

    use super::*;
    use crate::layout::Root;

    fn directory(host: &str) -> ClusterDirectory {
        ClusterDirectory {
            nodes: vec![Node {
                id: "hearth-00000000000000000000000000000000".into(),
                addresses: vec![Address {
                    host: host.into(),
                    port: 0,
                }],
                roles: None,
            }],
        }
    }

    #[test]
    fn a_directory_is_kept_and_a_damaged_one_replaced() {
        let base = tempfile::tempdir().unwrap();
        let esp = Root::under(base.path()).esp;
        fs::create_dir(esp.path()).unwrap();
        let store = DirectoryStore::new(&esp);
        assert_eq!(store.load().unwrap(), None);
        assert!(store.save(&directory("192.0.2.1")).unwrap());
        assert_eq!(store.load().unwrap(), Some(directory("192.0.2.1")));
        assert!(!store.save(&directory("192.0.2.1")).unwrap());

        for path in esp.cluster_directory().paths() {
            fs::write(path, "damaged").unwrap();
        }
        assert!(matches!(store.load(), Err(DirectoryError::Slots(_))));
        assert!(store.save(&directory("192.0.2.2")).unwrap());
        assert_eq!(store.load().unwrap(), Some(directory("192.0.2.2")));
    }

    /// A save that wrote one slot only, and failed at the other, is not taken for one.
    #[test]
    fn a_directory_in_one_slot_is_not_saved() {
        let base = tempfile::tempdir().unwrap();
        let esp = Root::under(base.path()).esp;
        fs::create_dir(esp.path()).unwrap();
        let store = DirectoryStore::new(&esp);
        store.save(&directory("192.0.2.1")).unwrap();
        let [_, b] = esp.cluster_directory().paths();
        fs::remove_file(&b).unwrap();
        fs::create_dir(&b).unwrap();
        // It can be read, and is still not saved.
        assert_eq!(store.load().unwrap(), Some(directory("192.0.2.1")));
        for _ in 0..2 {
            assert!(store.save(&directory("192.0.2.1")).is_err());
        }
        fs::remove_dir(&b).unwrap();
        assert!(!store.save(&directory("192.0.2.1")).unwrap(), "mended");
        assert!(b.is_file());
    }

    #[test]
    fn the_stored_form_stays() {
        let fresh = || {
            let base = tempfile::tempdir().unwrap();
            let esp = Root::under(base.path()).esp;
            fs::create_dir(esp.path()).unwrap();
            esp.make_directories().unwrap();
            (base, esp)
        };
        let kept = ClusterDirectory {
            nodes: vec![
                Node {
                    id: NodeId::from_bytes([0x11; 16]).to_string(),
                    addresses: vec![
                        Address {
                            host: "192.0.2.1".into(),
                            port: 0,
                        },
                        Address {
                            host: "2001:db8::1".into(),
                            port: 7835,
                        },
                    ],
                    roles: Some(NodeRoles {
                        consensus_member: Some(ConsensusMember { member_id: 7 }),
                        ..NodeRoles::default()
                    }),
                },
                Node {
                    id: NodeId::from_bytes([0x22; 16]).to_string(),
                    ..Node::default()
                },
            ],
        };
        let (_base, esp) = fresh();
        DirectoryStore::new(&esp).save(&kept).unwrap();
        let [a, b] = esp.cluster_directory().paths();
        assert!(a.ends_with("hearth/cluster_directory.0"));
        assert!(b.ends_with("hearth/cluster_directory.1"));
        let written = fs::read(a).unwrap();
        assert_eq!(fs::read(b).unwrap(), written);
        let stored = stored_form!("cluster-directory.slot", written);

        for only in [0, 1] {
            let (_base, esp) = fresh();
            fs::write(&esp.cluster_directory().paths()[only], &stored).unwrap();
            assert_eq!(
                DirectoryStore::new(&esp).load().unwrap(),
                Some(kept.clone())
            );
        }
    }
}
