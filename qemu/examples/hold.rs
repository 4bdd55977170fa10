//! Launches a machine from a raw disk image, prints its endpoints, and waits for it, or leaves it running:
//!
//! ```text
//! hold STATE IMAGE [detach]
//! ```
//!
//! The smallest user of the library. The tests kill it and check what happens to its machine.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use hearth_qemu::accel::Accel;
use hearth_qemu::cluster::{Cluster, ClusterSpec, Member};
use hearth_qemu::command::Machine;
use hearth_qemu::disk::Cache;
use hearth_qemu::network::{Forward, Link, Mac, Nic, UserNetwork};
use hearth_qemu::vm::Lifetime;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = env::args_os().skip(1);
    let mut path = |what| args.next().map(PathBuf::from).context(what);
    let state = path("usage: STATE IMAGE")?;
    let image = path("usage: STATE IMAGE")?;
    let detach = args.next().is_some_and(|word| word == "detach");

    let mut machine = Machine::new("held", Accel::Tcg);
    machine.memory_mib = 64;
    machine.nics = vec![Nic {
        mac: Mac::of_machine(0),
        link: Link::User(UserNetwork {
            restricted: true,
            forwards: vec![Forward::any(7835)],
        }),
    }];
    let spec = ClusterSpec {
        state,
        network: None,
        members: vec![Member {
            machine,
            image,
            disk_bytes: None,
            cache: Cache::Writeback,
        }],
        lifetime: if detach {
            Lifetime::Detachable
        } else {
            Lifetime::KillWithParent
        },
    };
    let cluster = Cluster::launch(&spec).await?;
    let vm = &cluster.machines()[0];
    println!("{} {:?}", vm.pid(), vm.forwarded(7835));
    if detach {
        cluster.detach()?;
        return Ok(());
    }
    let exit = vm.exited(Duration::from_secs(600)).await?;
    println!("{exit}");
    Ok(())
}
