//! `cargo xtask setup`: installs the packages that the other tasks need on this machine.
//!
//! Each task calls [`ensure`] with its own needs, so that a machine that only builds images does not need an emulator.
//! `hearth_build::host` detects and installs packages. Go is no package here: Debian 12 has none that is recent enough
//! (`image/programs` finds or fetches it, also for a task that has to compile a program).

use std::env;
use std::ops::BitOr;
use std::path::Path;

use anyhow::Result;
use hearth_build::host::{Probe, QEMU, command_for_the_user, install};
use hearth_qemu::firmware::{Firmware, NoFirmware};
use hearth_qemu::program as qemu;
use hearth_qemu::tpm::{SWTPM, SWTPM_SETUP};

use crate::checkout::kernel_config;
use crate::command::find_program;
use crate::ui::Ui;

/// The environment variable by which build scripts find the compiler of protocol buffers, before PATH.
const PROTOC: &str = "PROTOC";
/// One of the files that come with it.
const DESCRIPTOR_PROTO: &str = "/usr/include/google/protobuf/descriptor.proto";

/// `cargo xtask setup`: install what is missing on this machine.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Only print the command that would install missing packages
    #[arg(long)]
    dry_run: bool,
}

/// Activities that need packages, as a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs(u16);

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
    /// Boot machines with a TPM.
    pub(crate) const TPM: Needs = Needs(1 << 7);
    /// Run the long tests.
    const LONG_TESTS: Needs = Needs(1 << 8);
    /// Fuzz the node's decoders.
    pub(crate) const FUZZ: Needs = Needs(1 << 9);
    /// Nothing.
    pub(crate) const NONE: Needs = Needs(0);
    /// Everything.
    pub(crate) const ALL: Needs = Needs(u16::MAX);

    /// Build images, boot them and run the tests.
    pub(crate) fn of_tests(long: bool) -> Needs {
        let short = Needs::ALL.0 ^ Needs::BENCH.0 ^ Needs::FUZZ.0 ^ Needs::LONG_TESTS.0;
        match long {
            true => Needs(short) | Needs::LONG_TESTS,
            false => Needs(short),
        }
    }

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
            Needs::NODE | Needs::KERNEL | Needs::KUBERNETES | Needs::FUZZ,
        ),
        file(
            "libc6-dev",
            "/usr/include/stdio.h",
            Needs::NODE | Needs::KERNEL | Needs::KUBERNETES | Needs::FUZZ,
        ),
        // libFuzzer is C++.
        program("g++", "g++", Needs::FUZZ),
        // etcd-client's build script calls it, and its messages import a file of the second package, which the first one
        // only recommends. A program that the user names finds its own files.
        check(
            "protobuf-compiler",
            || env::var_os(PROTOC).is_some() || find_program("protoc").is_some(),
            Needs::NODE | Needs::TEST,
        ),
        check(
            "libprotobuf-dev",
            || env::var_os(PROTOC).is_some() || Path::new(DESCRIPTOR_PROTO).exists(),
            Needs::NODE | Needs::TEST,
        ),
        file(&source, &format!("/usr/src/{source}.tar.xz"), Needs::KERNEL),
        program("make", "make", Needs::KERNEL),
        program("flex", "flex", Needs::KERNEL),
        program("bison", "bison", Needs::KERNEL),
        program("bc", "bc", Needs::KERNEL),
        program("xz-utils", "xz", Needs::KERNEL),
        // Linked into runc.
        file(
            "libseccomp-dev",
            "/usr/lib/x86_64-linux-gnu/libseccomp.a",
            Needs::KUBERNETES,
        ),
        program("pkg-config", "pkg-config", Needs::KUBERNETES),
        program("zstd", "zstd", Needs::KERNEL),
        file("libelf-dev", "/usr/include/gelf.h", Needs::KERNEL),
        file("libssl-dev", "/usr/include/openssl/ssl.h", Needs::KERNEL),
        file(
            "systemd-boot-efi",
            "/usr/lib/systemd/boot/efi/linuxx64.efi.stub",
            Needs::IMAGE,
        ),
        program("xfsprogs", "mkfs.xfs", Needs::IMAGE),
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
        program(SWTPM[1], SWTPM[0], Needs::TPM | Needs::TEST),
        program(SWTPM_SETUP[1], SWTPM_SETUP[0], Needs::TPM | Needs::TEST),
        program("dosfstools", "fsck.vfat", Needs::TEST | Needs::BENCH),
        program("gdisk", "sgdisk", Needs::TEST | Needs::BENCH),
        program("mtools", "mcopy", Needs::TEST | Needs::BENCH),
        // Config drives that are ISO 9660.
        program("genisoimage", "genisoimage", Needs::TEST),
        // The packet filter is tested with real packets, in network namespaces.
        program("nftables", "nft", Needs::TEST),
        program("iproute2", "ip", Needs::TEST),
        // The time service is tested with a real server.
        program("chrony", "chronyd", Needs::TEST),
        program("mmdebstrap", "mmdebstrap", Needs::TEST),
        // Fetches the gRPC library that others use.
        program("python3-pip", "pip3", Needs::LONG_TESTS),
        program("genimage", "genimage", Needs::BENCH),
        program("openssl", "openssl", Needs::TEST | Needs::BENCH),
        // What sealing is compared with, and the library by which they reach the emulator. tpm2-tools brings the other
        // libraries, which systemd-creds loads.
        program("clevis", "clevis", Needs::BENCH),
        program("clevis-tpm2", "clevis-encrypt-tpm2", Needs::BENCH),
        program("tpm2-tools", "tpm2_createprimary", Needs::BENCH),
        program("systemd", "systemd-creds", Needs::BENCH),
        file(
            "libtss2-tcti-swtpm0",
            "/usr/lib/x86_64-linux-gnu/libtss2-tcti-swtpm.so.0",
            Needs::BENCH,
        ),
    ]
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let missing = missing(Needs::ALL)?;
    if args.dry_run {
        if !missing.is_empty() {
            println!("{}", command_for_the_user(&missing));
        }
        return Ok(());
    }
    if missing.is_empty() {
        ui.say("all packages are installed");
    } else {
        install(ui, &missing)?;
    }
    let go = hearth_programs::ensure_go(ui)?;
    ui.say(format_args!("Go is {}", go.display()));
    Ok(())
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
        // Who uses no TPM needs no emulator of one.
        assert!(!names(Needs::RUN | Needs::IMAGE).contains("swtpm"));
        assert!(names(Needs::TPM).contains("swtpm-tools"));
        // Unit tests are compiled on machines that build no image.
        for needs in [Needs::NODE, Needs::TEST] {
            assert!(names(needs).contains("protobuf-compiler"));
            assert!(names(needs).contains("libprotobuf-dev"));
        }
        assert!(!names(Needs::KERNEL | Needs::RUN).contains("protobuf-compiler"));
        assert_eq!(names(Needs::ALL).len(), packages("6.12").len());
    }
}
