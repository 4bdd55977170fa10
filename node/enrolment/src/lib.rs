//! How a machine becomes a node of a cluster, and becomes it again at every
//! boot.
//!
//! | part | does |
//! |---|---|
//! | [`machine`] | decides: one pure function from state and event to state and actions |
//! | [`sealed`] | keeps the sealed configuration on the ESP |
//! | [`directory`] | keeps the cluster directory on the ESP |
//! | [`asking`] | asks the curators, before there is a certificate |
//! | [`driver`] | carries the decisions out, and retries |
//! | [`disowning`] | forgets the keys of a node that was removed |
//! | [`rejoin`] | asks whether a member still is one |
//!
//! The disk is [`hearth_host::storage`]'s; the control plane that a founding needs is
//! the role server's. Neither knows of enrolment.

pub mod asking;
pub mod disowning;
pub mod driver;
pub mod machine;
pub mod rejoin;
pub mod sealed;

#[cfg(test)]
mod registering_tests;
#[cfg(test)]
pub(crate) mod testing;

pub use hearth_host::storage::EnrolmentId;
