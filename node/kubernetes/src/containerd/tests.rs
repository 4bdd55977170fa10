//! Tests with a real containerd, of the bundle that [`testing`] finds.

use std::path::{Path, PathBuf};

use hearth_sys::child::Child;
use tokio::process::Command;
use tokio::time::sleep;

use super::wire::leases::{CreateRequest, CreateResponse};
use super::*;
use crate::snapshot::{EmptyBundle, KUBERNETES, check, difference, root};
use crate::testing;

/// Timeout on a busy machine.
const BOUND: Duration = Duration::from_secs(120);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A directory with the tree of a bundle; `None`, with a message, without one.
fn bundle() -> Option<PathBuf> {
    if !nix::unistd::geteuid().is_root() {
        testing::skipped("containerd requires root");
        return None;
    }
    testing::bundle_or_skip()
}

/// containerd of the bundle, and a connection to it.
async fn start(bundle: &Path, place: &Path) -> (Child, Connection) {
    let socket = place.join("state/socket");
    let config = Config {
        root: &place.join("root"),
        state: &place.join("state"),
        socket: &socket,
        runc: &bundle.join("bin/runc"),
        network_plugins: &[bundle.join("cni")],
        network: &place.join("network"),
        registries: &[],
        // The machine of the test may have other control groups than a node.
        group: "",
    };
    let file = place.join("config");
    std::fs::write(&file, config.to_toml()).unwrap();
    let mut command = Command::new(bundle.join("bin/containerd"));
    command.arg("--config").arg(&file).env_clear();
    let child = Child::spawn(command, |_, line| eprintln!("{line}"));
    let child = child.await.unwrap();
    let connection = Connection::to(&socket);
    let works = async {
        while connection.works().await.is_err() {
            sleep(LOOK_AGAIN).await;
        }
    };
    timeout(BOUND, works).await.expect("containerd works");
    (child, connection)
}

#[tokio::test]
async fn images_are_imported_once_and_stay() {
    let Some(bundle) = bundle() else { return };
    let place = tempfile::tempdir().unwrap();
    let archive = bundle.join("images/pause.tar");
    let (mut child, connection) = start(&bundle, place.path()).await;
    let imported = images::import(&connection, &archive).await.unwrap();
    assert_eq!(imported, [config::PAUSE_IMAGE]);
    let again = images::import(&connection, &archive).await.unwrap();
    assert_eq!(again, [] as [String; 0]);
    // No containers are running, so there is nothing to stop.
    timeout(DRAIN_WITHIN, drain(&connection)).await.unwrap();
    child.terminate(BOUND).await.unwrap();

    let (mut child, connection) = start(&bundle, place.path()).await;
    let later = images::import(&connection, &archive).await.unwrap();
    assert_eq!(later, [] as [String; 0]);
    child.terminate(BOUND).await.unwrap();
}

/// Snapshots are created by the container runtime; here by direct calls.
mod wire {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Prepare {
        #[prost(string, tag = "1")]
        pub snapshotter: String,
        #[prost(string, tag = "2")]
        pub key: String,
        #[prost(string, tag = "3")]
        pub parent: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Commit {
        #[prost(string, tag = "1")]
        pub snapshotter: String,
        #[prost(string, tag = "2")]
        pub name: String,
        #[prost(string, tag = "3")]
        pub key: String,
    }
}

#[tokio::test]
async fn what_is_not_believed_is_forgotten_and_nothing_else() {
    const SNAPSHOTS: &str = "/containerd.services.snapshots.v1.Snapshots";
    let Some(bundle) = bundle() else { return };
    let place = tempfile::tempdir().unwrap();
    let archive = bundle.join("images/pause.tar");
    let (mut child, connection) = start(&bundle, place.path()).await;
    images::import(&connection, &archive).await.unwrap();
    let snapshotter = "overlayfs".to_owned();
    // containerd may collect unreferenced content at any moment.
    let id = connection::LEASE.to_owned();
    let path = "/containerd.services.leases.v1.Leases/Create".to_owned();
    let lease = connection::request(CreateRequest { id });
    let made = connection.ask::<_, CreateResponse>(path, lease);
    made.await.unwrap();
    // Three layers, and a container on top of them.
    let mut parent = String::new();
    for layer in ["a", "b", "c", "container"] {
        let prepare = wire::Prepare {
            snapshotter: snapshotter.clone(),
            key: format!("{layer}-new"),
            parent: parent.clone(),
        };
        let path = format!("{SNAPSHOTS}/Prepare");
        let prepared = connection.ask::<_, ()>(path, connection::leased(prepare));
        prepared.await.unwrap();
        if layer == "container" {
            break;
        }
        let commit = wire::Commit {
            snapshotter: snapshotter.clone(),
            name: layer.to_owned(),
            key: format!("{layer}-new"),
        };
        let path = format!("{SNAPSHOTS}/Commit");
        let committed = connection.ask::<_, ()>(path, connection::leased(commit));
        committed.await.unwrap();
        parent = layer.to_owned();
    }
    assert_eq!(unpacked::forget(&connection).await.unwrap(), 4);
    assert_eq!(unpacked::forget(&connection).await.unwrap(), 0);
    let kept = images::import(&connection, &archive).await.unwrap();
    assert_eq!(kept, [] as [String; 0]);
    child.terminate(BOUND).await.unwrap();
}

#[test]
fn it_is_started_as_committed() {
    for version in KUBERNETES {
        let bundle = EmptyBundle::of(version);
        let started = bundle.lines(&command(&root(), &bundle.bundle, &Proxy::default()));
        check(include_str!("../snapshot/containerd.txt"), &started);
        let authorities = |bundle: &Path| {
            let registries = bundle.join("registries");
            std::fs::create_dir(&registries).unwrap();
            std::fs::write(bundle.join("authorities.pem"), "").unwrap();
        };
        let bundle = EmptyBundle::with(version, authorities);
        let believes = bundle.lines(&command(&root(), &bundle.bundle, &Proxy::default()));
        let expected = "+SSL_CERT_FILE=/bundle/authorities.pem\n";
        assert_eq!(difference(&started, &believes), expected);
    }
}
