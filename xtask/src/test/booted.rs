//! What the end-to-end tests boot and run.

use std::path::{Path, PathBuf};
use std::{panic, thread};

use anyhow::{Context, Result};
use hearth_qemu::artifacts;

use super::selection::Selection;
use crate::bundle::{self, Bundle};
use crate::image::{self, Artifacts, Flavour, to_boot};
use crate::ui::Ui;
use crate::{hearthctl, program, programs, target};

/// The suites that need Kubernetes.
const KUBERNETES: [&str; 2] = ["kubernetes", "greed"];

/// The suites that need installation media.
const INSTALLER: [&str; 2] = ["installer", "newcomer"];

/// The suite that also needs Kubernetes' own tests.
const CONFORMANCE: &str = "conformance";

/// The Kubernetes that the selected tests need. A first build takes minutes, so it is only built for its own tests.
pub(super) struct Kubernetes {
    bundle: Bundle,
    conformance: Option<PathBuf>,
    add_ons: Option<artifacts::AddOns>,
}

impl Kubernetes {
    /// Builds what is not in the cache; none if no selected test needs it.
    pub(super) fn ensure(ui: &Ui, selection: &Selection, long: bool) -> Result<Option<Kubernetes>> {
        let has = |name| selection.whole.as_deref().is_none_or(|suite| suite == name);
        let conformance = long && has(CONFORMANCE);
        if !conformance && !KUBERNETES.into_iter().any(has) {
            return Ok(None);
        }
        let bundle = bundle::ensure(ui, None)?;
        let add_ons = match long && has(KUBERNETES[0]) {
            true => Some(programs::add_ons(ui)?),
            false => None,
        };
        let (bundle, conformance) = match conformance {
            true => {
                let tests = bundle::ensure_conformance(ui, &bundle)?;
                (tests.bundle, Some(tests.program))
            }
            false => (bundle, None),
        };
        Ok(Some(Kubernetes {
            bundle,
            conformance,
            add_ons,
        }))
    }

    /// The folder of the bundle.
    pub(super) fn root(&self) -> &Path {
        &self.bundle.root
    }

    fn to_boot(&self, ui: &Ui) -> Result<artifacts::Kubernetes> {
        let extension = image::of_bundle(&self.bundle)?;
        let extended = image::ensure_extended(ui, Flavour::Test, &[extension])?;
        let kubectl = self.bundle.kubectl.clone();
        Ok(artifacts::Kubernetes {
            image: to_boot(&extended),
            kubectl: kubectl.context("the bundle has no kubectl")?,
            registry: programs::registry(ui)?,
            probe: self.root().join("images/probe.tar"),
            add_ons: self.add_ons.clone(),
            conformance: self.conformance.clone(),
        })
    }
}

/// The two builds of the node, side by side: one processor is idle while the release is linked.
fn release_and_test(ui: &Ui) -> [Result<Artifacts>; 2] {
    thread::scope(|scope| {
        let release = scope.spawn(|| image::ensure(ui, Flavour::Release));
        let test = image::ensure(ui, Flavour::Test);
        let release = release.join();
        [
            release.unwrap_or_else(|panic| panic::resume_unwind(panic)),
            test,
        ]
    })
}

/// The media of the installer, if one of its tests is selected.
fn installer(ui: &Ui, selection: &Selection) -> Result<Option<artifacts::Installer>> {
    let has = |name| selection.whole.as_deref().is_none_or(|suite| suite == name);
    if !INSTALLER.into_iter().any(has) {
        return Ok(None);
    }
    let [stick, disc] = image::ensure_installer(ui)?;
    Ok(Some(artifacts::Installer { stick, disc }))
}

/// Builds everything; returns the path of the manifest.
pub(super) fn build(
    ui: &Ui,
    selection: &Selection,
    kubernetes: Option<&Kubernetes>,
) -> Result<PathBuf> {
    let folder = target::folder("tests")?;
    let sample = image::sample()?;
    let [release, test] = release_and_test(ui);
    let manifest = artifacts::Artifacts {
        release: to_boot(&release?),
        test: to_boot(&test?),
        installer: installer(ui, selection)?,
        kubernetes: kubernetes.map(|built| built.to_boot(ui)).transpose()?,
        extended: to_boot(&image::ensure_extended(ui, Flavour::Test, &[sample])?),
        machine_check: to_boot(&image::ensure_example(ui, image::MACHINE_CHECK)?),
        hearthctl: hearthctl::build(ui)?,
        xtask: std::env::current_exe().context("cannot find this program")?,
        switch: program::switch(ui)?,
        logs: folder.clone(),
    };
    let path = folder.join("artifacts.json");
    let text = serde_json::to_string_pretty(&manifest)? + "\n";
    hearth_image::output::write(&path, text.as_bytes())?;
    Ok(path)
}
