//! The node agent: the workers that connect a node to its cluster and to the other nodes.
//!
//! Each worker reads and writes event values and does not know the others; `hearth-core` connects
//! them. A worker that fails is restarted alone: the values keep what it wrote, so the others do
//! not notice.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod addresses;
pub mod certificates;
pub mod connection;
pub mod control_plane;
pub mod heartbeat;
pub mod hosts;
pub mod known;
pub mod learned;
mod names;
pub mod nodemgmt;
pub mod rolefetch;
pub mod statuspush;
pub mod sysctls;
#[cfg(any(test, feature = "testing"))]
#[allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "test code: it panics on errors"
)]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod time;

pub use connection::{CuratorConnection, MAX_RETRY_DELAY, for_each_connection, refused};
pub use control_plane::{EtcdData, LocalControlPlane};
pub use known::{PeerResolver, PeerWatcher, Seen, View};
pub use learned::{AddressRecord, PeerAddresses};
