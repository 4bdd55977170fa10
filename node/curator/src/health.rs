//! Derives a node's health from its liveness.
//!
//! One curator receives a node's heartbeats; which one is recorded in etcd, attached to that
//! curator's lease. A node is not healthy in four cases:
//!
//! - the curator has recorded that the heartbeats stopped: TIMEOUT;
//! - the curator has recorded that the node announced its shutdown or reboot: TIMEOUT;
//! - the curator's lease has expired, so the curator was lost and the node is about to connect to
//!   another one: UNKNOWN for a grace period, then TIMEOUT;
//! - no curator has received a heartbeat since this curator started: the same.
//!
//! A node that sends heartbeats but has not reported its status since it booted is UNKNOWN, too:
//! its status is that of the previous boot.
//!
//! The grace period is measured by this curator's monotonic clock. Its end is a change that
//! watchers are notified of.

use std::time::Duration;

use hearth_api::identity::NodeId;
use hearth_api::v1::{NodeHealth, NodeState};
use hearth_cluster::messages::{name, seconds};
use tokio::time::Instant;

/// The liveness of a node.
#[derive(Clone, Debug)]
pub enum Liveness {
    /// A curator receives its heartbeats.
    Heard {
        /// The node that the curator runs on.
        curator: NodeId,
        /// The lease of that curator's session.
        lease: i64,
        /// The revision of the liveness record.
        revision: i64,
        /// The boot ID that the node sends in its heartbeats.
        boot_id: String,
    },
    /// A curator has recorded that the heartbeats stopped.
    GivenUp,
    /// A curator has recorded that the node announced its shutdown or reboot.
    Ended,
    /// There is no liveness record: no curator receives its heartbeats.
    Lost {
        /// Since when, by this curator's clock.
        since: Instant,
        /// The grace period is over.
        overdue: bool,
    },
}

impl Default for Liveness {
    fn default() -> Self {
        Self::Lost {
            since: Instant::now(),
            overdue: false,
        }
    }
}

impl Liveness {
    /// Whether the change from one to the other is visible to watchers.
    pub fn differs(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Heard {
                    curator, boot_id, ..
                },
                Self::Heard {
                    curator: new,
                    boot_id: new_boot,
                    ..
                },
            ) => curator != new || boot_id != new_boot,
            (Self::GivenUp, Self::GivenUp) | (Self::Ended, Self::Ended) => false,
            (Self::Lost { overdue, .. }, Self::Lost { overdue: new, .. }) => overdue != new,
            _ => true,
        }
    }
}

/// The health of a node, and the reason. `reported` is the boot ID in the node's status.
pub fn judge(
    state: NodeState,
    liveness: &Liveness,
    reported: Option<&str>,
    bound: Duration,
    grace: Duration,
) -> (NodeHealth, String) {
    if state != NodeState::Up {
        let why = format!(
            "the node is {}: only nodes that are UP send heartbeats",
            name(state)
        );
        return (NodeHealth::Unknown, why);
    }
    match liveness {
        Liveness::Heard { boot_id, .. } if reported.is_some_and(|boot| boot != boot_id) => (
            NodeHealth::Unknown,
            "the node rebooted and has not reported since: its status is from the previous boot"
                .to_owned(),
        ),
        Liveness::Heard { .. } => (NodeHealth::Healthy, String::new()),
        Liveness::GivenUp => (
            NodeHealth::Timeout,
            format!("no heartbeat for {} s", seconds(bound)),
        ),
        Liveness::Ended => (
            NodeHealth::Timeout,
            "the node has shut down or is rebooting".to_owned(),
        ),
        Liveness::Lost { overdue: false, .. } => (
            NodeHealth::Unknown,
            format!(
                "no curator receives its heartbeats; it has {} s to connect to one",
                seconds(grace)
            ),
        ),
        Liveness::Lost { overdue: true, .. } => (
            NodeHealth::Timeout,
            format!(
                "the node did not connect to a curator within {} s",
                seconds(grace)
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_of_hearing_means_something_else() {
        let reported = |state, liveness: Liveness, reported| {
            judge(
                state,
                &liveness,
                reported,
                Duration::from_secs(10),
                Duration::from_secs(20),
            )
        };
        let judge = |state, liveness| reported(state, liveness, None);
        let heard = || Liveness::Heard {
            curator: NodeId::from_bytes([1; 16]),
            lease: 1,
            revision: 1,
            boot_id: "now".to_owned(),
        };
        let lost = |overdue| Liveness::Lost {
            since: Instant::now(),
            overdue,
        };
        let up = NodeState::Up;
        assert_eq!(judge(up, heard()), (NodeHealth::Healthy, String::new()));
        assert_eq!(judge(up, Liveness::GivenUp).0, NodeHealth::Timeout);
        assert!(judge(up, Liveness::GivenUp).1.contains("10 s"));
        assert_eq!(judge(up, Liveness::Ended).0, NodeHealth::Timeout);
        assert!(judge(up, Liveness::Ended).1.contains("shut down"));
        assert_eq!(judge(up, lost(false)).0, NodeHealth::Unknown);
        assert_eq!(judge(up, lost(true)).0, NodeHealth::Timeout);
        let current = reported(up, heard(), Some("now"));
        assert_eq!(current.0, NodeHealth::Healthy);
        let (health, why) = reported(up, heard(), Some("before"));
        assert_eq!(health, NodeHealth::Unknown);
        assert!(why.contains("rebooted"), "{why}");
        let (health, why) = judge(NodeState::Standby, heard());
        assert_eq!(health, NodeHealth::Unknown);
        assert!(why.contains("STANDBY"), "{why}");
    }
}
