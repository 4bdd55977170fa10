//! How the cluster is set up, and what of it may change while it lives.
//!
//! The domain, the TPM mode and the policies are promises under which nodes
//! have joined, so they are made at founding, once. What Kubernetes takes over
//! binds nobody and may change at any time.

use hearth_api::labels;
use hearth_api::v1::{ClusterConfiguration, ConfigureClusterRequest, KubernetesConfiguration};
use hearth_consensus::fenced::{Condition, Write};

use super::{At, Refused};
use crate::state::{self, FullCluster};

/// What is to become of the configuration. Checked.
#[derive(Debug)]
pub struct Change {
    kubernetes: Option<KubernetesConfiguration>,
}

impl Change {
    /// Checks what was sent.
    pub fn new(request: ConfigureClusterRequest) -> Result<Self, Refused> {
        let kubernetes = request
            .kubernetes
            .map(|kubernetes| labels::check_kubernetes("kubernetes", kubernetes))
            .transpose()
            .map_err(|error| Refused::Labels(error.to_string()))?;
        Ok(Self { kubernetes })
    }

    /// The configuration as it is then, and what is written; nothing if it is
    /// so already.
    pub fn decide(&self, found: &At<FullCluster>) -> (ClusterConfiguration, Option<Write>) {
        let old = found.content.configuration();
        let mut new = old.clone();
        if let Some(kubernetes) = &self.kubernetes {
            new.kubernetes = Some(kubernetes.clone());
        }
        if new == old {
            return (new, None);
        }
        let key = state::CLUSTER;
        let write = Write::when(Condition::Unchanged(key.into(), found.revision));
        let value = found.content.encode_with(new.clone()).to_vec();
        (new, Some(write.put(key, value)))
    }
}
