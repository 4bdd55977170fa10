//! Selects the accelerator of a machine.
//!
//! KVM is used only where it really works: the CPU has virtualisation extensions, and `/dev/kvm` opens, has the
//! expected version and creates a virtual machine. Each of these can hold without the others; in particular there are
//! hosts whose `/dev/kvm` opens and creates machines, on which QEMU then fails an assertion. Everywhere else TCG is
//! used, which is slow and runs anywhere.
//!
//! [`decide`] is pure, so that every combination can be tested on any host.

use std::fs::{self, File};
use std::str::{FromStr, SplitWhitespace};
use std::{fmt, io};

use crate::kvm;

const DEVICE: &str = "/dev/kvm";
pub(crate) const CPUINFO: &str = "/proc/cpuinfo";

/// The user's choice (`--accel`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// KVM where it really works, else TCG.
    #[default]
    Auto,
    /// KVM, or an error with the reason.
    Kvm,
    /// TCG, even where KVM works.
    Tcg,
}

impl FromStr for Choice {
    type Err = AccelError;

    fn from_str(word: &str) -> Result<Self, AccelError> {
        match word {
            "auto" => Ok(Self::Auto),
            "kvm" => Ok(Self::Kvm),
            "tcg" => Ok(Self::Tcg),
            other => Err(AccelError::Unknown(other.to_owned())),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// The accelerator of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// Hardware virtualisation.
    Kvm,
    /// QEMU's translator, one thread for each virtual CPU.
    Tcg,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
        })
    }
}

/// A decision and its reason, as text for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The accelerator.
    pub accel: Accel,
    /// The reason, as a clause: "requested", "the CPU has no vmx or svm flag".
    pub because: String,
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.accel, self.because)
    }
}

