//! A part of all conformance cases of Kubernetes, as the task that asks for one and the test that runs it see it.

/// The environment variable with the part, a [`Shard`](crate::shard::Shard).
pub const SHARD: &str = "HEARTH_CONFORMANCE_SHARD";

/// The environment variable with the folder of the results, from which the sweep goes on.
pub const RESULTS: &str = "HEARTH_CONFORMANCE_RESULTS";

/// The environment variable with the list: [`NETWORK_POLICIES`], or the conformance cases if it is not set.
pub const LIST: &str = "HEARTH_CONFORMANCE_LIST";

/// The list of upstream's cases for network policies, which are not part of conformance.
pub const NETWORK_POLICIES: &str = "network-policies";
