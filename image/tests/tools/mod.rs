//! Independent checks of the crate's output with Debian's own tools.

use std::path::Path;
use std::process::Command;

/// Runs a checker and returns its output; fails the test if it reports an error or is not installed.
pub(crate) fn run(program: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(program)
        .args(arguments)
        .arg(file)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output()
        .unwrap_or_else(|e| {
            panic!("this test needs {program} (`cargo xtask setup` installs it): {e}")
        });
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{text}",
        output.status
    );
    text
}

/// `fsck.vfat -n` reports nothing.
pub(crate) fn fsck(volume: &Path) {
    let text = run("fsck.vfat", &["-n"], volume);
    let lines: Vec<&str> = text.lines().collect();
    // The version, and "FILE: N files, M/K clusters".
    assert_eq!(lines.len(), 2, "fsck.vfat complains:\n{text}");
}
