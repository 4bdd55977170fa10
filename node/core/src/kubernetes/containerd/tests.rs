//! With a real containerd, of the bundle that `HEARTH_BUNDLE` names.

use std::path::{Path, PathBuf};

use hearth_base::sys::child::Child;
use tokio::process::Command;
use tokio::time::sleep;

use super::*;

/// Machines that test many things at once are slow.
const BOUND: Duration = Duration::from_secs(120);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A folder with a bundle's tree, or `None`, and says so.
fn bundle() -> Option<PathBuf> {
    let bundle = std::env::var_os("HEARTH_BUNDLE").map(PathBuf::from);
    if bundle.is_none() {
        eprintln!("skipped: HEARTH_BUNDLE names no bundle of Kubernetes' programs");
    }
    bundle
}

/// containerd, and the way to it. Its programs want to lie in `/ext`; this one
/// is started by the bundle's own loader from wherever it lies.
async fn start(bundle: &Path, place: &Path) -> (Child, Connection) {
    let socket = place.join("state/socket");
    let config = Config {
        root: &place.join("root"),
        state: &place.join("state"),
        socket: &socket,
        runc: &bundle.join("bin/runc"),
        network_plugins: &bundle.join("cni"),
        network: &place.join("network"),
        registries: None,
        // The test's machine may have other control groups than a node.
        group: "",
    };
    let file = place.join("config");
    std::fs::write(&file, config.to_toml()).unwrap();
    let lib = bundle.join("lib");
    let mut command = Command::new(lib.join("ld-linux-x86-64.so.2"));
    command
        .arg("--library-path")
        .arg(&lib)
        .arg(bundle.join("bin/containerd"))
        .arg("--config")
        .arg(&file)
        .env_clear();
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
    // Nothing runs, so there is nothing to stop.
    timeout(DRAIN, drain(&connection)).await.unwrap();
    child.terminate(BOUND).await.unwrap();

    let (mut child, connection) = start(&bundle, place.path()).await;
    let later = images::import(&connection, &archive).await.unwrap();
    assert_eq!(later, [] as [String; 0]);
    child.terminate(BOUND).await.unwrap();
}
