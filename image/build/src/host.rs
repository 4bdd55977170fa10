//! Packages that this machine lacks, and how they are installed.
//!
//! A package is detected by one file or program of it, not by asking dpkg: that costs nothing when nothing is missing,
//! and accepts what was installed by other means. Missing packages are installed by apt if that needs no question;
//! otherwise the error contains the one command that installs them.

use std::path::PathBuf;

use crate::command::{Cmd, CommandError, find_program};
use crate::progress::{Length, Progress};

/// How a package is detected.
#[derive(Debug)]
pub enum Probe {
    /// By one of its files.
    File(PathBuf),
    /// By one of its programs.
    Program(&'static str),
    /// By a question to the code that uses it.
    Check(fn() -> bool),
}

impl Probe {
    /// Whether the package is present.
    pub fn finds(&self) -> bool {
        match self {
            Probe::File(path) => path.exists(),
            Probe::Program(name) => find_program(name).is_some(),
            Probe::Check(is_there) => is_there(),
        }
    }
}

/// Why packages were not installed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// There is no apt-get.
    #[error(
        "packages are missing and there is no apt-get; install the equivalents of these Debian packages: {0}"
    )]
    NoApt(String),
    /// The user has to install them.
    #[error("packages are missing; install them with:\n\n    {0}\n")]
    NotRoot(String),
    /// An apt command failed.
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// The emulator and its disk tool: one source package in two halves, which must be installed in the same version.
pub const QEMU: [&str; 2] = ["qemu-system-x86", "qemu-utils"];

/// Installs packages without asking: as root, or by a sudo that needs no password.
pub fn install(progress: &dyn Progress, missing: &[String]) -> Result<(), HostError> {
    if find_program("apt-get").is_none() {
        return Err(HostError::NoApt(missing.join(" ")));
    }
    let script = install_script(missing);
    let shell = if nix::unistd::geteuid().is_root() {
        Cmd::new("sh")
    } else if sudo_asks_nothing(progress) {
        Cmd::new("sudo").args(["-n", "sh"])
    } else {
        return Err(HostError::NotRoot(command_for_the_user(missing)));
    };
    progress.say(&format!("missing packages: {}", missing.join(" ")));
    let task = progress.start("installing packages", Length::Unknown);
    // Interrupting dpkg leaves the machine's packages half-installed.
    shell
        .arg("-c")
        .arg(script)
        .shielded()
        .stream(progress, |line| {
            task.now(line);
            Ok(())
        })?;
    task.done();
    Ok(())
}

fn sudo_asks_nothing(progress: &dyn Progress) -> bool {
    find_program("sudo").is_some() && Cmd::new("sudo").args(["-n", "true"]).run(progress).is_ok()
}

/// The one command that an ordinary user has to run.
pub fn command_for_the_user(missing: &[String]) -> String {
    format!(
        "sudo sh -c '{}'",
        install_script(missing).replace('\'', r"'\''")
    )
}

/// The shell script that installs packages; it has to run as root.
pub fn install_script(missing: &[String]) -> String {
    let is_qemu = |name: &String| QEMU.contains(&name.as_str());
    let mut words: Vec<String> = missing
        .iter()
        .filter(|name| !is_qemu(name))
        .cloned()
        .collect();
    let mut options = "--yes --no-install-recommends".to_owned();
    let mut script = "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get update; ".to_owned();
    if missing.iter().any(is_qemu) {
        // One half may be installed from backports, newer than the candidate of the other.
        script +=
            r#"v=$(LC_ALL=C apt-cache policy qemu-system-x86 | sed -n "s/^ *Candidate: //p"); "#;
        options += " --allow-downgrades";
        words.extend(QEMU.map(|name| format!("{name}=$v")));
    }
    script += &format!("apt-get install {options} {}", words.join(" "));
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(names: &[&str]) -> String {
        install_script(
            &names
                .iter()
                .map(|name| (*name).to_owned())
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn plain_packages_are_installed_after_an_update() {
        assert_eq!(
            script(&["flex", "bc"]),
            "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get update; \
             apt-get install --yes --no-install-recommends flex bc"
        );
    }

    #[test]
    fn either_half_of_qemu_brings_both_in_one_version() {
        for missing in [
            &["qemu-system-x86", "bc"][..],
            &["bc", "qemu-utils"],
            &["qemu-system-x86", "bc", "qemu-utils"],
        ] {
            let script = script(missing);
            let end = "apt-get install --yes --no-install-recommends --allow-downgrades bc qemu-system-x86=$v qemu-utils=$v";
            assert!(script.ends_with(end) && script.contains("v=$("), "{script}");
        }
    }

    #[test]
    fn probes_tell_what_is_there() {
        assert!(Probe::Program("sh").finds() && !Probe::Program("no such program").finds());
        assert!(
            Probe::File("/bin/sh".into()).finds() && !Probe::File("/no/such/file".into()).finds()
        );
    }
}
