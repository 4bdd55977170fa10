//! The cluster directory on the ESP: the curators that a node contacts after a reboot.
//!
//! The directory is optional: if it is lost or corrupt, the node continues without it. The node may
//! be a curator itself, or get addresses from other nodes. So corruption is reported, and the next
//! save overwrites it.

use std::collections::BTreeSet;

use hearth_api::identity::NodeId;
use hearth_api::private::StoredDirectory;
use hearth_api::v1::ClusterDirectory;
use hearth_sys::files::FileError;
use hearth_sys::slots::{FileSlot, Loaded, SlotError, SlotFormat, SlotPair};
use prost::{DecodeError, Message};

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

/// Reads the directory; `None` if none has been saved.
pub fn load(esp: &Esp) -> Result<Option<ClusterDirectory>, DirectoryError> {
    directory_of(slots(esp).load()?)
}

/// Reads the directory without repairing its slots: for code that does not own it.
pub fn look(esp: &Esp) -> Result<Option<ClusterDirectory>, DirectoryError> {
    directory_of(slots(esp).peek()?)
}

fn directory_of(loaded: Loaded) -> Result<Option<ClusterDirectory>, DirectoryError> {
    match loaded {
        Loaded::Absent | Loaded::NeverCompleted => Ok(None),
        Loaded::Value { payload, .. } => Ok(StoredDirectory::decode(&payload[..])?.directory),
    }
}

/// The IDs of the nodes in the directory. `None` if a node has no ID, as in a directory written by
/// hand: then any node may be meant.
pub fn nodes(directory: &ClusterDirectory) -> Option<BTreeSet<NodeId>> {
    let nodes = directory.nodes.iter();
    nodes.map(|node| node.id.parse().ok()).collect()
}

/// Replaces the directory, durably. Corrupt slots are overwritten.
pub fn save(esp: &Esp, directory: &ClusterDirectory) -> Result<(), DirectoryError> {
    esp.make_directories()?;
    let record = StoredDirectory {
        version: VERSION,
        directory: Some(directory.clone()),
    }
    .encode_to_vec();
    let mut slots = slots(esp);
    match slots.save(&record) {
        Err(SlotError::Corrupt { .. } | SlotError::Contradiction { .. }) => {
            slots.erase()?;
            slots.save(&record)?;
        }
        saved => {
            saved?;
        }
    }
    Ok(())
}

fn slots(esp: &Esp) -> SlotPair<FileSlot> {
    esp.cluster_directory().slots(FORMAT)
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
        assert_eq!(load(&esp).unwrap(), None);
        save(&esp, &directory("192.0.2.1")).unwrap();
        assert_eq!(load(&esp).unwrap(), Some(directory("192.0.2.1")));
        assert_eq!(look(&esp).unwrap(), Some(directory("192.0.2.1")));

        for path in esp.cluster_directory().paths() {
            fs::write(path, "damaged").unwrap();
        }
        assert!(matches!(load(&esp), Err(DirectoryError::Slots(_))));
        save(&esp, &directory("192.0.2.2")).unwrap();
        assert_eq!(load(&esp).unwrap(), Some(directory("192.0.2.2")));
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
        save(&esp, &kept).unwrap();
        let [a, b] = esp.cluster_directory().paths();
        assert!(a.ends_with("hearth/cluster_directory.0"));
        assert!(b.ends_with("hearth/cluster_directory.1"));
        let written = fs::read(a).unwrap();
        assert_eq!(fs::read(b).unwrap(), written);
        let stored = stored_form!("cluster-directory.slot", written);

        for only in [0, 1] {
            let (_base, esp) = fresh();
            fs::write(&esp.cluster_directory().paths()[only], &stored).unwrap();
            assert_eq!(load(&esp).unwrap(), Some(kept.clone()));
        }
    }
}
