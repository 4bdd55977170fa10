//! The local state of one node: where its files are, its parameters, its disk and its certificates.
//!
//! Everything here concerns this machine alone. Code that talks to curators or to etcd is in the
//! crates above.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod boot_record;
pub mod bundle;
pub mod clock;
pub mod cluster_state;
pub mod console;
pub mod credentials;
pub mod date;
pub mod directory;
pub mod disks;
pub mod esp;
pub mod esp_writes;
pub mod extensions;
pub mod failpoint;
pub mod handover;
pub mod image;
pub mod layout;
pub mod logs;
pub mod network_control;
pub mod network_setting;
pub mod networking;
pub mod parameters;
pub mod pki;
pub mod power;
pub mod prover;
pub mod record;
pub mod storage;
pub mod volumes;
