//! Configurations made of known bytes, for tests.

use std::sync::Arc;

use hearth_api::identity::{
    ClusterId, ClusterUnlockKey, FirstContactSecret, JoinKey, NodeId, NodeKey, NodeUnlockKey,
    SigningKey, Ticket,
};
use hearth_api::v1::{
    ClusterBootstrap, ClusterConfiguration, ClusterDirectory, ColdStartPolicy, NodeParameters,
    NodeRoles, StorageSecurity, StorageSecurityPolicy, TpmUsage, Wipe, cluster_directory,
    node_parameters,
};
use hearth_host::parameters::{self, Source};
use hearth_parameters::{ClusterSeed, Network, Parameters};
use prost::Message;
use rustls_pki_types::CertificateDer;

use super::EnrolmentId;
use super::sealed::{Answer, Asking, Founding, Identity, Registering};

/// A bootstrap whose IDs consist of `enrolment`, and whose secrets are the bytes 0xb1 to 0xb5.
pub(crate) fn founding(enrolment: u8, storage_security: StorageSecurity) -> Arc<Founding> {
    Arc::new(Founding {
        identity: Identity {
            enrolment_id: EnrolmentId::from_bytes([enrolment; 16]),
            cluster_id: ClusterId::from_bytes([enrolment; 16]),
            node_id: NodeId::from_bytes([enrolment; 16]),
            node_unlock_key: NodeUnlockKey::from_bytes([0xb1; 32]),
            join_key: JoinKey::from_seed([0xb2; 32]),
            storage_security,
            tpm_usage: TpmUsage::NotPresent,
            cold_start_policy: ColdStartPolicy::None,
            key_epoch: 0,
            network: Network::default(),
        },
        node_key: NodeKey::from_seed([0xb3; 32]),
        cluster_unlock_key: ClusterUnlockKey::from_bytes([0xb4; 32]),
        recovery: None,
        cluster_ca: None,
        roles: NodeRoles::default(),
        seed: ClusterSeed {
            owner: SigningKey::from_seed([1; 32]).public(),
            first_contact_secret: FirstContactSecret::from_bytes([0xb5; 32]),
            recovery_recipient: None,
            configuration: ClusterConfiguration::default(),
            labels: Vec::new(),
            manifests: Vec::new(),
        },
    })
}

/// A registration of the same bytes, answered if `answer` is given. Its ticket consists of
/// 0xb6.
pub(crate) fn registering(enrolment: u8, answer: Option<StorageSecurity>) -> Arc<Registering> {
    Arc::new(Registering {
        enrolment_id: EnrolmentId::from_bytes([enrolment; 16]),
        node_id: NodeId::from_bytes([enrolment; 16]),
        node_key: NodeKey::from_seed([0xb3; 32]),
        node_unlock_key: NodeUnlockKey::from_bytes([0xb1; 32]),
        cluster_unlock_key: ClusterUnlockKey::from_bytes([0xb4; 32]),
        join_key: JoinKey::from_seed([0xb2; 32]),
        cluster_ca: CertificateDer::from(b"an authority".to_vec()),
        asking: Asking {
            directory: directory("192.0.2.1"),
            ticket: Ticket::from_bytes([0xb6; 32]),
            labels: Vec::new(),
        },
        answer: answer.map(|storage_security| Answer {
            cluster_id: ClusterId::from_bytes([9; 16]),
            storage_security,
            tpm_usage: TpmUsage::NotPresent,
            cold_start_policy: ColdStartPolicy::None,
        }),
        network: Network::default(),
    })
}

/// A directory with one node.
pub(crate) fn directory(host: &str) -> ClusterDirectory {
    ClusterDirectory {
        nodes: vec![cluster_directory::Node {
            id: NodeId::from_bytes([0xcc; 16]).to_string(),
            addresses: vec![cluster_directory::Address {
                host: host.into(),
                port: 0,
            }],
            roles: None,
        }],
    }
}

/// Parameters for a bootstrap, as the node receives them.
pub(crate) fn bootstrap_message(policy: StorageSecurityPolicy, wipe: Option<u8>) -> Vec<u8> {
    NodeParameters {
        cluster: Some(node_parameters::Cluster::ClusterBootstrap(
            ClusterBootstrap {
                owner_public_key: SigningKey::from_seed([1; 32]).public().as_bytes().to_vec(),
                first_contact_secret: vec![2; 32],
                accept_loss: true,
                initial_cluster_configuration: Some(ClusterConfiguration {
                    storage_security_policy: policy.into(),
                    cold_start_policy: ColdStartPolicy::None.into(),
                    ..ClusterConfiguration::default()
                }),
                ..ClusterBootstrap::default()
            },
        )),
        wipe: wipe.map(|enrolment| Wipe {
            enrolment_id: vec![enrolment; 16],
        }),
        ..NodeParameters::default()
    }
    .encode_to_vec()
}

/// The parsed parameters.
pub(crate) fn bootstrap(policy: StorageSecurityPolicy, wipe: Option<u8>) -> Parameters {
    parameters::parse(Source::FwCfg, &bootstrap_message(policy, wipe)).expect("valid parameters")
}
