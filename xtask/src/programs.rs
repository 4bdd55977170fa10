//! The programs of others that are compiled for a node, by `image/programs`.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context, Result};
use hearth_programs::{CONTAINERD, ETCD, METRICS_SERVER, REGISTRY};
use hearth_qemu::artifacts::MetricsServer;

use crate::checkout::root;
use crate::target::folder;
use crate::ui::Ui;

/// The folder with the Go modules.
pub(crate) fn sources() -> PathBuf {
    root().join("image/programs")
}

/// etcd, built if it is not in the cache. Tests that run an etcd on this machine find it as `hearth/etcd` in the target
/// folder.
pub(crate) fn etcd(ui: &Ui) -> Result<PathBuf> {
    let [built] = hearth_programs::ensure(ui, &sources(), [&ETCD])?;
    let program = built.program("etcd");
    let link = folder("")?.join("etcd");
    if fs::read_link(&link).ok().as_ref() != Some(&program) {
        match fs::remove_file(&link) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", link.display()));
            }
            _ => {}
        }
        std::os::unix::fs::symlink(&program, &link)
            .with_context(|| format!("cannot create the link {}", link.display()))?;
    }
    Ok(program)
}

/// A registry of images, which only tests need.
pub(crate) fn registry(ui: &Ui) -> Result<PathBuf> {
    let [built] = hearth_programs::ensure(ui, &sources(), [&REGISTRY])?;
    Ok(built.program("registry"))
}

/// The metrics server of Kubernetes as an image, with its manifests, which only a test needs.
pub(crate) fn metrics_server(ui: &Ui) -> Result<MetricsServer> {
    let [built] = hearth_programs::ensure(ui, &sources(), [&METRICS_SERVER])?;
    let image = folder("tests")?.join("metrics-server.tar");
    let program = built.program("metrics-server");
    hearth_bundle::program_image(ui, "metrics-server", &program, &image)?;
    Ok(MetricsServer {
        image,
        manifests: built.programs(),
    })
}

/// containerd's client, which only benchmarks need.
pub(crate) fn ctr(ui: &Ui) -> Result<PathBuf> {
    let [built] = hearth_programs::ensure(ui, &sources(), [&CONTAINERD])?;
    Ok(built.program("ctr"))
}
