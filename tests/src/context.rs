//! A test: its name, its folder, its images, and its place ([`crate::places`]).

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs, io};

use anyhow::{Context, ensure};
use hearth_lab::registry::{Access, Registry};
use hearth_qemu::accel::{self, Accel, Choice};
use hearth_qemu::artifacts::{Artifacts, Kubernetes};

use crate::places::{Occupant, Place};

/// The environment variable with QEMU's accelerator: `auto` (default), `kvm` or `tcg`.
const ACCEL: &str = "HEARTH_TEST_ACCEL";

/// The path of the enclosing function, `suite::test`, for [`TestCtx::begin`], so that a test's name is written once.
#[macro_export]
macro_rules! here {
    () => {{
        fn here() {}
        std::any::type_name_of_val(&here)
    }};
}

/// One test. Its folder is removed when it has passed, and kept otherwise.
#[derive(Debug)]
#[must_use]
pub struct TestCtx {
    suite: String,
    name: String,
    folder: PathBuf,
    artifacts: Artifacts,
    accel: Accel,
    passed: bool,
    place: OnceLock<Place>,
}

impl TestCtx {
    /// Begins the test at this place ([`here!`]) with an empty folder.
    ///
    /// # Errors
    /// If the images were not built, or the folder cannot be created.
    pub fn begin(place: &str) -> anyhow::Result<Self> {
        let (suite, name) = names(place);
        let artifacts = Artifacts::from_environment()?;
        let choice: Choice = match env::var(ACCEL) {
            Ok(word) => word.parse().context(ACCEL)?,
            Err(_) => Choice::Auto,
        };
        let folder = artifacts.logs.join(&suite).join(&name);
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self {
            suite,
            name,
            folder,
            artifacts,
            accel: accel::choose(choice)?.accel,
            passed: false,
            place: OnceLock::new(),
        })
    }

    /// Waits for its place, which it keeps to its end. For a test that starts machines by other means than this library.
    ///
    /// # Errors
    /// If the number of places is invalid.
    pub fn place(&self) -> crate::Outcome {
        self.take(Occupant::Machines).map(drop)
    }

    /// Waits for its turn to have this cluster, and for its place.
    ///
    /// # Errors
    /// If it has a place for other machines already: two tests could wait for each other.
    pub(crate) fn turn(&self, cluster: Occupant) -> crate::Outcome {
        let occupant = self.take(cluster)?.occupant();
        ensure!(
            occupant == cluster,
            "a test takes the cluster that needs most before its other machines"
        );
        Ok(())
    }

    /// Its place, which it waits for if it has none. A test does this in one thread.
    fn take(&self, occupant: Occupant) -> anyhow::Result<&Place> {
        match self.place.get() {
            Some(place) => Ok(place),
            None => {
                let place = Place::wait(occupant)?;
                Ok(self.place.get_or_init(|| place))
            }
        }
    }

    /// The folder for its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The images and programs.
    pub fn artifacts(&self) -> &Artifacts {
        &self.artifacts
    }

    /// The images and programs of the Kubernetes tests.
    ///
    /// # Errors
    /// If they were not built.
    pub fn kubernetes(&self) -> anyhow::Result<&Kubernetes> {
        let built = self.artifacts.kubernetes.as_ref();
        built.context("Kubernetes was not built, because none of its tests was selected")
    }

    /// Starts a registry of images, for whoever has the login; its files are in the test's folder.
    ///
    /// # Errors
    /// If Kubernetes was not built, or the registry does not serve.
    pub async fn registry(&self) -> anyhow::Result<Registry> {
        let program = &self.kubernetes()?.registry;
        let folder = self.folder.join("registry");
        Ok(Registry::start(program, &folder, Access::Login).await?)
    }

    /// The accelerator of the machines.
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// The last line of a test. Its machines must have ended.
    ///
    /// # Errors
    /// If its folder cannot be removed.
    pub fn passed(mut self) -> crate::Outcome {
        self.passed = true;
        fs::remove_dir_all(&self.folder)
            .with_context(|| format!("cannot remove {}", self.folder.display()))?;
        // The suite's folder is removed with its last test's.
        if let Some(suite) = self.folder.parent() {
            let _ = fs::remove_dir(suite);
        }
        Ok(())
    }
}

impl Drop for TestCtx {
    fn drop(&mut self) {
        if let Some(place) = self.place.get() {
            // The harness would count the wait for the place. Not captured by it: `cargo xtask test` reads the line.
            let took = place.since().elapsed().as_secs_f64();
            let _ = writeln!(
                io::stderr(),
                "time {}::{} {took:.1} s",
                self.suite,
                self.name
            );
        }
        if !self.passed {
            // The option that a long test was run with.
            let long = std::env::args().any(|word| word == "--include-ignored");
            eprintln!(
                "files of {0}::{1}: {2}\nrerun: cargo xtask test e2e {0}::{1}{3}",
                self.suite,
                self.name,
                self.folder.display(),
                if long { " --long" } else { "" },
            );
        }
    }
}

/// `e2e::boot::home::{{closure}}::here` is test `home` of suite `boot`; the module is part of a test's name.
fn names(place: &str) -> (String, String) {
    let mut parts: Vec<&str> = place.split("::").skip(1).collect();
    parts.retain(|part| !matches!(*part, "{{closure}}" | "here"));
    let suite = parts.first().copied().unwrap_or_default().to_owned();
    (suite, parts.get(1..).unwrap_or_default().join("::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_place_has_a_suite_and_a_name() {
        let (suite, name) = names(here!());
        assert_eq!(suite, "context");
        assert_eq!(name, "tests::a_place_has_a_suite_and_a_name");
    }
}
