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
    /// While the disk keeps etcd waiting: how, and what to do.
    pub slow_disk: Option<String>,
}

impl LocalControlPlane {
    /// What is wrong with etcd, as conditions of the node.
    pub(crate) fn conditions(&self) -> Vec<NodeCondition> {
        let slow_disk = self.slow_disk.as_ref().map(|message| NodeCondition {
            r#type: conditions::ETCD_DISK.to_owned(),
            met: false,
            reason: "Slow".to_owned(),
            message: conditions::printable(message),
        });
        let data = self.data.as_ref().map(EtcdData::condition);
        data.into_iter().chain(slow_disk).collect()
    }
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
    fn condition(&self) -> NodeCondition {
        NodeCondition {
            r#type: conditions::ETCD_DATA.to_owned(),
            met: false,
            reason: self.reason.to_owned(),
            message: conditions::printable(&self.message),
        }
    }
}
