//! The programs of others that are compiled for a node, by `image/programs`.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context, Result};
use hearth_programs::{Built, CONTAINERD, ETCD, METRICS_SERVER, REGISTRY, TRAEFIK, VICTORIA_LOGS};
use hearth_qemu::artifacts::{AddOn, AddOns};

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

/// A registry of images, which only tests and benchmarks need.
pub(crate) fn registry(ui: &Ui) -> Result<PathBuf> {
    let [built] = hearth_programs::ensure(ui, &sources(), [&REGISTRY])?;
    Ok(built.program("registry"))
}

/// What most clusters get on their first day, as images with their manifests, which only a test needs.
pub(crate) fn add_ons(ui: &Ui) -> Result<AddOns> {
    let modules = [&METRICS_SERVER, &TRAEFIK, &VICTORIA_LOGS];
    let [metrics_server, traefik, victoria_logs] =
        hearth_programs::ensure(ui, &sources(), modules)?;
    let folder = folder("tests")?;
    let add_on = |built: &Built, name: &str| -> Result<AddOn> {
        let image = folder.join(format!("{name}.tar"));
        hearth_bundle::program_image(ui, name, &built.program(name), &image)?;
        Ok(AddOn {
            image,
            manifests: built.programs(),
        })
    };
    Ok(AddOns {
        metrics_server: add_on(&metrics_server, "metrics-server")?,
        traefik: add_on(&traefik, "traefik")?,
        victoria_logs: add_on(&victoria_logs, "victoria-logs")?,
        vlagent: add_on(&victoria_logs, "vlagent")?,
    })
}

/// containerd's client, which only benchmarks need.
pub(crate) fn ctr(ui: &Ui) -> Result<PathBuf> {
    let [built] = hearth_programs::ensure(ui, &sources(), [&CONTAINERD])?;
    Ok(built.program("ctr"))
}
