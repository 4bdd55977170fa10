//! The records of a node and of the cluster with their secrets, for writes and for the few answers
//! that contain a secret. They are read for one call and never kept.

use hearth_api::identity::{ClusterId, ClusterUnlockKey, PublicKey};
use hearth_api::private::{StoredCluster, StoredNode};
use hearth_api::v1::{ClusterConfiguration, NodeRoles, NodeState, OwnerReplacement};
use prost::Message as _;
use rustls_pki_types::CertificateDer;
use zeroize::{Zeroize as _, Zeroizing};

use super::{ClusterRecord, NodeRecord, RecordError, VERSION, decode, malformed};

/// A node's record with its secrets.
#[derive(Clone)]
pub struct FullRecord {
    /// Everything but the secrets and the certificate.
    pub node: NodeRecord,
    /// The cluster unlock key (CUK) of its data partition: set from commit until the node is
    /// DECOMMISSIONED.
    pub unlock_key: Option<ClusterUnlockKey>,
    /// The certificate that was issued with the commit. `None` for the bootstrap node.
    pub certificate: Option<CertificateDer<'static>>,
}

impl FullRecord {
    /// Decodes and validates a stored record.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let mut stored: StoredNode = decode(key, bytes, |m: &StoredNode| m.version)?;
        let secret = Zeroizing::new(std::mem::take(&mut stored.cluster_unlock_key));
        let certificate = std::mem::take(&mut stored.certificate);
        let unlock_key = match secret.as_slice() {
            [] => None,
            bytes => {
                Some(ClusterUnlockKey::try_from(bytes).map_err(|e| malformed(key)(e.to_string()))?)
            }
        };
        Ok(Self {
            node: NodeRecord::from_stored(key, stored)?,
            unlock_key,
            certificate: (!certificate.is_empty()).then(|| certificate.into()),
        })
    }

    /// Encodes the record.
    pub fn encode(&self) -> Zeroizing<Vec<u8>> {
        let node = &self.node;
        let mut stored = StoredNode {
            version: VERSION,
            id: node.id.to_string(),
            public_key: node.public_key.as_bytes().to_vec(),
            join_key: node.join_key.as_bytes().to_vec(),
            cluster_unlock_key: self
                .unlock_key
                .as_ref()
                .map(|key| key.expose().to_vec())
                .unwrap_or_default(),
            state: node.state.into(),
            roles: (node.roles != NodeRoles::default()).then_some(node.roles),
            labels: node.labels.clone(),
            settings: node.settings.clone(),
            tpm_usage: node.tpm_usage.into(),
            storage_security: node.storage_security.into(),
            decommissioning: node.decommissioning,
            certificate: self
                .certificate
                .as_ref()
                .map(|certificate| certificate.to_vec())
                .unwrap_or_default(),
            networking: node.networking.map(Into::into),
        };
        let bytes = Zeroizing::new(stored.encode_to_vec());
        stored.cluster_unlock_key.zeroize();
        bytes
    }

    /// Decommissions the node. Its unlock key is removed, so its data cannot be unlocked any more.
    pub fn decommission(&mut self) {
        self.node.state = NodeState::Decommissioned;
        self.node.roles = NodeRoles::default();
        self.node.decommissioning = false;
        self.unlock_key = None;
        self.certificate = None;
    }
}

/// The cluster's record with its secret, to write another configuration or another owner; everything
/// else is kept as stored. Wiped when dropped.
pub struct FullCluster {
    stored: StoredCluster,
    id: ClusterId,
    owner: PublicKey,
}

impl FullCluster {
    /// Decodes and validates a stored record.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        // Validates the required fields.
        let ClusterRecord { id, owner, .. } = ClusterRecord::decode(key, bytes)?;
        let stored = decode(key, bytes, |m: &StoredCluster| m.version)?;
        Ok(Self { stored, id, owner })
    }

    /// The cluster's ID.
    pub fn id(&self) -> ClusterId {
        self.id
    }

    /// The owner.
    pub fn owner(&self) -> PublicKey {
        self.owner
    }

    /// All replacements of the owner so far, in order.
    pub fn owner_replacements(&self) -> &[OwnerReplacement] {
        &self.stored.owner_replacements
    }

    /// The cluster's configuration, as stored.
    pub fn configuration(&self) -> ClusterConfiguration {
        self.stored.configuration.clone().unwrap_or_default()
    }

    /// Whether the cluster has a recovery recipient.
    pub fn has_recovery_recipient(&self) -> bool {
        !self.stored.recovery_recipient.is_empty()
    }

    /// Encodes the record with another configuration.
    pub fn encode_with(&self, configuration: ClusterConfiguration) -> Zeroizing<Vec<u8>> {
        self.encode_changed(|stored| stored.configuration = Some(configuration))
    }

    /// Encodes the record with the owner and the recovery recipient after this replacement.
    pub fn encode_replaced(&self, replacement: &OwnerReplacement) -> Zeroizing<Vec<u8>> {
        self.encode_changed(|stored| {
            stored.owner_public_key = replacement.owner_public_key.clone();
            stored.recovery_recipient = replacement.recovery_recipient.clone();
            stored.owner_replacements.push(replacement.clone());
        })
    }

    fn encode_changed(&self, change: impl FnOnce(&mut StoredCluster)) -> Zeroizing<Vec<u8>> {
        let mut stored = self.stored.clone();
        change(&mut stored);
        let bytes = Zeroizing::new(stored.encode_to_vec());
        stored.first_contact_secret.zeroize();
        bytes
    }
}

impl Drop for FullCluster {
    fn drop(&mut self) {
        self.stored.first_contact_secret.zeroize();
    }
}
