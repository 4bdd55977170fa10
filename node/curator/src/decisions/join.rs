//! A node comes back, and is let in, or told that it is none any more.
//!
//! A key that nobody knows says nothing about its holder: after a backup was
//! restored, newer nodes are unknown to their cluster. Only a record that says
//! so, a tombstone or DECOMMISSIONED, disowns.
//!
//! A node that was deleted and votes in consensus still is told to ask again:
//! it would wipe a log that the others may need to take it out.

use hearth_api::{
    identity::{NodeId, PublicKey},
    v1::{NodeState, TpmUsage},
};

use super::Refused;
use crate::state::{NodeRecord, Tombstone};

/// What comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// It gets its unlock key.
    Admitted(NodeId),
    /// It is ordered to wipe its keys.
    Disowned(NodeId),
}

/// What the records say about the join key.
pub struct Found {
    /// The node that it is said to belong to.
    pub node: Option<NodeRecord>,
    /// Or did.
    pub tombstone: Option<Tombstone>,
    /// etcd has a member for the deleted one.
    pub is_member: bool,
}

/// Decides.
pub fn decide(join_key: &PublicKey, tpm_usage: TpmUsage, found: Found) -> Result<Joined, Refused> {
    if let Some(tombstone) = found.tombstone.filter(|t| t.join_key == *join_key) {
        if found.is_member {
            return Err(Refused::MemberStill(tombstone.id));
        }
        return Ok(Joined::Disowned(tombstone.id));
    }
    let Some(node) = found.node.filter(|node| node.join_key == *join_key) else {
        return Err(Refused::UnknownJoinKey(*join_key));
    };
    match node.state {
        NodeState::Decommissioned => return Ok(Joined::Disowned(node.id)),
        NodeState::Up => {}
        state => {
            return Err(Refused::State {
                node: node.id,
                state,
                wanted: "UP: it has to register and commit first",
            });
        }
    }
    if node.tpm_usage != tpm_usage {
        return Err(Refused::TpmChanged {
            node: node.id,
            registered: tpm_name(node.tpm_usage),
            found: tpm_name(tpm_usage),
        });
    }
    Ok(Joined::Admitted(node.id))
}

fn tpm_name(usage: TpmUsage) -> &'static str {
    let name = usage.as_str_name();
    name.strip_prefix("TPM_USAGE_").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use hearth_api::identity::SigningKey;

    use super::*;

    #[test]
    fn a_deleted_node_keeps_its_log_as_long_as_it_is_a_member() {
        let join_key = SigningKey::generate().public();
        let node_key = SigningKey::generate().public();
        let id = NodeId::from_public_key(&node_key);
        let found = |is_member| Found {
            node: None,
            tombstone: Some(Tombstone {
                id,
                public_key: node_key,
                join_key,
            }),
            is_member,
        };
        let decide = |is_member| decide(&join_key, TpmUsage::NotPresent, found(is_member));
        assert_eq!(decide(true), Err(Refused::MemberStill(id)));
        assert_eq!(decide(false), Ok(Joined::Disowned(id)));
    }
}
