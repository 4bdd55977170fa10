//! The laboratory: acts as the owner of clusters of emulated machines, forms them and watches them.
//!
//! `cargo xtask run`, the benchmarks and the end-to-end tests perform the same sequence: an owner key, the parameters
//! of the first machine, its boot, first contact, the other machines' registration, their approval by the keys on their
//! own consoles, their roles, and waiting until all is healthy. It is implemented here once. What is started, shown and
//! measured, and in which order, is up to the users.
//!
//! | module | what |
//! |---|---|
//! | [`owner`] | an owner: key, first-contact secret, parameters, ownership |
//! | [`formation`] | the next steps towards the requested cluster: pure |
//! | [`record`] | what a cluster was founded with, and its comparison with the requested options: pure |
//! | [`state`] | the state folder, which is kept from one run to the next |
//! | [`machines`] | image and hardware of the machines |
//! | [`boot`] | a boot, followed on the console |
//! | [`fleet`] | the machines of a run: started, read and ended together |
//! | [`session`] | a run: its cluster formed ([`form`]), given Kubernetes ([`kubernetes`]), watched ([`watch`]) |
//! | [`unlock`] | a cluster that was off as a whole, unlocked by its owner |
//! | [`power`] | power of machines that another process may have started |
//! | [`conformance`], [`power_cuts`] | sweeps that tests are asked for |
//! | [`shard`] | parts of long runs |
//! | [`registry`] | a real registry of images |
//! | [`hearthctl`], [`tool`] | the operator's tool, and programs of the host |
//! | [`measure`] | boots and formations, timed |
//! | [`events`] | events of all of the above |
//!
//! # Invariants
//! - Nothing is printed: output goes through [`events::Observer`].
//! - No step is taken that the latest status of the cluster does not require, and no node is approved on the cluster's
//!   word alone.
//! - Machines end with their handles, as in `hearth_qemu`; only a complete cluster is ever left running.

pub mod boot;
pub mod conformance;
pub mod dual_stack;
pub mod error;
pub mod events;
pub mod fleet;
pub mod form;
pub mod formation;
pub mod hearthctl;
pub mod kubernetes;
pub mod machines;
pub mod manifests;
pub mod measure;
pub mod owner;
pub mod power;
pub mod power_cuts;
pub mod record;
pub mod registry;
pub mod session;
pub mod shard;
pub mod state;
pub mod tool;
pub mod unlock;
pub mod watch;

pub use hearth_operator::{ClusterStatus, Operator};

pub use error::{LabError, Result};
pub use owner::Owner;
