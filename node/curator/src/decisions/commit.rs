//! An approved machine hands over its unlock key and becomes a node.

use hearth_api::{
    identity::{ClusterUnlockKey, PublicKey},
    v1::{ClusterConfiguration, NodeState, StorageSecurity, StorageSecurityPolicy},
};
use hearth_consensus::fenced::{Condition, Write};
use rustls_pki_types::CertificateDer;

use super::{
    At, FoundNode, Refused, put,
    refused::storage_name,
    registration::id_of,
    standing::{Step, after},
};
use crate::state;

/// What the machine hands over.
pub struct Commit {
    /// By TLS.
    pub node_key: PublicKey,
    /// The cluster's half of its data partition's key.
    pub unlock_key: ClusterUnlockKey,
    /// How the partition is protected.
    pub storage_security: StorageSecurity,
}

/// What comes of it.
pub enum Committed {
    /// It has committed before, and got this certificate.
    Before(Option<CertificateDer<'static>>),
    /// It may: it needs a certificate, and [`write`].
    Now,
}

/// Decides. `deleted`: there was a node with this ID.
pub fn decide(
    commit: &Commit,
    found: Option<&FoundNode>,
    deleted: bool,
    configuration: &ClusterConfiguration,
) -> Result<Committed, Refused> {
    let Some(found) = found else {
        return Err(match deleted {
            true => Refused::Deleted(id_of(&commit.node_key)),
            false => Refused::NotRegistered(commit.node_key),
        });
    };
    let full = &found.full.content;
    let (node, id) = (&full.node, found.id());
    if node.public_key != commit.node_key {
        return Err(Refused::OtherNodeKey(id));
    }
    if node.state == NodeState::Up {
        if full.unlock_key.as_ref() != Some(&commit.unlock_key) {
            return Err(Refused::OtherUnlockKey(id));
        }
        if node.storage_security != commit.storage_security {
            return Err(Refused::OtherStorage {
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

/// Makes it a node, with this certificate.
pub fn write(
    commit: &Commit,
    found: &FoundNode,
    certificate: CertificateDer<'static>,
    configuration: &At<ClusterConfiguration>,
) -> Result<Write, Refused> {
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

/// Whether the policy admits a partition that is protected so.
fn admits(policy: StorageSecurityPolicy, found: StorageSecurity) -> Result<(), Refused> {
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
    Err(Refused::Storage {
        policy: policy
            .strip_prefix("STORAGE_SECURITY_POLICY_")
            .unwrap_or(policy),
        found: storage_name(found),
    })
}
