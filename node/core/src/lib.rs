//! The Hearth node. `docs/architecture.md` says how its parts fit together.

pub mod cluster_state;
pub mod consensus;
pub mod credentials;
pub mod enrolment;
pub mod failpoint;
pub mod handover;
pub mod layout;
pub mod parameters;
pub mod pki;
pub mod storage;
