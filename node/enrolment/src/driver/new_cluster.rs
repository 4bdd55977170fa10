//! The authorities of a new cluster, made ahead.
//!
//! Making them takes a processor and no disk; what comes between the keys of the first node and its authorities, the file
//! system, takes a disk and hardly any processor. So they are made meanwhile, in memory. A boot that goes on with an
//! interrupted bootstrap finds them on the data partition, or makes others.

use std::sync::{Mutex, PoisonError};

use hearth_api::identity::{ClusterId, NodeId, NodeKey};
use hearth_base::supervisor::{Blocking, spawn_blocking};
use hearth_host::pki::{Bootstrapper, Lifetime, NewCluster, PkiError};

type Made = Result<NewCluster, PkiError>;

/// What is being made, and of which cluster.
#[derive(Default)]
pub struct ClusterPreparation(Mutex<Option<(ClusterId, Blocking<Made>)>>);

impl ClusterPreparation {
    /// Begins, for a cluster and its first node.
    pub(super) fn begin(
        &self,
        (cluster_id, node_id): (ClusterId, NodeId),
        node_key: &NodeKey,
        lifetime: Lifetime,
    ) {
        let node_key = node_key.clone();
        let making = spawn_blocking(move || {
            let founder = Bootstrapper {
                cluster_id,
                node_id,
                node_key: &node_key,
            };
            NewCluster::make(&founder, lifetime)
        });
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((cluster_id, making));
    }

    /// What was made for this cluster; none if it was not begun, was already taken, or has panicked.
    pub(super) async fn take(&self, cluster: ClusterId) -> Option<Made> {
        let begun = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (_, making) = begun.filter(|(begun, _)| *begun == cluster)?;
        making.await.ok()
    }
}
