//! The build output: cargo's target folder, wherever it is configured, and `hearth/` in it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Result;
use hearth_build::cargo::Checkout;

use crate::checkout::root;

/// This checkout's target folder; queried once.
pub(crate) fn checkout() -> Result<&'static Checkout> {
    static CHECKOUT: OnceLock<Checkout> = OnceLock::new();
    if let Some(checkout) = CHECKOUT.get() {
        return Ok(checkout);
    }
    let checkout = Checkout::at(root())?;
    Ok(CHECKOUT.get_or_init(|| checkout))
}

/// `hearth/NAME` in the target folder; created if absent.
pub(crate) fn folder(name: &str) -> Result<PathBuf> {
    Ok(checkout()?.folder(name)?)
}

/// A path for display: relative if it is below the current folder.
pub(crate) fn shown(path: &Path) -> std::path::Display<'_> {
    let short = std::env::current_dir()
        .ok()
        .and_then(|here| path.strip_prefix(here).ok());
    short.unwrap_or(path).display()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_says_where_its_target_folder_is() {
        // The folder where this test itself was built, unless it was built for a named target.
        let this = std::env::current_exe().unwrap();
        assert!(
            this.starts_with(checkout().unwrap().target()),
            "{}",
            this.display()
        );
    }

    #[test]
    fn paths_below_the_current_folder_are_short() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(shown(&here.join("a/b")).to_string(), "a/b");
        assert_eq!(shown(Path::new("/a")).to_string(), "/a");
    }
}
