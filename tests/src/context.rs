//! A test: its name, its folder, and what it boots.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::Context;
use hearth_qemu::{
    accel::{self, Accel, Choice},
    artifacts::{Artifacts, Kubernetes},
};

/// QEMU's accelerator, `auto` unless this says `kvm` or `tcg`.
const ACCEL: &str = "HEARTH_TEST_ACCEL";

/// The path of the function that this stands in, `suite::test`, for
/// [`TestCtx::begin`]. So a test's name is written once.
#[macro_export]
macro_rules! here {
    () => {{
        fn here() {}
        std::any::type_name_of_val(&here)
    }};
}

/// One test. Its folder goes when it has passed, and stays otherwise.
#[derive(Debug)]
#[must_use]
pub struct TestCtx {
    suite: String,
    name: String,
    folder: PathBuf,
    artifacts: Artifacts,
    accel: Accel,
    passed: bool,
}

impl TestCtx {
    /// Begins the test at this place ([`here!`]) with an empty folder.
    ///
    /// # Errors
    /// If nobody has built what it boots, or the folder cannot be made.
    pub fn begin(place: &str) -> anyhow::Result<Self> {
        let (suite, name) = names(place);
        let artifacts = Artifacts::from_environment()?;
        let choice: Choice = match env::var(ACCEL) {
            Ok(word) => word.parse().context(ACCEL)?,
            Err(_) => Choice::Auto,
        };
        let folder = artifacts.logs.join(&suite).join(&name);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        Ok(Self {
            suite,
            name,
            folder,
            artifacts,
            accel: accel::choose(choice)?.accel,
            passed: false,
        })
    }

    /// Where it may leave files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What there is to boot.
    pub fn artifacts(&self) -> &Artifacts {
        &self.artifacts
    }

    /// What the tests of Kubernetes boot.
    ///
    /// # Errors
    /// If it was not built.
    pub fn kubernetes(&self) -> anyhow::Result<&Kubernetes> {
        let built = self.artifacts.kubernetes.as_ref();
        built.context("Kubernetes was not built, as none of its tests was to run")
    }

    /// What machines run on.
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// The last line of a test. Its machines must be gone.
    ///
    /// # Errors
    /// If its folder cannot be removed.
    pub fn passed(mut self) -> crate::Outcome {
        self.passed = true;
        fs::remove_dir_all(&self.folder)
            .with_context(|| format!("remove {}", self.folder.display()))?;
        // The suite's goes with its last test's.
        if let Some(suite) = self.folder.parent() {
            let _ = fs::remove_dir(suite);
        }
        Ok(())
    }
}

impl Drop for TestCtx {
    fn drop(&mut self) {
        if !self.passed {
            // By that it was run, if it is one of the long ones.
            let long = std::env::args().any(|word| word == "--include-ignored");
            eprintln!(
                "{0}::{1} leaves its files in {2}\nto repeat it: cargo xtask test e2e {0}::{1}{3}",
                self.suite,
                self.name,
                self.folder.display(),
                if long { " --long" } else { "" },
            );
        }
    }
}

/// `boot::home::{{closure}}::here` is test `home` of suite `boot`; one in a
/// module is named with it.
fn names(place: &str) -> (String, String) {
    let mut parts: Vec<&str> = place.split("::").collect();
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
        assert_eq!(suite, "hearth_tests");
        assert_eq!(name, "context::tests::a_place_has_a_suite_and_a_name");
    }
}
