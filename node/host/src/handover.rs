//! The types of the values that the parts of the node pass to each other.
//!
//! Data flows one way: enrolment finds out the node's identity, the control plane is built from it,
//! and the membership depends on both. Each value is one fact with one writer. The types are
//! defined here, below all of the parts, so that the parts do not depend on each other.

use std::sync::Arc;
use std::time::SystemTime;

use hearth_api::identity::{
    ClusterId, ClusterUnlockKey, NodeCredentials, NodeId, NodeKey, PublicKey,
};
use hearth_api::names::LONGEST_CONDITION;
use hearth_api::ranges::ClusterRanges;
use hearth_api::tls::OwnCertificate;
use hearth_api::v1::{self, ClusterDirectory, NodeRoles, StorageSecurity, TimeSource, TpmUsage};
use hearth_sys::nftables::Nftables;
use hearth_tpm::images::TrustedImage;

use crate::networking::NodeSubnets;

/// What a bootstrap passes on of its parameters.
pub use hearth_parameters::ClusterSeed;

/// The data of a cluster to be bootstrapped: written by enrolment, read by the control plane. Kept
/// in an `Arc`, because it holds secrets that must not be copied.
pub struct BootstrapData {
    /// The cluster's ID, random.
    pub cluster_id: ClusterId,
    /// The ID of the first node.
    pub node_id: NodeId,
    /// The private key of the first node.
    pub node_key: NodeKey,
    /// The CUK: the cluster's half of the data partition's key.
    pub cluster_unlock_key: ClusterUnlockKey,
    /// The public half of the first node's join key, which authenticates it after a reboot.
    pub join_key: PublicKey,
    /// How the data partition is protected.
    pub storage_security: StorageSecurity,
    /// How the TPM is used.
    pub tpm_usage: TpmUsage,
    /// The owner's settings.
    pub seed: ClusterSeed,
    /// The roles of the first node.
    pub roles: NodeRoles,
    /// The image that it has booted, if that was measured: the first one that the cluster trusts.
    pub booted: Option<TrustedImage>,
}

/// The new cluster is durable, in etcd and on the data partition, and a curator serves it: written
/// by the control plane, read by enrolment.
#[derive(Clone)]
pub struct Founded {
    /// The first node's credentials, as saved on the data partition.
    pub credentials: Arc<NodeCredentials>,
    /// The certificates with which its curator serves.
    pub own: Arc<OwnCertificate>,
}

/// This node is a member: written by enrolment when the sealed configuration says so, at the end of
/// a bootstrap and at every later boot.
#[derive(Clone)]
pub struct MemberData {
    /// The identity, the key and the current certificates of this node. Its leaf may have expired.
    pub own: Arc<OwnCertificate>,
    /// The curators in the cluster directory on the ESP.
    pub directory: ClusterDirectory,
    /// The node's keys are sealed by its TPM.
    pub uses_tpm: bool,
}

/// The cluster has removed this node by an order that was verified, and the node's keys are wiped:
/// written by enrolment, read by the membership worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disowned;

/// How many times curators have refused this node's certificate: written by the heartbeat worker,
/// read by enrolment, which then asks them with the join key whether the node is still a member.
pub type Refusals = u64;

/// The digest of the cluster's unlock settings as its curators know them
/// ([`UnlockSettings::digest`](hearth_api::recovery::UnlockSettings::digest)): written by the
/// heartbeat worker, read by enrolment, which asks for the settings if the node has recorded others.
pub type UnlockSettingsDigest = u64;

/// Which pods may exist on this node: written by the Kubernetes worker, before it starts the first
/// pod and after the last one is removed; read by the mesh, which gives pods their network, and by
/// the packet filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodsPossible {
    /// None.
    #[default]
    None,
    /// Pods of the built-in network, with addresses of these ranges.
    BuiltIn(ClusterRanges),
    /// Pods of another network, which is not Hearth's.
    OtherNetwork(ClusterRanges),
}

