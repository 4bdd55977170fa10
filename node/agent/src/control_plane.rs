//! What of the control plane runs on this node, as far as its other workers need to know.

use hearth_api::v1::ConsensusProgress;

/// The control plane on this machine: nothing of it, on most nodes.
#[derive(Clone, Default)]
pub struct LocalControlPlane {
    /// Where the curator listens on this machine, while it does.
    pub curator_port: Option<u16>,
    /// How far etcd is, while it runs here.
    pub progress: Option<ConsensusProgress>,
}
