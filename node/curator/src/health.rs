//! How well a node is, from who hears it.
//!
//! A node is heard by the curator that has its heartbeat stream, and etcd
//! remembers which one that is, under that curator's lease. Three things can
//! end it, and they mean different things:
//!
//! - the curator itself says that the heartbeats have stopped: TIMEOUT;
//! - the curator's lease has lapsed, so it was the curator that was lost, and
//!   the node is about to find another one: UNKNOWN for a grace, then TIMEOUT;
//! - nobody has heard it since this curator began to look: the same.
//!
//! A node that is heard and has not reported since it booted is UNKNOWN, too:
//! what is shown of it is what it was before.
//!
//! The grace is measured by this curator's monotonic clock, and its end is an
//! event like any other: whoever watches is told.

use std::time::Duration;

use hearth_api::{
    identity::NodeId,
    v1::{NodeHealth, NodeState},
};
use tokio::time::Instant;

/// Who hears a node.
#[derive(Clone, Debug)]
pub enum Liveness {
    /// This curator does.
    Heard {
        /// Which.
        curator: NodeId,
        /// Its lease.
        lease: i64,
        /// When it has said so.
        revision: i64,
        /// Of the node.
        boot_id: String,
    },
    /// Its heartbeats stopped.
    GivenUp,
    /// Nobody does.
    Lost {
        /// Seen by this curator.
        since: Instant,
        /// The grace is over.
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
    /// Whether going from one to the other is something to tell.
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
            (Self::GivenUp, Self::GivenUp) => false,
            (Self::Lost { overdue, .. }, Self::Lost { overdue: new, .. }) => overdue != new,
            _ => true,
        }
    }
}

/// What that means, and why. `reported` is the boot of which the node's status
/// tells.
pub fn judge(
    state: NodeState,
    liveness: &Liveness,
    reported: Option<&str>,
    bound: Duration,
    grace: Duration,
) -> (NodeHealth, String) {
    if state != NodeState::Up {
        let why = format!(
            "the node is {}: only nodes that are UP are heard",
            name(state)
        );
        return (NodeHealth::Unknown, why);
    }
    match liveness {
        Liveness::Heard { boot_id, .. } if reported.is_some_and(|boot| boot != boot_id) => (
            NodeHealth::Unknown,
            "it has booted again and not reported since: its status is that of the boot before"
                .to_owned(),
        ),
        Liveness::Heard { .. } => (NodeHealth::Healthy, String::new()),
        Liveness::GivenUp => (
            NodeHealth::Timeout,
            format!("no heartbeat for {} s", seconds(bound)),
        ),
        Liveness::Lost { overdue: false, .. } => (
            NodeHealth::Unknown,
            format!(
                "no curator hears it at the moment; it has {} s to reach one",
                seconds(grace)
            ),
        ),
        Liveness::Lost { overdue: true, .. } => (
            NodeHealth::Timeout,
            format!("it has reached no curator within {} s", seconds(grace)),
        ),
    }
}

/// A state's word without the enum's name.
pub fn name(state: NodeState) -> &'static str {
    let name = state.as_str_name();
    name.strip_prefix("NODE_STATE_").unwrap_or(name)
}

fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10.0).round() / 10.0
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
        assert_eq!(judge(up, lost(false)).0, NodeHealth::Unknown);
        assert_eq!(judge(up, lost(true)).0, NodeHealth::Timeout);
        let current = reported(up, heard(), Some("now"));
        assert_eq!(current.0, NodeHealth::Healthy);
        let (health, why) = reported(up, heard(), Some("before"));
        assert_eq!(health, NodeHealth::Unknown);
        assert!(why.contains("booted again"), "{why}");
        let (health, why) = judge(NodeState::Standby, heard());
        assert_eq!(health, NodeHealth::Unknown);
        assert!(why.contains("STANDBY"), "{why}");
    }
}
