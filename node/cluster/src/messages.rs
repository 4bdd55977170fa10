//! How messages to callers state a node's state and a duration.

use std::time::Duration;

use hearth_api::v1::NodeState;

/// The name of a state without the prefix of the enum.
pub fn name(state: NodeState) -> &'static str {
    let name = state.as_str_name();
    name.strip_prefix("NODE_STATE_").unwrap_or(name)
}

/// A duration in seconds with at most one decimal place.
pub fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10.0).round() / 10.0
}
