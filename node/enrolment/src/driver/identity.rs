//! The identity of a new node: of the first one of a new cluster, or of a machine that registers.

use std::sync::Arc;

use hearth_api::identity::{ClusterId, ClusterUnlockKey, JoinKey, NodeId, NodeKey, NodeUnlockKey};
use hearth_api::v1::AdmissionPolicy;
use hearth_host::storage::StorageBackend;
use hearth_parameters::{Bootstrap, Cluster, Parameters, Register};
use hearth_tpm::images::TrustedImage;

use super::{Parts, chain, clock, refuse};
use crate::EnrolmentId;
use crate::machine::{Done, Failure, Keys};
use crate::sealed::{Asking, Founding, Identity, Registering};

impl<M, A> Parts<M, A>
where
    M: StorageBackend,
    A: Clone + Send + Sync + 'static,
{
    /// The keys for these parameters.
    pub(super) async fn make_keys(&self, parameters: &Parameters) -> Result<Done, Failure> {
        Ok(Done::Keys(match &parameters.cluster {
            Cluster::Bootstrap(bootstrap) => {
                clock::await_correction(&self.lifetime, &self.time).await;
                Keys::Founding(Arc::new(self.new_founding(parameters, bootstrap).await?))
            }
            Cluster::Register(register) => {
                Keys::Registering(Arc::new(new_registering(parameters, register)))
            }
        }))
    }

    async fn new_founding(
        &self,
        parameters: &Parameters,
        bootstrap: &Bootstrap,
    ) -> Result<Founding, Failure> {
        clock::can_found(&self.lifetime)?;
        let mode = bootstrap.seed.configuration.tpm_mode();
        let tpm_usage = hearth_parameters::tpm_usage(mode, self.sealed.can_seal()).ok_or_else(|| {
            Failure::Refuse(
                "tpm_mode: expected a TPM that can seal this node's keys, as the mode is REQUIRED, found none".into(),
            )
        })?;
        let admission = bootstrap.seed.configuration.admission_policy();
        if admission == AdmissionPolicy::KnownImages && self.booted().await.is_none() {
            return Err(Failure::Refuse(
                "admission_policy: expected a TPM and firmware that has measured this image, as the policy is \
                 KNOWN_IMAGES, found none"
                    .into(),
            ));
        }
        let mut seed = bootstrap.seed.clone();
        let cold_start_policy = hearth_parameters::cold_start_policy(
            seed.configuration.cold_start_policy(),
            bootstrap.storage_security,
            tpm_usage,
            seed.recovery_recipient.is_some(),
            bootstrap.accept_loss,
        )
        .map_err(refuse)?;
        seed.configuration.set_cold_start_policy(cold_start_policy);
        let node_key = NodeKey::generate();
        let identity = Identity {
            enrolment_id: EnrolmentId::generate(),
            cluster_id: ClusterId::generate(),
            node_id: NodeId::from_public_key(&node_key.public()),
            node_unlock_key: NodeUnlockKey::generate(),
            join_key: JoinKey::generate(),
            storage_security: bootstrap.storage_security,
            tpm_usage,
            cold_start_policy,
            key_epoch: 0,
            network: parameters.network.clone(),
        };
        let ids = (identity.cluster_id, identity.node_id);
        self.new_cluster.begin(ids, &node_key, self.lifetime);
        let cluster_unlock_key = ClusterUnlockKey::generate();
        let recovery = identity.recovery(seed.recovery_recipient, &cluster_unlock_key);
        tracing::info!(
            node = %identity.node_id,
            cluster = %identity.cluster_id,
            enrolment = %identity.enrolment_id,
            "generated the identity of a new cluster"
        );
        Ok(Founding {
            identity,
            node_key,
            recovery,
            cluster_unlock_key,
            cluster_ca: None,
            seed,
            roles: bootstrap.roles(self.can_run_kubernetes),
        })
    }

    /// The image that this machine has booted, if that was measured.
    pub(super) async fn booted(&self) -> Option<TrustedImage> {
        let events = match &self.prover {
            Some(prover) => prover.events().await,
            None => return None,
        };
        match events {
            Ok(events) => TrustedImage::booted(&events),
            Err(error) => {
                tracing::warn!("{}", chain(error));
                None
            }
        }
    }
}

fn new_registering(parameters: &Parameters, register: &Register) -> Registering {
    let node_key = NodeKey::generate();
    let registering = Registering {
        enrolment_id: EnrolmentId::generate(),
        node_id: NodeId::from_public_key(&node_key.public()),
        node_key,
        node_unlock_key: NodeUnlockKey::generate(),
        cluster_unlock_key: ClusterUnlockKey::generate(),
        join_key: JoinKey::generate(),
        cluster_ca: register.ca.clone(),
        asking: Asking::from(register),
        answer: None,
        network: parameters.network.clone(),
    };
    tracing::info!(
        node = %registering.node_id,
        enrolment = %registering.enrolment_id,
        "generated the identity of a new node"
    );
    registering
}
