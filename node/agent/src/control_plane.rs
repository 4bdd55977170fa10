//! The part of the control plane that runs on this node, for the other workers.

use hearth_api::v1::ConsensusProgress;

/// The control plane on this machine; empty on most nodes.
#[derive(Clone, Default)]
pub struct LocalControlPlane {
    /// Port of the curator, while it listens.
    pub curator_port: Option<u16>,
    /// Progress of etcd, while it runs.
    pub progress: Option<ConsensusProgress>,
}
