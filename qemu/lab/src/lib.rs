//! The laboratory: owns clusters of emulated machines, forms them and watches them.
//!
//! `cargo xtask run`, the benchmarks and the end-to-end tests do the same things in the same order: an owner key, the
//! parameters of the first machine, its boot, first contact, the other machines' registration, their approval by the keys
//! that their own consoles show, their roles, and then waiting until all is well. Here they are done, once. What is
//! started, shown and measured, and in which order, is the users' business.
//!
//! | module | what |
//! |---|---|
//! | [`owner`] | an owner: key, first-contact secret, parameters, ownership |
//! | [`formation`] | what to do next to bring a cluster to what is wanted: pure |
//! | [`record`] | what a cluster was founded with, and whether that is what is wished for: pure |
//! | [`state`] | what is kept of a cluster from one run to the next |
//! | [`machines`] | what the machines are made of |
//! | [`boot`] | what a console tells of a boot |
//! | [`fleet`] | the machines of a run: started, heard and ended together |
//! | [`session`] | a run: its cluster formed ([`form`]), given Kubernetes ([`kubernetes`]), watched ([`watch`]) |
//! | [`power`] | plugs of machines that another process may have started |
//! | [`hearthctl`], [`tool`] | the operator's tool, and programs of the host |
//! | [`patience`] | calls that are made again |
//! | [`measure`] | boots and formations, timed |
//! | [`events`] | what is told while all that goes on |
//!
//! # Invariants
//! - Nothing is printed: whoever wants to know is told by [`events::Observer`].
//! - No step is taken that the last look at the cluster does not call for, and no node is approved by the cluster's word
//!   alone.
//! - Machines end with their handles, as in `hearth_qemu`; only a cluster that is complete is ever left running.

pub mod boot;
pub mod error;
pub mod events;
pub mod fleet;
pub mod form;
pub mod formation;
pub mod hearthctl;
pub mod kubernetes;
pub mod machines;
pub mod measure;
pub mod owner;
pub mod patience;
pub mod power;
pub mod record;
pub mod session;
pub mod state;
pub mod tool;
pub mod watch;

pub use error::{LabError, Result};
pub use hearth_api::operator::{Operator, Standing};
pub use owner::Owner;
