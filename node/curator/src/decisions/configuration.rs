//! Changes of the cluster's configuration.
//!
//! Nodes have joined under the domain, the TPM mode and the policies, so these are fixed at
//! bootstrap. The settings of Kubernetes may change at any time.

use hearth_api::labels;
use hearth_api::v1::{ClusterConfiguration, ConfigureClusterRequest, KubernetesConfiguration};
use hearth_consensus::fenced::{Condition, Write};

use super::{Rejection, Versioned};
use crate::state::{self, FullCluster};

/// A validated change of the configuration.
#[derive(Debug)]
pub struct Change {
    kubernetes: Option<KubernetesConfiguration>,
}

impl Change {
    /// Validates a request.
    pub fn new(request: ConfigureClusterRequest) -> Result<Self, Rejection> {
        let kubernetes = request
            .kubernetes
            .map(|kubernetes| labels::check_kubernetes("kubernetes", kubernetes))
            .transpose()
            .map_err(|error| Rejection::Labels(error.to_string()))?;
        Ok(Self { kubernetes })
    }

    /// The resulting configuration, and the write; `None` if nothing changes.
    pub fn decide(&self, found: &Versioned<FullCluster>) -> (ClusterConfiguration, Option<Write>) {
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
