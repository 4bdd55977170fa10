//! The program of the virtual network, `hearth-switch`. It belongs to another package, so cargo does not build it for
//! these tests; they build it, which takes no time if it is up to date.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Path of the program.
pub(crate) fn switch_program() -> PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(build).clone()
}

fn build() -> PathBuf {
    // target/PROFILE/deps/TEST
    let test = env::current_exe().expect("this test");
    let built = test
        .parent()
        .and_then(Path::parent)
        .expect("the profile's folder");
    let target = built.parent().expect("the target folder");
    let profile = match built.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => "dev",
        Some(profile) => profile,
    };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built_now = Command::new(cargo)
        .args(["build", "--quiet", "--locked", "--package", "hearth-switch"])
        .args(["--bin", "hearth-switch", "--profile", profile])
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        // Set where tests report their times. Whenever it changes, thiserror is compiled again, and with it everything else.
        .env_remove("RUSTC_BOOTSTRAP")
        .status()
        .expect("cargo starts");
    assert!(built_now.success(), "hearth-switch is not built");
    built.join("hearth-switch")
}
