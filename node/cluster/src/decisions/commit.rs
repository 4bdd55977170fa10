//! Commit: an approved machine stores its cluster unlock key (CUK) with the cluster and becomes a
//! node.

use hearth_api::identity::{ClusterUnlockKey, PublicKey};
use hearth_api::v1::{ClusterConfiguration, NodeState, StorageSecurity, StorageSecurityPolicy};
use hearth_consensus::fenced::{Condition, Write};
use rustls_pki_types::CertificateDer;

use super::registration::id_of;
use super::rejection::storage_name;
use super::transitions::{Step, after};
use super::{FoundNode, Rejection, Versioned, put};
use crate::state;

/// A validated commit request.
pub struct Commit {
    /// The machine's key, from its TLS certificate.
    pub node_key: PublicKey,
    /// The cluster unlock key of its data partition.
    pub unlock_key: ClusterUnlockKey,
    /// How the data partition is protected.
    pub storage_security: StorageSecurity,
}

/// The decision.
pub enum Committed {
    /// The machine has committed before and got this certificate. `None` for the bootstrap node.
    Before(Option<CertificateDer<'static>>),
    /// The machine may commit: issue a certificate, then execute [`write`](fn@write).
    Now,
}

/// Decides about a commit. `deleted`: a node with this ID was deleted.
pub fn decide(
    commit: &Commit,
    found: Option<&FoundNode>,
    deleted: bool,
    configuration: &ClusterConfiguration,
) -> Result<Committed, Rejection> {
    let Some(found) = found else {
        return Err(match deleted {
            true => Rejection::Deleted(id_of(&commit.node_key)),
            false => Rejection::NotRegistered(commit.node_key),
        });
    };
    let full = &found.full.content;
    let (node, id) = (&full.node, found.id());
    if node.public_key != commit.node_key {
        return Err(Rejection::OtherNodeKey(id));
    }
    if node.state == NodeState::Up {
        if full.unlock_key.as_ref() != Some(&commit.unlock_key) {
            return Err(Rejection::OtherUnlockKey(id));
        }
        if node.storage_security != commit.storage_security {
            return Err(Rejection::OtherStorage {
                node: id,
                committed: storage_name(node.storage_security),
                found: storage_name(commit.storage_security),
            });
        }
        return Ok(Committed::Before(full.certificate.clone()));
    }
    after(id, node.state, Step::Commit)?;
    admits(
        configuration.storage_security_policy(),
        commit.storage_security,
    )?;
    Ok(Committed::Now)
}

/// The write that makes the machine a node with this certificate.
pub fn write(
    commit: &Commit,
    found: &FoundNode,
    certificate: CertificateDer<'static>,
    configuration: &Versioned<ClusterConfiguration>,
) -> Result<Write, Rejection> {
    let mut full = found.full.content.clone();
    full.node.state = after(found.id(), full.node.state, Step::Commit)?;
    full.node.storage_security = commit.storage_security;
    full.unlock_key = Some(commit.unlock_key.clone());
    full.certificate = Some(certificate);
    let write = found.unchanged().and(Condition::Unchanged(
        state::CLUSTER.into(),
        configuration.revision,
    ));
    Ok(put(write, &full))
}

/// Checks the protection of the data partition against the cluster's policy.
fn admits(policy: StorageSecurityPolicy, found: StorageSecurity) -> Result<(), Rejection> {
    use StorageSecurity::{AuthenticatedEncrypted, Encrypted, Insecure, Unspecified};
    use StorageSecurityPolicy::{
        NeedsEncryption, NeedsEncryptionAndAuthentication, NeedsInsecure, Permissive,
    };
    let fits = match policy {
        Permissive => found != Unspecified,
        NeedsInsecure => found == Insecure,
        NeedsEncryptionAndAuthentication => found == AuthenticatedEncrypted,
        NeedsEncryption | StorageSecurityPolicy::Unspecified => {
            matches!(found, Encrypted | AuthenticatedEncrypted)
        }
    };
    if fits {
        return Ok(());
    }
    let policy = policy.as_str_name();
    Err(Rejection::Storage {
        policy: policy
            .strip_prefix("STORAGE_SECURITY_POLICY_")
            .unwrap_or(policy),
        found: storage_name(found),
    })
}
