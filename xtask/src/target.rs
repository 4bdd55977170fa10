//! Where build output lies: cargo's target folder, wherever the user has put it, and in it `hearth/`, which is ours.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

use crate::checkout::root;

/// Cargo's target folder.
///
/// Cargo alone knows where it is (`CARGO_TARGET_DIR`, `build.target-dir` in any of its configuration files), so it is
/// asked, once.
pub fn dir() -> Result<&'static Path> {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    if let Some(dir) = DIR.get() {
        return Ok(dir);
    }
    let dir = ask_cargo()?;
    Ok(DIR.get_or_init(|| dir))
}

/// `hearth/NAME` in the target folder, made.
pub fn folder(name: &str) -> Result<PathBuf> {
    let folder = dir()?.join("hearth").join(name);
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder)
}

/// The program `cargo` that runs this task.
pub fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from)
}

/// A path as the user would type it here: relative where it lies below the current folder.
pub fn shown(path: &Path) -> std::path::Display<'_> {
    let short = std::env::current_dir()
        .ok()
        .and_then(|here| path.strip_prefix(here).ok());
    short.unwrap_or(path).display()
}

fn ask_cargo() -> Result<PathBuf> {
    let output = Command::new(cargo())
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .context("cannot start cargo metadata")?;
    if !output.status.success() {
        bail!(
            "cargo metadata failed: {}",
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("cargo metadata: not JSON")?;
    let dir = metadata["target_directory"].as_str();
    Ok(dir
        .context("cargo metadata: no target_directory")?
        .to_owned()
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_says_where_its_target_folder_is() {
        // Where this test itself was built, unless it was built for a named target.
        let this = std::env::current_exe().unwrap();
        assert!(this.starts_with(dir().unwrap()), "{}", this.display());
    }

    #[test]
    fn paths_below_the_current_folder_are_short() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(shown(&here.join("a/b")).to_string(), "a/b");
        assert_eq!(shown(Path::new("/a")).to_string(), "/a");
    }
}
