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

pub mod block;
pub mod cgroups;
pub mod child;
pub mod cidr;
pub mod clock;
pub mod confine;
pub mod console;
pub mod dhcp;
pub mod dm;
pub mod files;
pub mod firmware;
pub mod fw_cfg;
pub mod gpt;
pub mod hostname;
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
pub mod slots;
pub mod static_network;
pub mod sysctl;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tpm;
pub mod tree;
pub mod uevents;
pub mod watchdog;
pub mod wireguard;
pub mod xfs;

/// Runs a test in a network namespace of its own, in which it may change everything. If creating a
/// namespace is not permitted, the test is skipped with a message.
#[cfg(test)]
fn in_own_network(test: impl Future<Output = ()> + Send) {
    std::thread::scope(|scope| {
        let run = || {
            if nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).is_err() {
                eprintln!("skipped: creating network namespaces is not permitted");
                return;
            }
            // One thread, because a namespace belongs to the thread that created it.
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime")
                .block_on(test);
        };
        scope.spawn(run).join().expect("the test's thread");
    });
}

/// Creates a pair of connected Ethernet devices for a test; prints a message and returns false if
/// the kernel does not support them.
#[cfg(test)]
async fn add_veth(one: &str, other: &str) -> bool {
    let (connection, handle, _) = rtnetlink::new_connection().expect("netlink");
    let connection = tokio::spawn(connection);
    let veth = rtnetlink::LinkVeth::new(one, other).build();
    let made = handle.link().add(veth).execute().await;
    connection.abort();
    if let Err(error) = &made {
        eprintln!("skipped: cannot create virtual Ethernet devices ({error})");
    }
    made.is_ok()
}
