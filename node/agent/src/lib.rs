//! A node's side of its cluster: the workers by which it is known, and knows, among the other nodes.
//!
//! Each reads and writes event values and knows no other worker; `hearth-core` joins them. One that fails restarts
//! alone: the values keep what it wrote, so the others do not notice.

pub mod addresses;
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
#[cfg(any(test, feature = "testing"))]
#[allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "test code: it fails as tests do"
)]
pub mod testing;
#[cfg(test)]
mod tests;

pub use connection::{ASK_AGAIN_WITHIN, CuratorConnection, over_each, refused};
pub use control_plane::LocalControlPlane;
pub use known::{Known, Seen, View};
pub use learned::{Learned, Located};
