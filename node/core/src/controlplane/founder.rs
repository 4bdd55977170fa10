//! The first node of a new cluster: its certificates, the cluster's first records, its credentials.
//!
//! What needs no etcd is done while etcd starts. The records come before the credentials are saved: a node that has
//! credentials is a member of a cluster that exists. Each step detects what an earlier run has completed.

use std::sync::Arc;

use hearth_agent::rolefetch::{self, Assigned};
use hearth_api::identity::NodeCredentials;
use hearth_api::tls::{self, OwnCertificate};
use hearth_base::supervisor::{Blocking, Failure, Outcome, spawn_blocking};
use hearth_consensus::manifests::Manifests;
use hearth_consensus::{ConsensusUser, RootHandle};
use hearth_curator::founding;
use hearth_host::handover::{BootstrapData, Founded};
use hearth_host::layout::Data;
use hearth_host::pki::{self, Authorities};
use hearth_host::{credentials, failpoint};

/// The first node, and what it does for its cluster.
pub(super) struct Founder {
    data: Arc<BootstrapData>,
    own: Arc<OwnCertificate>,
    /// What is saved on the data partition.
    credentials: Arc<NodeCredentials>,
    /// None if an earlier run has saved the credentials, before which it has founded the cluster.
    authorities: Option<Authorities>,
}

impl Founder {
    /// Issues the certificates, on a thread of its own: etcd takes much longer to start.
    pub(super) fn certify_aside(
        disk: &Data,
        data: Arc<BootstrapData>,
    ) -> Blocking<Result<Self, Failure>> {
        let disk = disk.clone();
        spawn_blocking(move || Self::certify(&disk, data))
    }

    /// Issues the certificates, unless an earlier run has saved some.
    fn certify(disk: &Data, data: Arc<BootstrapData>) -> Result<Self, Failure> {
        let saved = credentials::load(&disk.node().credentials())?;
        let (own, authorities) = match saved {
            Some(saved) => (OwnCertificate::new(&saved, tls::wall_clock())?, None),
            None => {
                let authorities = pki::load(&disk.etcd(), data.cluster_id)?;
                let own = founding::certify(&data, &authorities, tls::wall_clock())?;
                (own, Some(authorities))
            }
        };
        Ok(Self {
            data,
            credentials: Arc::new(own.credentials()),
            own,
            authorities,
        })
    }

    /// The certificates.
    pub(super) fn own(&self) -> Arc<OwnCertificate> {
        self.own.clone()
    }

    /// What enrolment waits for.
    pub(super) fn founded(self) -> Founded {
        Founded {
            credentials: self.credentials,
            own: self.own,
        }
    }

    /// Writes the cluster's first records to etcd. Detects what an earlier run has completed.
    pub(super) async fn found(&self, handle: &RootHandle) -> Outcome {
        let Some(authorities) = &self.authorities else {
            return Ok(());
        };
        // Before the cluster exists: a cluster without them would never get them.
        let controllers = handle
            .root()
            .namespaced(ConsensusUser::KubernetesControllers);
        let manifests = Manifests::new(controllers);
        manifests.store(&self.data.seed.manifests).await?;
        let client = handle.root().namespaced(ConsensusUser::Curator);
        Ok(founding::found(&client, &self.data, authorities).await?)
    }

    /// Saves roles and credentials on the data partition, and removes what etcd has now. Detects what an earlier run has
    /// completed.
    pub(super) async fn save(&self, disk: &Data) -> Outcome {
        let (disk, roles, credentials) = (disk.clone(), self.data.roles, self.credentials.clone());
        let is_new = self.authorities.is_some();
        let save = move || -> Outcome {
            let node = disk.node();
            if is_new {
                let settings = Vec::new();
                rolefetch::save(&node.roles(), &Assigned { roles, settings })?;
                failpoint!("founding.credentials.before");
                credentials::save(&node.credentials(), &credentials)?;
                failpoint!("founding.credentials.after");
            }
            Ok(pki::remove_authority_keys(&disk.etcd())?)
        };
        spawn_blocking(save).await?
    }
}
