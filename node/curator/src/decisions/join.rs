//! Join: a node that has booted is admitted, or disowned.
//!
//! An unknown join key is not a reason to disown: after a backup was restored, newer nodes are
//! unknown to their cluster. Only a record disowns a node: a tombstone, or the state
//! DECOMMISSIONED.
//!
//! A deleted node that is still an etcd member is told to retry: it would wipe a log that the other
//! members may need in order to remove it.

use hearth_api::identity::{NodeId, PublicKey};
use hearth_api::v1::{NodeState, TpmUsage};

use super::Rejection;
use crate::state::{NodeRecord, Tombstone};

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// The node gets its cluster unlock key.
    Admitted(NodeId),
    /// The node is ordered to wipe its keys.
    Disowned(NodeId),
}

/// The records for the join key.
pub struct Found {
    /// The node with this join key.
    pub node: Option<NodeRecord>,
    /// The deleted node with this join key.
    pub tombstone: Option<Tombstone>,
    /// Whether etcd has a member for the deleted node.
    pub is_member: bool,
}

/// Decides about a join.
pub fn decide(
    join_key: &PublicKey,
    tpm_usage: TpmUsage,
    found: Found,
) -> Result<Joined, Rejection> {
    if let Some(tombstone) = found.tombstone.filter(|t| t.join_key == *join_key) {
        if found.is_member {
            return Err(Rejection::MemberStill(tombstone.id));
        }
        return Ok(Joined::Disowned(tombstone.id));
    }
    let Some(node) = found.node.filter(|node| node.join_key == *join_key) else {
        return Err(Rejection::UnknownJoinKey(*join_key));
    };
    match node.state {
        NodeState::Decommissioned => return Ok(Joined::Disowned(node.id)),
        NodeState::Up => {}
        state => {
            return Err(Rejection::State {
                node: node.id,
                state,
                wanted: "UP: register and commit first",
            });
        }
    }
    if node.tpm_usage != tpm_usage {
        return Err(Rejection::TpmChanged {
            node: node.id,
            registered: node.tpm_usage.word(),
            found: tpm_usage.word(),
        });
    }
    Ok(Joined::Admitted(node.id))
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
        assert_eq!(decide(true), Err(Rejection::MemberStill(id)));
        assert_eq!(decide(false), Ok(Joined::Disowned(id)));
    }
}
