//! A controller of the real programs on a real etcd, on this machine. Needs the
//! bundle where a node has it (`cargo xtask kubernetes`, linked to
//! `/ext/kubernetes`, where its programs look for their libraries); without it
//! the tests say that they are skipped.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use hearth_api::names::{EXTENSION_KUBERNETES, EXTENSIONS};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::*;
use crate::consensus::testing::Site;
use crate::extensions::Extensions;
use crate::kubernetes::tests::Fake;
use crate::roles::ControlPlane;
use crate::roles::testing::Alone;

/// Of a machine with other things to do.
const SLOW: Duration = Duration::from_secs(300);

fn bundle() -> Option<Arc<Bundle>> {
    let mounted = Path::new(EXTENSIONS).join(EXTENSION_KUBERNETES);
    match Bundle::open(&mounted) {
        Ok(bundle) => Some(Arc::new(bundle)),
        Err(error) => {
            println!("skipped: no bundle of Kubernetes on this machine: {error}");
            None
        }
    }
}

fn free_ports() -> Ports {
    let listeners = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let [apiserver, controller_manager, scheduler] =
        listeners.map(|listener| listener.local_addr().unwrap().port());
    Ports {
        apiserver,
        controller_manager,
        scheduler,
    }
}

/// The processes of a program that this test has started: those that work
/// below its root.
fn pids(root: &Path, binary: Binary) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    ids.filter(|pid| {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let works_here =
            std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(root));
        let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
        let name = line.split(|byte| *byte == 0).next().unwrap_or_default();
        works_here && name.ends_with(binary.name().as_bytes())
    })
    .collect()
}

async fn slowly<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(SLOW, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {SLOW:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_control_plane_serves_survives_the_death_of_a_part_and_ends() {
    let Some(bundle) = bundle() else { return };
    let site = Site::new();
    site.state.0.set(crate::cluster_state::State::Home).unwrap();
    let etcd = site.start(true).await;
    let fake = Fake::new(|_| Extensions::none());
    fake.address.set(Ipv4Addr::LOCALHOST.into());
    fake.control_plane.set(ControlPlane {
        consensus: Some(etcd.handle()),
        ..ControlPlane::default()
    });

    let (ports, parts) = (free_ports(), fake.parts.clone());
    let standing = Arc::new(event::value::<Standing>().0);
    let mut standings = standing.value().watch();
    let alone = Alone::run(move |ctx| {
        let (parts, bundle, standing) = (parts.clone(), bundle.clone(), standing.clone());
        async move {
            tokio::select! {
                outcome = run(&ctx, &parts, bundle, ports, &standing) => outcome,
                () = ctx.cancelled() => Ok(()),
            }
        }
    });
    let begin = std::time::Instant::now();
    let met = standings.wait_for(|standing| *standing == Standing::Met);
    slowly("the control plane works", met).await.unwrap();
    println!("the control plane works after {:?}", begin.elapsed());

    // It keeps what it keeps in its own part of the store, and nowhere else.
    let root = etcd.handle();
    let store = root.root().namespaced(ConsensusUser::Kubernetes);
    let kept = store.list("registry/").await.unwrap();
    let kept = kept.records.len() + store.list("/registry/").await.unwrap().records.len();
    assert!(kept > 50, "{kept} objects");

    let root = fake.parts.root.ephemeral.path().to_owned();
    let one = |binary| {
        let found = pids(&root, binary);
        assert_eq!(found.len(), 1, "{binary:?}: {found:?}");
        found[0]
    };
    let (apiserver, scheduler) = (one(Binary::Apiserver), one(Binary::Scheduler));
    kill(Pid::from_raw(scheduler), Signal::SIGKILL).unwrap();
    let failed = standings.wait_for(|standing| *standing != Standing::Met);
    slowly("the death is told", failed).await.unwrap();
    let met = standings.wait_for(|standing| *standing == Standing::Met);
    slowly("the scheduler is back", met).await.unwrap();
    assert_ne!(one(Binary::Scheduler), scheduler);
    assert_eq!(one(Binary::Apiserver), apiserver, "nobody else restarts");

    alone.stop().await;
    for binary in [
        Binary::Apiserver,
        Binary::ControllerManager,
        Binary::Scheduler,
    ] {
        assert_eq!(pids(&root, binary), [] as [i32; 0], "{binary:?}");
    }
    etcd.stop().await;
}
