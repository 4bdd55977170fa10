//! The Hearth node. `docs/architecture.md` says how its parts fit together.

pub mod boot;
pub mod boot_record;
pub mod cluster_state;
pub mod consensus;
pub mod credentials;
pub mod curator;
#[cfg(feature = "debug-service")]
pub mod debug;
pub mod enrolment;
pub mod esp;
pub mod extensions;
pub mod failpoint;
pub mod handover;
pub mod image;
pub mod kubernetes;
pub mod layout;
pub mod logs;
pub(crate) mod mesh;
pub mod network;
pub mod networking;
pub mod parameters;
pub mod pid1;
pub mod pki;
pub mod power;
pub mod roles;
pub mod storage;
