//! The programs of others that a node runs and that are written in Go: etcd, Kubernetes, containerd, runc, and the
//! plugins of the pod network. Built from pinned Go modules, and cached by content.
//!
//! Each upstream project is one Go module here (`image/programs/NAME/go.mod`), so that its programs are compiled with
//! the versions of their dependencies that its makers test; in one module for all of them, each would get the newest
//! version that any of them asks for. `go.sum` has the hash of everything that goes in. The folders have source of ours
//! for two things: Kubernetes' programs are linked into one file ([`modules`]), and a file of upstream's with a fault
//! that a node cannot live with is replaced, for as long as upstream has it ([`modules::Replaced`]).
//!
//! The same inputs give the same bytes: one toolchain by its exact version ([`toolchain`]), no paths, no time, no build
//! ID, and an environment in which the user's settings for Go have no say ([`settings`]). The cache key covers all of
//! it; a result that is in the cache needs neither Go nor a network. [`check()`] builds everything again and compares.
//!
//! Beside its programs a result has the licence of every module that was linked into them, and a bill of materials.

mod check;
mod compile;
mod error;
mod go;
mod licences;
mod modules;
mod sbom;
mod settings;
mod toolchain;
mod update;

pub use check::check;
pub use compile::Built;
pub use error::{LicenceError, ProgramsError, SbomError, ToolchainError};
pub use modules::{
    CNI, CONFORMANCE, CONTAINERD, ETCD, KUBERNETES, KUBERNETES_PREVIOUS, METRICS_SERVER, Module,
    REGISTRY, RUNC, TRAEFIK, VICTORIA_LOGS,
};
pub use sbom::{Component, Sbom};
pub use toolchain::ensure_go;
pub use update::{Moved, update};

use std::path::{Path, PathBuf};

use hearth_build::cache::{Builder, Cache};
use hearth_build::files::Log;
use hearth_build::progress::{Length, Progress};

use compile::{Inputs, Work};
use go::Caches;
use toolchain::Toolchain;

/// Kind of cache entry.
const KIND: &str = "programs";

/// The programs of these modules, built if they are not in the cache. `sources`: the folder `image/programs` of the
/// checkout.
pub fn ensure<const N: usize>(
    progress: &dyn Progress,
    sources: &Path,
    modules: [&'static Module; N],
) -> Result<[Built; N], ProgramsError> {
    let cache = Cache::of_user(KIND)?;
    let toolchain = Toolchain::pinned(sources)?;
    let mut all = Vec::with_capacity(N);
    let mut compiled = false;
    for module in modules {
        let inputs = Inputs::read(progress, sources, module, &toolchain)?;
        let entry = cache.ensure(progress, &inputs.key(), |builder, scratch| {
            compiled = true;
            progress.say(&format!(
                "building {} {} (not in the cache); this takes minutes",
                module.name, inputs.version
            ));
            build(progress, &toolchain, &inputs, builder, scratch)
        })?;
        all.push(Built::read(&entry, module)?);
    }
    if compiled {
        let _alone = cache.lock(progress)?;
        Caches::of_user()?.trim(progress)?;
    }
    match all.try_into() {
        Ok(all) => Ok(all),
        // One result was pushed for each module.
        Err(_) => unreachable!("as many results as modules"),
    }
}

/// Compiles a module in `scratch`; returns the folder of its results there.
fn build(
    progress: &dyn Progress,
    toolchain: &Toolchain,
    inputs: &Inputs<'_>,
    builder: &Builder<'_>,
    scratch: &Path,
) -> Result<PathBuf, ProgramsError> {
    let mut log = Log::create(builder.log())?;
    let name = inputs.module.name;
    let task = progress.start(
        &format!("building {name}"),
        Length::Steps(inputs.module.packages),
    );
    let caches = Caches::of_user()?;
    let go = toolchain.go(progress, &caches)?;
    let mut work = Work {
        progress,
        go: &go,
        log: &mut log,
        task: &*task,
    };
    let result = work.compile(inputs, scratch);
    let result = result.map_err(|source| ProgramsError::NotBuilt {
        name,
        log: log.path().to_owned(),
        source: Box::new(source),
    })?;
    task.done();
    Ok(result)
}
