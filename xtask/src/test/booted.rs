//! What the end-to-end tests boot and run.

use std::path::{Path, PathBuf};
use std::{panic, thread};

use anyhow::{Context, Result};
use hearth_qemu::artifacts;
use hearth_runner::Program;

use super::selection::Selection;
use crate::bundle::{self, Bundle};
use crate::image::{self, Artifacts, Flavour, to_boot};
use crate::ui::Ui;
use crate::{hearthctl, program, programs, target};

/// How the names of tests begin that need Kubernetes.
const KUBERNETES: &[&str] = &["kubernetes::", "greed::"];

/// Those that also need Kubernetes' own tests, if they are long: the others only read the list of them.
const CONFORMANCE: &str = "conformance::";

/// Those that also need what most clusters add.
const ADD_ONS: &str = "kubernetes::first_day::";

/// Those that need installation media.
const INSTALLER: &[&str] = &["installer::", "newcomer::"];

/// The names of the tests that will run, which decide what has to be built for them.
pub(super) struct Tests {
    names: Vec<String>,
    long: bool,
}

impl Tests {
    /// Those of the program that are selected; long ones only if they are to run.
    pub(super) fn of(
        ui: &Ui,
        program: &Program,
        selection: &Selection,
        long: bool,
    ) -> Result<Self> {
        let mut names = program.tests(ui)?;
        names.retain(|name| selection.has(name));
        if !long {
            let long = program.ignored_tests(ui)?;
            names.retain(|name| !long.contains(name));
        }
        Ok(Self { names, long })
    }

    /// Whether one of them begins like this.
    fn need(&self, beginnings: &[&str]) -> bool {
        let is_one = |name: &String| beginnings.iter().any(|part| name.starts_with(part));
        self.names.iter().any(is_one)
    }
}

/// The Kubernetes that the selected tests need. A first build takes minutes, so it is only built for its own tests.
pub(super) struct Kubernetes {
    bundle: Bundle,
    conformance: Option<PathBuf>,
    add_ons: Option<artifacts::AddOns>,
}

impl Kubernetes {
    /// Builds what is not in the cache; none if no selected test needs it.
    pub(super) fn ensure(ui: &Ui, tests: &Tests) -> Result<Option<Kubernetes>> {
        let conformance = tests.long && tests.need(&[CONFORMANCE]);
        if !conformance && !tests.need(KUBERNETES) {
            return Ok(None);
        }
        let bundle = bundle::ensure(ui, None)?;
        let add_ons = match tests.need(&[ADD_ONS]) {
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
fn installer(ui: &Ui, tests: &Tests) -> Result<Option<artifacts::Installer>> {
    if !tests.need(INSTALLER) {
        return Ok(None);
    }
    let [stick, disc] = image::ensure_installer(ui)?;
    Ok(Some(artifacts::Installer { stick, disc }))
}

/// Builds everything; returns the path of the manifest.
pub(super) fn build(ui: &Ui, tests: &Tests, kubernetes: Option<&Kubernetes>) -> Result<PathBuf> {
    let folder = target::folder("tests")?;
    let sample = image::sample()?;
    let [release, test] = release_and_test(ui);
    let manifest = artifacts::Artifacts {
        release: to_boot(&release?),
        test: to_boot(&test?),
        installer: installer(ui, tests)?,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkout::root;
    use crate::test::E2E;

    #[test]
    fn what_tests_need_is_told_by_their_modules() {
        let folder = root().join("tests/tests").join(E2E);
        let beginnings = [KUBERNETES, INSTALLER, &[ADD_ONS, CONFORMANCE]].concat();
        for beginning in beginnings {
            let module = beginning.trim_end_matches("::").replace("::", "/");
            let file = folder.join(module).with_extension("rs");
            assert!(file.exists(), "{} is missing", file.display());
        }
        let tests = Tests {
            names: vec!["kubernetes::a_pod".to_owned()],
            long: false,
        };
        assert!(tests.need(KUBERNETES));
        assert!(!tests.need(&[ADD_ONS]) && !tests.need(INSTALLER));
    }
}
