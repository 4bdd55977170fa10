//! The library of the end-to-end tests.
//!
//! A test boots a machine, or a cluster of them, checks it from the outside as an owner or an unauthenticated client,
//! injects faults, and boots it again. The test's code reads as that story; this library handles disks and debug
//! services, and `hearth_lab` takes ownership and forms clusters.
//!
//! ```no_run
//! use hearth_tests::{Outcome, TestCtx, here};
//!
//! # async fn story() -> Outcome {
//! let test = TestCtx::begin(here!())?;
//! let node = test.node("node").install().await?;
//! let vm = node.power_on().await?;
//! vm.home().await?;
//! vm.cut().await?;
//! let vm = node.power_on().await?; // the same disk
//! vm.home().await?;
//! test.passed()
//! # }
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`context`] | a test's name, its folder, its images |
//! | [`node`] | a machine and its disk, installed and powered on |
//! | [`cluster`] | several machines in one network, formed into a cluster |
//! | [`mod@cuts`] | power cuts at failpoints |
//! | [`sweep`] | power cuts at each flush of a recorded boot, with any of the writes after it |
//! | [`writer`] | continuous writes, none of which may be lost |
//! | [`leaders`] | who leads a cluster, and how often that changes |
//! | [`clients`] | reads and writes through all curators, whose history is checked |
//! | [`places`] | how many tests have machines at the same time |
//! | [`owner`] | the owner of a cluster: parameters, repeated calls |
//! | [`mod@unlock`] | a machine that waits for its owner, unlocked |
//! | [`chrony`] | a real time server |
//! | [`debug`] | the debug service of the test image |
//! | [`kubernetes`] | kubectl |
//! | [`disk`] | a raw disk between two boots, by independent tools |
//! | [`altered`] | images that were changed on a disk |
//! | [`secrets`] | searches for leaked secrets |
//!
//! # Rules
//! - No test sleeps for a fixed time. Each wait is for a condition, with a bound of five times what a busy host needs
//!   ([`bounds`]), and its error shows the machine's last console lines.
//! - A machine ends with its handle, so no test leaves one running.
//! - A failed test keeps its folder (serial logs, QMP log, QEMU's command, parameters, disk) and prints the command
//!   that repeats it.
//! - No test depends on the node's code, only on its interfaces, console and disk.

pub mod altered;
pub mod bounds;
pub mod chrony;
pub mod clients;
pub mod cluster;
pub mod context;
pub mod cuts;
pub mod debug;
pub mod disk;
pub mod keyboard;
pub mod kubernetes;
pub mod leaders;
pub mod node;
pub mod owner;
mod places;
pub mod secrets;
pub mod sweep;
pub mod unlock;
pub mod writer;

pub use clients::Clients;
pub use cluster::Cluster;
pub use context::TestCtx;
pub use kubernetes::Kubernetes;
pub use leaders::Leaders;
pub use owner::{Operator, retry_unavailable};

/// The result of a test.
pub type Outcome = anyhow::Result<()>;
