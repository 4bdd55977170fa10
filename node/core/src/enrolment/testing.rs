//! Foundings of known bytes, for tests.

use std::sync::Arc;

use hearth_api::{
    identity::{
        ClusterId, ClusterUnlockKey, FirstContactSecret, JoinKey, NodeId, NodeKey, NodeUnlockKey,
        SigningKey,
    },
    v1::{
        ClusterBootstrap, ClusterConfiguration, ColdStartPolicy, NodeParameters, NodeRoles,
        StorageSecurity, StorageSecurityPolicy, TpmUsage, Wipe, node_parameters,
    },
};
use prost::Message;

use super::{
    EnrolmentId,
    sealed::{Founding, Identity},
};
use crate::parameters::{self, Parameters, Source};

/// A founding whose public names are made of `life`, and whose secrets are the
/// bytes 0xb1 to 0xb5.
pub(crate) fn founding(life: u8, storage_security: StorageSecurity) -> Arc<Founding> {
    Arc::new(Founding {
        identity: Identity {
            enrolment_id: EnrolmentId::from_bytes([life; 16]),
            cluster_id: ClusterId::from_bytes([life; 16]),
            node_id: NodeId::from_bytes([life; 16]),
            node_unlock_key: NodeUnlockKey::from_bytes([0xb1; 32]),
            join_key: JoinKey::from_seed([0xb2; 32]),
            storage_security,
            tpm_usage: TpmUsage::NotPresent,
            cold_start_policy: ColdStartPolicy::None,
            key_epoch: 0,
            network: None,
        },
        node_key: NodeKey::from_seed([0xb3; 32]),
        cluster_unlock_key: ClusterUnlockKey::from_bytes([0xb4; 32]),
        owner: SigningKey::from_seed([1; 32]).public(),
        cluster_ca: None,
        first_contact_secret: FirstContactSecret::from_bytes([0xb5; 32]),
        recovery_recipient: None,
        configuration: ClusterConfiguration::default(),
        roles: NodeRoles::default(),
        labels: Vec::new(),
    })
}

/// Parameters that found a cluster, as the node gets them.
pub(crate) fn bootstrap_message(policy: StorageSecurityPolicy, wipe: Option<u8>) -> Vec<u8> {
    NodeParameters {
        cluster: Some(node_parameters::Cluster::ClusterBootstrap(
            ClusterBootstrap {
                owner_public_key: SigningKey::from_seed([1; 32]).public().as_bytes().to_vec(),
                first_contact_secret: vec![2; 32],
                initial_cluster_configuration: Some(ClusterConfiguration {
                    storage_security_policy: policy.into(),
                    ..ClusterConfiguration::default()
                }),
                ..ClusterBootstrap::default()
            },
        )),
        wipe: wipe.map(|life| Wipe {
            enrolment_id: vec![life; 16],
        }),
        ..NodeParameters::default()
    }
    .encode_to_vec()
}

/// The same, parsed.
pub(crate) fn bootstrap(policy: StorageSecurityPolicy, wipe: Option<u8>) -> Parameters {
    parameters::parse(Source::FwCfg, &bootstrap_message(policy, wipe)).expect("valid parameters")
}
