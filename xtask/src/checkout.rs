//! The checkout that the tasks work on: the one that this program was built from.
//!
//! Cargo decides by modification times only. If two checkouts share a target folder, it takes the build of the newer
//! one for up to date in the other, too, and `cargo xtask` there would silently build and boot the wrong tree. So a
//! start from another checkout is refused.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

const MANIFEST: &str = env!("CARGO_MANIFEST_DIR");

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    above(Path::new(MANIFEST)).to_owned()
}

/// Fails if cargo has started this program for another checkout.
pub(crate) fn check() -> Result<()> {
    check_started_for(std::env::var_os("CARGO_MANIFEST_DIR").as_deref())
}

/// `manifest`: the folder of the package that cargo runs, this one or, if a test has started this program, that of the
/// tests; none if cargo has started neither.
fn check_started_for(manifest: Option<&OsStr>) -> Result<()> {
    let Some(manifest) = manifest.map(Path::new) else {
        return Ok(());
    };
    if above(manifest) != root() {
        bail!(
            "this xtask was built from {}, not from {}: the two checkouts share a target folder, and \
             cargo confuses their builds. Give each its own CARGO_TARGET_DIR, or make the sources \
             here the newer ones: git ls-files -z | xargs -0 touch",
            root().display(),
            above(manifest).display()
        );
    }
    Ok(())
}

fn above(manifest: &Path) -> &Path {
    manifest.parent().unwrap_or(manifest)
}

/// The kernel configuration and its pinned series.
pub(crate) fn kernel_config() -> PathBuf {
    root().join("kernel-config")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_for_another_checkout_is_refused() {
        assert!(check_started_for(None).is_ok());
        assert!(check_started_for(Some(OsStr::new(MANIFEST))).is_ok());
        let tests = root().join("tests");
        assert!(check_started_for(Some(tests.as_os_str())).is_ok());
        let error = check_started_for(Some(OsStr::new("/elsewhere/xtask"))).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("not from /elsewhere:"), "{text}");
        assert!(text.contains(&root().display().to_string()), "{text}");
    }
}
