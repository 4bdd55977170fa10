//! What a node does with the machine below it: files, disks, network, clock.
//!
//! Nothing here knows of clusters, roles or parameters. Each module wraps one
//! mechanism of the kernel, gives it typed errors that name the step that
//! failed, and leaves the decision what to do about it to its caller.
//!
//! `unsafe` stands in the private module `raw` and nowhere else.

pub mod block;
pub mod cgroups;
pub mod child;
pub mod cidr;
pub mod clock;
pub mod console;
pub mod dhcp;
pub mod dm;
pub mod files;
pub mod fw_cfg;
pub mod gpt;
pub mod hostname;
pub mod iptables;
pub mod kmsg;
pub mod mkfs;
pub mod mount_table;
pub mod mounts;
pub mod netlink;
pub mod power_button;
pub mod quota;
mod raw;
pub mod slots;
pub mod static_network;
pub mod sysctl;
pub mod tree;
pub mod watchdog;
pub mod wireguard;

/// Runs a test in a network namespace of its own, so that it may change
/// everything there. Without the right to make one the test is skipped, and
/// says so.
#[cfg(test)]
fn in_own_network(test: impl Future<Output = ()> + Send) {
    std::thread::scope(|scope| {
        let run = || {
            if nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).is_err() {
                eprintln!("skipped: this needs the right to make network namespaces");
                return;
            }
            // One thread: a namespace belongs to the thread that made it.
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime")
                .block_on(test);
        };
        scope.spawn(run).join().expect("the test's thread");
    });
}

/// Makes a pair of connected Ethernet devices for a test; false, and says so,
/// where the kernel has none.
#[cfg(test)]
async fn add_veth(one: &str, other: &str) -> bool {
    let (connection, handle, _) = rtnetlink::new_connection().expect("netlink");
    let connection = tokio::spawn(connection);
    let veth = rtnetlink::LinkVeth::new(one, other).build();
    let made = handle.link().add(veth).execute().await;
    connection.abort();
    if let Err(error) = &made {
        eprintln!("skipped: no virtual Ethernet devices here ({error})");
    }
    made.is_ok()
}
