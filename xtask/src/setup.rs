//! `cargo xtask setup`: installs the packages that the other tasks need on this machine.
//!
//! Each task calls [`ensure`] with its own needs, so that a machine that only builds images does not need an emulator.
//! `hearth_build::host` detects and installs packages.

use std::env;
use std::ops::BitOr;

use anyhow::Result;
use hearth_build::host::{ETCD, Probe, QEMU, command_for_the_user, install};
use hearth_qemu::firmware::{Firmware, NoFirmware};
use hearth_qemu::program as qemu;

use crate::checkout::kernel_config;
use crate::command::find_program;
use crate::ui::Ui;

/// `cargo xtask setup`: install what is missing on this machine.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Only print the command that would install missing packages
    #[arg(long)]
    dry_run: bool,
}

/// Activities that need packages, as a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs(u8);

impl Needs {
    /// Compile the node.
    pub(crate) const NODE: Needs = Needs(1);
    /// Build the kernel.
    pub(crate) const KERNEL: Needs = Needs(1 << 1);
    /// Assemble images from a node and a kernel.
    pub(crate) const IMAGE: Needs = Needs(1 << 2);
    /// Boot images.
    pub(crate) const RUN: Needs = Needs(1 << 3);
    /// Run the tests, in addition to building and booting.
    pub(crate) const TEST: Needs = Needs(1 << 4);
    /// Run the benchmarks, in addition to building and booting.
    pub(crate) const BENCH: Needs = Needs(1 << 5);
    /// Build the Kubernetes bundle.
    pub(crate) const KUBERNETES: Needs = Needs(1 << 6);
    /// Everything except the benchmarks.
    pub(crate) const ALL_BUT_BENCH: Needs = Needs(u8::MAX ^ Needs::BENCH.0);
    /// Everything.
    pub(crate) const ALL: Needs = Needs(u8::MAX);

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

/// A Debian package.
#[derive(Debug)]
struct Package {
    name: String,
    probe: Probe,
    needs: Needs,
}

/// All packages. `series` is the pinned series of the kernel.
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
    let check = |name: &str, is_there: fn() -> bool, needs| Package {
        name: name.into(),
        probe: Probe::Check(is_there),
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
        // A variable that names no program is an error of the machine, not a missing package.
        check(
            QEMU[0],
            || env::var_os(qemu::ENVIRONMENT).is_some() || find_program(qemu::NAME).is_some(),
            Needs::RUN,
        ),
        program(QEMU[1], "qemu-img", Needs::RUN),
        check(
            "ovmf",
            || !matches!(Firmware::locate(), Err(NoFirmware::Nowhere(_))),
            Needs::RUN,
        ),
        program("dosfstools", "fsck.vfat", Needs::TEST | Needs::BENCH),
        program("gdisk", "sgdisk", Needs::TEST | Needs::BENCH),
        program("mtools", "mcopy", Needs::TEST | Needs::BENCH),
        program("mmdebstrap", "mmdebstrap", Needs::TEST),
        program("genimage", "genimage", Needs::BENCH),
    ]
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let missing = missing(Needs::ALL)?;
    if missing.is_empty() {
        ui.say("all packages are installed");
        return Ok(());
    }
    if args.dry_run {
        println!("{}", command_for_the_user(&missing));
        return Ok(());
    }
    Ok(install(ui, &missing)?)
}

/// Makes sure that the packages for these needs are installed; silent if they are.
pub(crate) fn ensure(ui: &Ui, needs: Needs) -> Result<()> {
    let missing = missing(needs)?;
    if missing.is_empty() {
        Ok(())
    } else {
        Ok(install(ui, &missing)?)
    }
}

fn missing(needs: Needs) -> Result<Vec<String>> {
    let packages = packages(&hearth_kernel::series(&kernel_config())?);
    let missing = packages
        .into_iter()
        .filter(|package| package.needs.meets(needs) && !package.probe.finds());
    Ok(missing.map(|package| package.name).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use hearth_build::host::install_script;

    use super::*;
    use crate::command::Cmd;

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
}