/// Why KVM is not usable on this host.
#[derive(Debug, thiserror::Error)]
pub enum KvmUnusable {
    /// The CPU, as this system sees it, has no virtualisation extensions.
    #[error("the CPU has no vmx or svm flag")]
    NoCpuFlag,
    /// The CPU's flags could not be read.
    #[error("cannot read {CPUINFO}: {0}")]
    CpuInfo(#[source] io::Error),
    /// The device is absent, or not accessible.
    #[error("cannot open {DEVICE}: {0}")]
    Open(#[source] io::Error),
    /// The version could not be read.
    #[error("cannot read the API version of {DEVICE}: {0}")]
    Version(#[source] io::Error),
    /// It has another version.
    #[error("{DEVICE} API version: expected {wanted}, got {0}", wanted = kvm::API_VERSION)]
    OtherVersion(i32),
    /// It creates no virtual machine.
    #[error("cannot create a virtual machine with {DEVICE}: {0}")]
    CreateVm(#[source] io::Error),
}

/// Why no accelerator can be used.
#[derive(Debug, thiserror::Error)]
pub enum AccelError {
    /// The name is unknown.
    #[error("accelerator {0:?}: expected auto, kvm or tcg")]
    Unknown(String),
    /// KVM was required.
    #[error("KVM was requested but is not usable: {0}")]
    Kvm(#[source] KvmUnusable),
}

/// The results of probing KVM on this host.
#[derive(Debug)]
pub struct Probe {
    /// Whether the CPU shows virtualisation extensions.
    pub cpu: Result<(), KvmUnusable>,
    /// Whether the device works.
    pub device: Result<(), KvmUnusable>,
}

impl Probe {
    /// Probes this host.
    pub fn host() -> Self {
        Self {
            cpu: match fs::read_to_string(CPUINFO) {
                Ok(text) if has_virtualisation(&text) => Ok(()),
                Ok(_) => Err(KvmUnusable::NoCpuFlag),
                Err(error) => Err(KvmUnusable::CpuInfo(error)),
            },
            device: try_device(),
        }
    }
}

/// Chooses for this host.
///
/// # Errors
/// If KVM is required and does not work.
pub fn choose(choice: Choice) -> Result<Chosen, AccelError> {
    match choice {
        // Not even probed: the user may have a reason to leave the device alone.
        Choice::Tcg => Ok(asked_for(Accel::Tcg)),
        choice => decide(choice, Probe::host()),
    }
}

/// Decides by the results of the probe.
///
/// An explicit `kvm` overrides the check of the CPU's flags, which a nested hypervisor may hide, but not that of the
/// device: without it QEMU cannot start.
///
/// # Errors
/// If KVM is required and its device does not work.
pub fn decide(choice: Choice, probe: Probe) -> Result<Chosen, AccelError> {
    match choice {
        Choice::Tcg => Ok(asked_for(Accel::Tcg)),
        Choice::Kvm => match probe.device {
            Ok(()) => Ok(asked_for(Accel::Kvm)),
            Err(why) => Err(AccelError::Kvm(why)),
        },
        Choice::Auto => Ok(match probe.cpu.and(probe.device) {
            Ok(()) => Chosen {
                accel: Accel::Kvm,
                because: "it works here".to_owned(),
            },
            Err(why) => Chosen {
                accel: Accel::Tcg,
                because: why.to_string(),
            },
        }),
    }
}

fn asked_for(accel: Accel) -> Chosen {
    Chosen {
        accel,
        because: "requested".to_owned(),
    }
}

/// Whether `cpuinfo` (the text of `/proc/cpuinfo`) shows VT-x or AMD-V.
fn has_virtualisation(cpuinfo: &str) -> bool {
    let mut all = flags(cpuinfo).flatten();
    all.any(|flag| flag == "vmx" || flag == "svm")
}

/// The flags of each processor.
pub(crate) fn flags(cpuinfo: &str) -> impl Iterator<Item = SplitWhitespace<'_>> {
    let lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let flags = lines.filter(|(key, _)| key.trim() == "flags");
    flags.map(|(_, flags)| flags.split_whitespace())
}

fn try_device() -> Result<(), KvmUnusable> {
    let device = File::options()
        .read(true)
        .write(true)
        .open(DEVICE)
        .map_err(KvmUnusable::Open)?;
    match kvm::api_version(&device).map_err(KvmUnusable::Version)? {
        kvm::API_VERSION => kvm::create_vm(&device).map_err(KvmUnusable::CreateVm),
        other => Err(KvmUnusable::OtherVersion(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(cpu: bool, device: bool) -> Probe {
        Probe {
            cpu: cpu.then_some(()).ok_or(KvmUnusable::NoCpuFlag),
            device: device.then_some(()).ok_or(KvmUnusable::OtherVersion(11)),
        }
    }

    #[test]
    fn auto_takes_kvm_only_if_all_of_it_works() {
        for (cpu, device, wanted) in [
            (true, true, Accel::Kvm),
            (false, true, Accel::Tcg),
            (true, false, Accel::Tcg),
            (false, false, Accel::Tcg),
        ] {
            let chosen = decide(Choice::Auto, probe(cpu, device)).expect("auto always chooses");
            assert_eq!(chosen.accel, wanted, "cpu {cpu}, device {device}");
            assert!(!chosen.because.is_empty());
        }
    }

    #[test]
    fn insisting_on_kvm_overrides_the_flags_but_not_the_device() {
        let chosen = decide(Choice::Kvm, probe(false, true)).expect("the device works");
        assert_eq!(chosen.accel, Accel::Kvm);
        let error = decide(Choice::Kvm, probe(true, false)).expect_err("the device does not work");
        assert!(
            error
                .to_string()
                .contains("API version: expected 12, got 11"),
            "{error}"
        );
    }

    #[test]
    fn tcg_is_taken_when_asked_for() {
        let chosen = decide(Choice::Tcg, probe(true, true)).expect("tcg always works");
        assert_eq!(chosen.accel, Accel::Tcg);
    }

    #[test]
    fn flags_are_whole_words_of_the_flags_line() {
        assert!(has_virtualisation(
            "model name\t: x\nflags\t\t: fpu vmx sse\n"
        ));
        assert!(has_virtualisation("flags\t\t: fpu svm\n"));
        assert!(!has_virtualisation("flags\t\t: fpu vmxe nosvm\n"));
        assert!(!has_virtualisation("vmx flags\t: vmx\nmodel name: svm\n"));
        assert!(!has_virtualisation(""));
    }

    #[test]
    fn choices_read_back() {
        for choice in [Choice::Auto, Choice::Kvm, Choice::Tcg] {
            assert_eq!(
                choice.to_string().parse::<Choice>().expect("own word"),
                choice
            );
        }
        let error = "hvf"
            .parse::<Choice>()
            .expect_err("no such accelerator here");
        assert!(error.to_string().contains("auto, kvm or tcg"));
    }

    /// On any host: the probe must end and give a reason, and KVM must never be chosen on a CPU that shows no
    /// extensions.
    #[test]
    fn the_host_can_be_probed() {
        let chosen = choose(Choice::Auto).expect("auto always chooses");
        let cpuinfo = fs::read_to_string(CPUINFO).expect("cpuinfo");
        if !has_virtualisation(&cpuinfo) {
            assert_eq!(chosen.accel, Accel::Tcg);
        }
        assert!(!chosen.because.is_empty());
    }
}
