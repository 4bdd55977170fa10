//! What the end-to-end tests are written with.
//!
//! A test boots a machine, or a cluster of them, looks at it from the outside as
//! an owner or a stranger would, hurts it, and boots it again. It reads as that
//! story; how disks and debug services are handled stands here, and how clusters
//! are owned and formed, in `hearth_lab`.
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
//! | [`context`] | a test's name, its folder, what it boots |
//! | [`node`] | a machine and its disk, installed and switched on |
//! | [`cluster`] | several machines in one network, formed into a cluster |
//! | [`mod@cuts`] | power cuts at failpoints |
//! | [`writer`] | writes that go on whatever happens, and none of which may be lost |
//! | [`owner`] | who founds a cluster: parameters, calls that are made again |
//! | [`debug`] | a look inside a node of the test image |
//! | [`kubernetes`] | kubectl, and what it is asked |
//! | [`disk`] | a raw disk between two boots, by tools that are not ours |
//! | [`secrets`] | looking for secrets where none may be |
//!
//! # Rules
//! - Nothing waits for time to pass. Each wait is for a condition, with a bound
//!   five times what a busy host needs ([`bounds`]), and its error shows what
//!   the machine was doing instead.
//! - A machine dies with its handle, so no test leaves one behind.
//! - A test that fails keeps its folder: serial logs, QMP log, QEMU's command,
//!   parameters, disk; and says by which command it is repeated.
//! - No test knows the node's code, only what it shows: interfaces, console,
//!   disk.

pub mod bounds;
pub mod cluster;
pub mod context;
pub mod cuts;
pub mod debug;
pub mod disk;
pub mod kubernetes;
pub mod node;
pub mod owner;
pub mod secrets;
pub mod writer;

pub use cluster::Cluster;
pub use context::TestCtx;
pub use kubernetes::Kubernetes;
pub use owner::{Operator, patiently};

/// What a test comes to.
pub type Outcome = anyhow::Result<()>;
