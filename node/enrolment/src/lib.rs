//! Enrolment: how a machine becomes a node of a cluster, and rejoins it at every boot.
//!
//! | part | does |
//! |---|---|
//! | [`machine`] | decides: one pure function from state and event to state and actions |
//! | [`sealed`] | stores the sealed configuration on the ESP |
//! | [`asking`] | calls the curators before the node has a certificate |
//! | [`driver`] | executes the decisions, and retries |
//! | [`unlocking`] | lets the owner unlock the node while no curator can |
//! | `console` | asks the owner at the console |
//! | [`disowning`] | wipes the keys of a node that was removed |
//! | [`rejoin`] | checks whether a running member has been removed |
//!
//! [`hearth_host::storage`] manages the data partition and [`hearth_host::directory`] the cluster
//! directory; the control plane that a bootstrap needs is run by the role server. None of them
//! knows of enrolment.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod asking;
mod console;
pub mod disowning;
pub mod driver;
pub mod machine;
pub mod rejoin;
pub mod sealed;
pub mod unlocking;

#[cfg(test)]
mod registering_tests;
#[cfg(test)]
pub(crate) mod testing;

pub use hearth_api::identity::EnrolmentId;
