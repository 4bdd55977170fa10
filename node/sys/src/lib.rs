//! The interfaces to the machine that a node uses: files, disks, network, clock.
//!
//! This crate knows nothing of clusters, roles or parameters. Each module wraps one mechanism of
//! the kernel, has typed errors that name the failed step, and leaves the error handling to its
//! caller.
//!
//! `unsafe` is used only in the private module `raw`.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod addressing;
pub mod announce;
pub mod block;
pub mod cgroups;
pub mod child;
pub mod clock;
pub mod confine;
pub mod conflict;
pub mod console;
pub mod devices;
pub mod dhcp;
pub mod dhcp6;
pub mod dm;
pub mod files;
pub mod firmware;
pub mod fork;
pub mod fw_cfg;
pub mod gpt;
pub mod hostname;
pub mod identity;
mod keyring;
pub mod kmsg;
pub mod memory;
pub mod mkfs;
pub mod mount_table;
pub mod mounts;
pub mod netlink;
pub mod nftables;
pub mod pci;
pub mod power_button;
pub mod quota;
pub mod random;
mod raw;
pub mod rcu;
pub mod router_advertisements;
pub mod screen;
pub mod slots;
pub mod smbios;
pub mod sysctl;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tpm;
pub mod tree;
pub mod uevents;
pub mod volume;
pub mod watchdog;
pub mod wireguard;
pub mod xfs;

/// What addresses of interfaces and destinations of routes are.
pub use hearth_cidr as cidr;
