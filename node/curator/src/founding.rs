//! Bootstrap of a cluster: all its first records, in one transaction.
//!
//! The transaction is atomic: a power cut leaves either no cluster or the complete one. If it is
//! repeated, because the reply was lost or the node failed, it detects its own records and writes
//! nothing.

use std::sync::Arc;

use hearth_api::identity::{ClusterId, NodeCredentials};
use hearth_api::private::{StoredAuthority, StoredCluster, StoredNode};
use hearth_api::recovery::RecoveryRecipient;
use hearth_api::settings;
use hearth_api::tls::{self, Clock, OwnCertificate, TlsError};
use hearth_api::v1::NodeState;
use hearth_cluster::state::{self, ClusterRecord, NodeRecord, RecordError, Trusted};
use hearth_consensus::fenced::{Condition, Write, WriteError};
use hearth_consensus::{ConsensusError, NamespacedClient};
use hearth_host::failpoint;
use hearth_host::handover::BootstrapData;
use hearth_host::pki::{Authorities, Authority, Holder, PkiError};
use prost::Message as _;
use zeroize::Zeroize as _;

use super::leaves;

/// Why a cluster could not be bootstrapped, by the step that failed.
#[derive(Debug, thiserror::Error)]
pub enum FoundingError {
    /// etcd contains another cluster.
    #[error("cannot bootstrap cluster {wanted}: etcd already contains cluster {found}")]
    OtherCluster {
        /// The cluster in etcd.
        found: ClusterId,
        /// The cluster to be bootstrapped.
        wanted: ClusterId,
    },
    /// etcd contains this cluster, but not this node with its key.
    #[error("etcd already contains this cluster, but without this node and its key")]
    OtherNode,
    /// The transaction failed.
    #[error("cannot write the cluster's first records")]
    Write(#[source] ConsensusError),
    /// The existing records cannot be read.
    #[error("cannot read the cluster's existing records")]
    Read(#[source] ConsensusError),
    /// The existing records are invalid.
    #[error("cannot read the cluster's existing records")]
    Record(#[from] RecordError),
}

/// Why the first node has no certificates.
#[derive(Debug, thiserror::Error)]
pub enum CertifyError {
    /// They cannot be issued.
    #[error("cannot issue the first node's certificates")]
    Pki(#[from] PkiError),
    /// They do not belong together.
    #[error("cannot use the first node's certificates")]
    Tls(#[from] TlsError),
}

/// Issues the certificates of the first node, at the time of this clock. Needs no etcd.
pub fn certify(
    data: &BootstrapData,
    authorities: &Authorities,
    clock: Clock,
) -> Result<Arc<OwnCertificate>, CertifyError> {
    let public_key = data.node_key.public();
    let configuration = settings::with_defaults(data.seed.configuration.clone());
    let names = leaves::curator_hosts(&configuration);
    let holder = Holder::node(data.cluster_id, data.node_id, public_key, names);
    let valid = leaves::lifetime(&configuration);
    let now = tls::system_time(&clock);
    let authority = &authorities.cluster;
    let certificate = authority.issue_leaf(&holder, now, valid)?;
    let credentials = NodeCredentials {
        key: data.node_key.clone(),
        certificate: certificate.clone(),
        ca: authority.certificate().clone(),
    };
    let own = OwnCertificate::new(&credentials, clock)?;
    let p256 = authority.issue_p256_leaf(&holder, own.p256_public_key(), now, valid)?;
    own.replace(certificate, Some(p256))?;
    Ok(own)
}

/// Writes the cluster's first records to etcd. The client is that of
/// [`hearth_consensus::ConsensusUser::Curator`]. Idempotent.
pub async fn found(
    client: &NamespacedClient,
    data: &BootstrapData,
    authorities: &Authorities,
) -> Result<(), FoundingError> {
    failpoint!("founding.transaction.before");
    match client.write(transaction(data, authorities)).await {
        Ok(revision) => {
            tracing::info!(cluster = %data.cluster_id, revision, "cluster bootstrapped")
        }
        Err(WriteError::Conflict) => check_own(client, data).await?,
        Err(WriteError::Consensus(error)) => return Err(FoundingError::Write(error)),
    }
    failpoint!("founding.transaction.after");
    Ok(())
}

fn transaction(data: &BootstrapData, authorities: &Authorities) -> Write {
    let mut cluster = StoredCluster {
        version: state::VERSION,
        cluster_id: data.cluster_id.as_bytes().to_vec(),
        configuration: Some(data.seed.configuration.clone()),
        owner_public_key: data.seed.owner.as_bytes().to_vec(),
        first_contact_secret: data.seed.first_contact_secret.expose().to_vec(),
        recovery_recipient: RecoveryRecipient::to_field(data.seed.recovery_recipient),
        owner_replacements: Vec::new(),
    };
    let mut node = StoredNode {
        version: state::VERSION,
        id: data.node_id.to_string(),
        public_key: data.node_key.public().as_bytes().to_vec(),
        join_key: data.join_key.as_bytes().to_vec(),
        cluster_unlock_key: data.cluster_unlock_key.expose().to_vec(),
        state: NodeState::Up.into(),
        roles: Some(data.roles),
        labels: data.seed.labels.clone(),
        settings: Vec::new(),
        tpm_usage: data.tpm_usage.into(),
        storage_security: data.storage_security.into(),
        ..StoredNode::default()
    };
    let mut write = Write::when(Condition::Absent(state::CLUSTER.into()))
        .put(state::CLUSTER, cluster.encode_to_vec())
        .put(
            state::CLUSTER_AUTHORITY,
            encode_authority(&authorities.cluster),
        )
        .put(state::ETCD_AUTHORITY, encode_authority(&authorities.etcd))
        .put(state::node_key(data.node_id), node.encode_to_vec())
        .put(
            state::join_key_key(&data.join_key),
            data.node_id.to_string().into_bytes(),
        );
    if let Some(image) = data.booted.clone() {
        let since = tls::unix_seconds(&tls::wall_clock());
        let key = state::image_key(&image.parts);
        write = write.put(key, Trusted { image, since }.encode());
    }
    cluster.first_contact_secret.zeroize();
    node.cluster_unlock_key.zeroize();
    write
}

fn encode_authority(authority: &Authority) -> Vec<u8> {
    let mut stored: StoredAuthority = authority.to_stored();
    let bytes = stored.encode_to_vec();
    stored.private_key.zeroize();
    bytes
}

/// etcd contains a cluster: checks that it is this one, with this node.
async fn check_own(client: &NamespacedClient, data: &BootstrapData) -> Result<(), FoundingError> {
    let read = |key: String| async move {
        let record = client.get(&key).await.map_err(FoundingError::Read)?;
        Ok::<_, FoundingError>(record.map(|record| (key, record.value)))
    };
    if let Some((key, value)) = read(state::CLUSTER.into()).await? {
        let found = ClusterRecord::decode(&key, &value)?.id;
        if found != data.cluster_id {
            return Err(FoundingError::OtherCluster {
                found,
                wanted: data.cluster_id,
            });
        }
    }
    let (key, value) = read(state::node_key(data.node_id))
        .await?
        .ok_or(FoundingError::OtherNode)?;
    let node = NodeRecord::decode(&key, &value)?;
    if node.public_key != data.node_key.public() {
        return Err(FoundingError::OtherNode);
    }
    tracing::info!(cluster = %data.cluster_id, "cluster was bootstrapped before");
    Ok(())
}

#[cfg(test)]
mod tests {
    use hearth_api::identity::{ClusterUnlockKey, FirstContactSecret, NodeId, NodeKey, SigningKey};
    use hearth_api::v1::node_roles::ConsensusMember;
    use hearth_api::v1::{
        ClusterConfiguration, ColdStartPolicy, KubernetesConfiguration, Label, NodeRoles,
        StorageSecurity, StorageSecurityPolicy, TpmMode, TpmUsage,
    };
    use hearth_api::{fixture, stored_form};
    use hearth_host::handover::ClusterSeed;

    use super::*;

    fn data() -> BootstrapData {
        BootstrapData {
            cluster_id: ClusterId::from_bytes([0x55; 16]),
            node_id: NodeId::from_bytes([0x11; 16]),
            node_key: NodeKey::from_seed([0x22; 32]),
            cluster_unlock_key: ClusterUnlockKey::from_bytes([0x44; 32]),
            join_key: SigningKey::from_seed([0x33; 32]).public(),
            storage_security: StorageSecurity::Encrypted,
            tpm_usage: TpmUsage::PresentButUnused,
            roles: NodeRoles {
                consensus_member: Some(ConsensusMember { member_id: 0 }),
                ..NodeRoles::default()
            },
            seed: ClusterSeed {
                owner: SigningKey::from_seed([0x66; 32]).public(),
                first_contact_secret: FirstContactSecret::from_bytes([0x77; 32]),
                recovery_recipient: RecoveryRecipient::from_field(&[0x99; 32]).unwrap(),
                configuration: ClusterConfiguration {
                    cluster_domain: "example.internal".into(),
                    tpm_mode: TpmMode::BestEffort.into(),
                    storage_security_policy: StorageSecurityPolicy::NeedsEncryption.into(),
                    cold_start_policy: ColdStartPolicy::Owner.into(),
                    kubernetes: Some(KubernetesConfiguration {
                        synchronized_labels: vec!["zone".into(), "example.org/*".into()],
                        ..KubernetesConfiguration::default()
                    }),
                    curator_session_seconds: 0,
                    time_servers: Vec::new(),
                    certificate_lifetime_seconds: 0,
                    certificate_names: Vec::new(),
                    admission_policy: 0,
                    damaged_member_policy: 0,
                },
                labels: vec![Label {
                    key: "zone".into(),
                    value: "b".into(),
                }],
                manifests: Vec::new(),
            },
            booted: None,
        }
    }

    fn authority(fixture: &[u8]) -> Authority {
        let stored = StoredAuthority::decode(fixture).unwrap();
        Authority::from_stored(&stored).unwrap()
    }

    /// All records of the transaction, with keys and values.
    #[test]
    fn the_stored_form_stays() {
        let data = data();
        let authorities = Authorities {
            cluster: authority(fixture!("authority-cluster.pb")),
            etcd: authority(fixture!("authority-etcd.pb")),
        };
        let write = transaction(&data, &authorities);
        let (_, parts) = write.parts();
        let mut parts = parts.into_iter();
        let mut put = |wanted: &str| {
            let (key, value) = parts.next().unwrap();
            assert_eq!(key, wanted);
            value.unwrap().to_vec()
        };
        // Its content is checked by the tests of `state`.
        stored_form!("etcd-cluster.pb", put("cluster"));
        stored_form!("authority-cluster.pb", put("pki/cluster"));
        stored_form!("authority-etcd.pb", put("pki/etcd"));
        let key = "nodes/hearth-11111111111111111111111111111111";
        let stored = stored_form!("etcd-node-founder.pb", put(key));
        let owner = put(&format!("join_keys/{}", data.join_key));
        stored_form!("etcd-owner.txt", owner);
        assert!(parts.next().is_none());

        let node = state::FullRecord::decode(key, &stored).unwrap();
        assert_eq!(
            node.node,
            NodeRecord {
                id: data.node_id,
                public_key: data.node_key.public(),
                join_key: data.join_key,
                state: NodeState::Up,
                roles: data.roles,
                labels: data.seed.labels,
                settings: Vec::new(),
                tpm_usage: data.tpm_usage,
                storage_security: data.storage_security,
                decommissioning: false,
                networking: None,
            }
        );
        assert_eq!(node.unlock_key, Some(data.cluster_unlock_key));
        assert_eq!(node.certificate, None);
        assert_eq!(node.encode()[..], stored[..]);
    }
}