/// This node's part of the pod network: written by the mesh when the network is set up or removed,
/// read by the Kubernetes worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodNetwork {
    /// The addresses of all pods and services.
    pub ranges: ClusterRanges,
    /// Those of this node's pods.
    pub subnets: NodeSubnets,
    /// What the mesh carries without fragments, in bytes.
    pub mtu: u32,
}

/// The node's packet filter rules are in the kernel, and stay there: written by the packet filter,
/// read by the mesh, which forwards no packet before, and by node management, which shows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketFilter {
    /// The program that reads and changes them.
    pub nftables: Nftables,
    /// The node's own table, in family `inet`.
    pub table: &'static str,
    /// The addresses of pods and services that the rules are about; `None` while they are not known.
    pub ranges: Option<ClusterRanges>,
}

/// The clock of this node and where it has its time from: written by the time service after each
/// measurement, read by enrolment, which waits for it before it creates certificates with a clock
/// that cannot be right, and reported to the curators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeStatus {
    /// Where the time comes from.
    pub source: TimeSource,
    /// The servers, curator or members that are asked.
    pub servers: Vec<String>,
    /// Whether the clock follows the source.
    pub synchronised: bool,
    /// The last measurement.
    pub measured: Option<Measured>,
    /// How often the clock was set in this boot.
    pub steps: u64,
    /// Why the clock does not follow the source.
    pub problem: Option<TimeProblem>,
}

/// A measured difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Source minus clock, in nanoseconds, before a correction.
    pub offset: i64,
    /// When, by the corrected clock.
    pub at: SystemTime,
}

/// Why a clock does not follow its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TimeProblem {
    /// No answer, or the answers contradict each other: the clock may be right.
    Unknown(String),
    /// The sources agree on another time, and the clock could not be set to it: it is wrong.
    Wrong(String),
}

impl TimeProblem {
    /// The reason.
    pub fn reason(&self) -> &str {
        match self {
            Self::Unknown(reason) | Self::Wrong(reason) => reason,
        }
    }
}

impl Default for TimeStatus {
    /// Nothing is asked.
    fn default() -> Self {
        Self {
            source: TimeSource::None,
            servers: Vec::new(),
            synchronised: false,
            measured: None,
            steps: 0,
            problem: None,
        }
    }
}

impl TimeStatus {
    /// Whether time servers are known, as opposed to other nodes.
    pub fn has_servers(&self) -> bool {
        matches!(
            self.source,
            TimeSource::Parameters | TimeSource::ClusterSetting | TimeSource::Dhcp
        )
    }
}

impl From<&TimeStatus> for v1::TimeStatus {
    fn from(status: &TimeStatus) -> Self {
        let seconds = |at: SystemTime| {
            let since = at
                .duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default();
            i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
        };
        let problem = status.problem.as_ref().map(TimeProblem::reason);
        // As curators accept it.
        let problem: String = problem
            .unwrap_or_default()
            .chars()
            .filter(|char| !char.is_control())
            .collect();
        let length = problem.floor_char_boundary(LONGEST_CONDITION);
        Self {
            source: status.source.into(),
            servers: status.servers.clone(),
            synchronized: status.synchronised,
            offset_us: status.measured.map_or(0, |measured| measured.offset / 1000),
            measured_at: status.measured.map_or(0, |measured| seconds(measured.at)),
            steps: status.steps,
            problem: problem[..length].to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_state_of_the_clock_is_reported_in_units_and_within_limits() {
        let status = TimeStatus {
            source: TimeSource::Dhcp,
            servers: vec!["192.0.2.1".into()],
            measured: Some(Measured {
                offset: -1_500_999,
                at: SystemTime::UNIX_EPOCH + Duration::from_millis(7999),
            }),
            steps: 2,
            problem: Some(TimeProblem::Wrong("two\nlines".repeat(LONGEST_CONDITION))),
            ..TimeStatus::default()
        };
        let message = v1::TimeStatus::from(&status);
        assert_eq!((message.offset_us, message.measured_at), (-1500, 7));
        assert_eq!(message.problem.len(), LONGEST_CONDITION);
        assert!(message.problem.starts_with("twolines"));
        assert_eq!(message.source(), TimeSource::Dhcp);
    }
}
