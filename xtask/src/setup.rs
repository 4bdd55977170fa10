//! `cargo xtask setup`: the packages that the other tasks need on this machine.
//!
//! Each task calls [`ensure`] with its own needs, so that a machine that only builds images is never asked for an
//! emulator. What is there is found by looking for one file or program of each package, not by asking dpkg: it costs
//! nothing when nothing is missing, and something installed by other means counts. What is missing is installed by apt
//! where that needs no question (as root, or by a sudo that asks for no password); otherwise the user gets the one command
//! that does it.

use std::ops::BitOr;
use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::command::{Cmd, find_program};
use crate::kernel;
use crate::ui::Ui;

/// `cargo xtask setup`: install what is missing on this machine.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Only print the command that would install what is missing
    #[arg(long)]
    dry_run: bool,
}

/// What a task is about to do, as a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs(u8);

impl Needs {
    /// Compile the node.
    pub const NODE: Needs = Needs(1);
    /// Build the kernel.
    pub const KERNEL: Needs = Needs(1 << 1);
    /// Assemble images from a node and a kernel.
    pub const IMAGE: Needs = Needs(1 << 2);
    /// Boot images.
    pub const RUN: Needs = Needs(1 << 3);
    /// Run the tests, beside what they build and boot.
    pub const TEST: Needs = Needs(1 << 4);
    /// Run the benchmarks, beside what they build and boot.
    pub const BENCH: Needs = Needs(1 << 5);
    /// Build the Kubernetes bundle.
    pub const KUBERNETES: Needs = Needs(1 << 6);
    /// All but the benchmarks'.
    pub const ALL_BUT_BENCH: Needs = Needs(u8::MAX ^ Needs::BENCH.0);
    /// Everything.
    pub const ALL: Needs = Needs(u8::MAX);

