//! The part of the control plane that runs on this node, for the other workers.

use hearth_api::names::conditions;
use hearth_api::v1::{ConsensusProgress, MemberStarts, NodeCondition};

/// The control plane on this machine; empty on most nodes.
#[derive(Clone, Default)]
pub struct LocalControlPlane {
    /// Port of the curator, while it listens.
    pub curator_port: Option<u16>,
    /// Progress of etcd, while it runs.
    pub progress: Option<ConsensusProgress>,
    /// How often etcd was started on the data, once it may be started.
    pub starts: Option<MemberStarts>,
    /// What is wrong with etcd's data, if anything.
    pub data: Option<EtcdData>,
}

/// What is wrong with etcd's data on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdData {
    /// The member, as in the node's role, if its etcd does not run because of that.
    pub damaged_member: Option<u64>,
    /// In CamelCase, for programs.
    pub reason: &'static str,
    /// What was noticed, and what to do.
    pub message: String,
}

impl EtcdData {
    /// As a condition of the node.
    pub(crate) fn condition(&self) -> NodeCondition {
        NodeCondition {
            r#type: conditions::ETCD_DATA.to_owned(),
            met: false,
            reason: self.reason.to_owned(),
            message: conditions::printable(&self.message),
        }
    }
}