    fn meets(self, other: Needs) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for Needs {
    type Output = Needs;

    fn bitor(self, other: Needs) -> Needs {
        Needs(self.0 | other.0)
    }
}

/// How it shows that a package is there.
#[derive(Debug)]
enum Probe {
    File(PathBuf),
    Program(&'static str),
}

impl Probe {
    fn finds(&self) -> bool {
        match self {
            Probe::File(path) => path.exists(),
            Probe::Program(name) => find_program(name).is_some(),
        }
    }
}

/// A package of Debian's.
#[derive(Debug)]
struct Package {
    name: String,
    probe: Probe,
    needs: Needs,
}

/// The emulator and its disk tool: one source package in two halves, which refuse to be installed in different versions.
const QEMU: [&str; 2] = ["qemu-system-x86", "qemu-utils"];

/// Brings a service of its own, which we do not want on the developer's machine.
const ETCD: &str = "etcd-server";

/// What there is to need. `series` is the pinned series of the kernel.
fn packages(series: &str) -> Vec<Package> {
    let program = |name: &str, program, needs| Package {
        name: name.into(),
        probe: Probe::Program(program),
        needs,
    };
    let file = |name: &str, path: &str, needs| Package {
        name: name.into(),
        probe: Probe::File(path.into()),
        needs,
    };
    let source = format!("linux-source-{series}");
    vec![
        program(
            "gcc",
            "gcc",
            Needs::NODE | Needs::KERNEL | Needs::KUBERNETES,
        ),
        file(
            "libc6-dev",
            "/usr/include/stdio.h",
            Needs::NODE | Needs::KERNEL,
        ),
        file(&source, &format!("/usr/src/{source}.tar.xz"), Needs::KERNEL),
        program("make", "make", Needs::KERNEL),
        program("flex", "flex", Needs::KERNEL),
        program("bison", "bison", Needs::KERNEL),
        program("bc", "bc", Needs::KERNEL),
        program("xz-utils", "xz", Needs::KERNEL | Needs::KUBERNETES),
        program("patch", "patch", Needs::KUBERNETES),
        program("zstd", "zstd", Needs::KERNEL),
        file("libelf-dev", "/usr/include/gelf.h", Needs::KERNEL),
        file("libssl-dev", "/usr/include/openssl/ssl.h", Needs::KERNEL),
        file(
            "systemd-boot-efi",
            "/usr/lib/systemd/boot/efi/linuxx64.efi.stub",
            Needs::IMAGE,
        ),
        program("xfsprogs", "mkfs.xfs", Needs::IMAGE),
        program(ETCD, "etcd", Needs::IMAGE | Needs::TEST),
        program(QEMU[0], "qemu-system-x86_64", Needs::RUN),
        program(QEMU[1], "qemu-img", Needs::RUN),
        file("ovmf", "/usr/share/OVMF/OVMF_CODE_4M.fd", Needs::RUN),
        program("dosfstools", "fsck.vfat", Needs::TEST),
        program("gdisk", "sgdisk", Needs::TEST | Needs::BENCH),
        program("mtools", "mcopy", Needs::TEST | Needs::BENCH),
        program("genimage", "genimage", Needs::BENCH),
    ]
}

/// Runs the task.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let missing = missing(Needs::ALL)?;
    if missing.is_empty() {
        ui.say("nothing is missing");
        return Ok(());
    }
    if args.dry_run {
        println!("{}", command_for_the_user(&missing));
        return Ok(());
    }
    install(ui, &missing)
}

/// Makes sure that the machine has what these needs take; silent when it has.
pub fn ensure(ui: &Ui, needs: Needs) -> Result<()> {
    let missing = missing(needs)?;
    if missing.is_empty() {
        Ok(())
    } else {
        install(ui, &missing)
    }
}

fn missing(needs: Needs) -> Result<Vec<String>> {
    let packages = packages(&kernel::series()?);
    let missing = packages
        .into_iter()
        .filter(|package| package.needs.meets(needs) && !package.probe.finds());
    Ok(missing.map(|package| package.name).collect())
}

fn install(ui: &Ui, missing: &[String]) -> Result<()> {
    if find_program("apt-get").is_none() {
        bail!(
            "this machine lacks what Debian has in these packages, and has no apt-get: {}",
            missing.join(" ")
        );
    }
    let script = install_script(missing);
    let shell = if nix::unistd::geteuid().is_root() {
        Cmd::new("sh")
    } else if sudo_asks_nothing(ui) {
        Cmd::new("sudo").args(["-n", "sh"])
    } else {
        bail!(
            "packages are missing; install them with:\n\n    {}\n",
            command_for_the_user(missing)
        );
    };
    ui.say(format_args!("missing here: {}", missing.join(" ")));
    let task = ui.task("installing packages");
    // An interrupted dpkg leaves the machine's packages in pieces.
    shell.arg("-c").arg(script).shielded().stream(ui, |line| {
        task.now(line);
        Ok(())
    })?;
    task.done();
    Ok(())
}

fn sudo_asks_nothing(ui: &Ui) -> bool {
    find_program("sudo").is_some() && Cmd::new("sudo").args(["-n", "true"]).run(ui).is_ok()
}

/// The one command that an ordinary user gives.
fn command_for_the_user(missing: &[String]) -> String {
    format!(
        "sudo sh -c '{}'",
        install_script(missing).replace('\'', r"'\''")
    )
}

/// The shell script, to be run as root, that installs packages.
fn install_script(missing: &[String]) -> String {
    let is_qemu = |name: &String| QEMU.contains(&name.as_str());
    let mut words: Vec<String> = missing
        .iter()
        .filter(|name| !is_qemu(name))
        .cloned()
        .collect();
    let mut options = "--yes --no-install-recommends".to_owned();
    let mut script = "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get update; ".to_owned();
    if missing.iter().any(is_qemu) {
        // One half may be there from backports, newer than the candidate of the other.
        script +=
            r#"v=$(LC_ALL=C apt-cache policy qemu-system-x86 | sed -n "s/^ *Candidate: //p"); "#;
        options += " --allow-downgrades";
        words.extend(QEMU.map(|name| format!("{name}=$v")));
    }
    script += &format!("apt-get install {options} {}", words.join(" "));
    if missing.iter().any(|name| name == ETCD) {
        script += "; if [ -d /run/systemd/system ]; then systemctl disable --now etcd; ";
        script += "elif [ -x /etc/init.d/etcd ]; then /etc/init.d/etcd stop || true; update-rc.d etcd disable; fi";
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

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
    fn no_etcd_is_left_running() {
        assert!(script(&["etcd-server"]).contains("systemctl disable --now etcd"));
        assert!(!script(&["etcd-client"]).contains("systemctl"));
    }

    #[test]
    fn scripts_are_shell_and_survive_the_quoting() {
        let all: Vec<String> = packages("6.12")
            .into_iter()
            .map(|package| package.name)
            .collect();
        let script = install_script(&all);
        let printed = Cmd::new("sh").arg("-c").arg(format!(
            "set -- {}; printf %s \"$4\"",
            command_for_the_user(&all)
        ));
        assert_eq!(printed.output(&Ui::new(false)).unwrap(), script);
        Cmd::new("sh")
            .arg("-n")
            .arg("-c")
            .arg(script)
            .run(&Ui::new(false))
            .unwrap();
    }

    #[test]
    fn tasks_ask_for_their_own() {
        let names = |needs: Needs| -> BTreeSet<String> {
            packages("6.12")
                .into_iter()
                .filter(|package| package.needs.meets(needs))
                .map(|package| package.name)
                .collect()
        };
        assert!(names(Needs::KERNEL).contains("linux-source-6.12"));
        assert!(!names(Needs::KERNEL).contains("qemu-system-x86"));
        assert!(!names(Needs::RUN | Needs::IMAGE).contains("genimage"));
        assert_eq!(names(Needs::ALL).len(), packages("6.12").len());
    }

    #[test]
    fn probes_tell_what_is_there() {
        assert!(Probe::Program("sh").finds() && !Probe::Program("no such program").finds());
        assert!(
            Probe::File("/bin/sh".into()).finds() && !Probe::File("/no/such/file".into()).finds()
        );
    }
}
