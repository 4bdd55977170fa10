//! The command lines of what is compared: this program, clevis and systemd-creds.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// A program that this crate is compared with. Both seal to the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Other {
    /// PCR 7.
    Clevis,
    /// PCR 7, and PCR 11 by the signature of a key.
    Systemd,
}

impl Other {
    pub(crate) const ALL: [Self; 2] = [Self::Clevis, Self::Systemd];

    /// Its name in records.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Clevis => "clevis",
            Self::Systemd => "systemd",
        }
    }

    /// The name of our half of the comparison, which is that of the policy.
    pub(crate) fn policy(self) -> &'static str {
        match self {
            Self::Clevis => "pcr",
            Self::Systemd => "signed",
        }
    }

    fn is_signed(self) -> bool {
        self == Self::Systemd
    }
}

/// Half of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Theirs,
}

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Seal,
    Unseal,
}

impl Step {
    pub(crate) const ALL: [Self; 2] = [Self::Seal, Self::Unseal];

    /// Its name in records.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Seal => "seal",
            Self::Unseal => "unseal",
        }
    }
}

/// The files of a comparison.
pub(crate) struct Files {
    pub(crate) folder: PathBuf,
    /// Of the TPM.
    pub(crate) socket: PathBuf,
}

impl Files {
    pub(crate) fn secret(&self) -> PathBuf {
        self.folder.join("secret")
    }

    /// The public half of the key that signs for PCR 11, in PEM.
    pub(crate) fn key(&self) -> PathBuf {
        self.folder.join("key.pem")
    }

    /// Its signatures, in systemd's format.
    pub(crate) fn signatures(&self) -> PathBuf {
        self.folder.join("signatures.json")
    }

    /// What this step writes.
    pub(crate) fn output(&self, step: Step, side: Side) -> PathBuf {
        self.folder.join(format!("{}-{side:?}", step.name()))
    }

    /// The process that this side runs for this step.
    pub(crate) fn command(&self, other: Other, side: Side, step: Step) -> Result<Command> {
        let input = match step {
            Step::Seal => self.secret(),
            Step::Unseal => self.output(Step::Seal, side),
        };
        let output = self.output(step, side);
        match (side, other) {
            (Side::Ours, _) => self.ours(step, other.is_signed(), &input, &output),
            (Side::Theirs, Other::Clevis) => self.clevis(step, &input, &output),
            (Side::Theirs, Other::Systemd) => Ok(self.systemd(step, &input, &output)),
        }
    }

    fn ours(&self, step: Step, is_signed: bool, input: &Path, output: &Path) -> Result<Command> {
        let program = std::env::current_exe().context("this program has no path")?;
        let mut command = Command::new(program);
        command.arg(step.name());
        command.arg(&self.socket).arg(input).arg(output);
        if is_signed {
            command.arg(match step {
                Step::Seal => self.key(),
                Step::Unseal => self.signatures(),
            });
        }
        Ok(command)
    }

    fn clevis(&self, step: Step, input: &Path, output: &Path) -> Result<Command> {
        let mut command = Command::new("clevis");
        match step {
            // Its default is the bank of SHA-1. What the TPM has to do is the same for both.
            Step::Seal => {
                command.args(["encrypt", "tpm2", r#"{"pcr_bank":"sha256","pcr_ids":"7"}"#])
            }
            Step::Unseal => command.arg("decrypt"),
        };
        let opened = File::open(input).with_context(|| format!("cannot open {input:?}"));
        let created = File::create(output).with_context(|| format!("cannot create {output:?}"));
        command.stdin(opened?).stdout(created?);
        command.env("TPM2TOOLS_TCTI", self.tcti());
        Ok(command)
    }

    fn systemd(&self, step: Step, input: &Path, output: &Path) -> Command {
        let option = |name: &str, path: PathBuf| format!("--{name}={}", path.display());
        let mut command = Command::new("systemd-creds");
        match step {
            Step::Seal => command
                .arg("encrypt")
                .arg("--with-key=tpm2-with-public-key")
                .arg("--tpm2-pcrs=7")
                .arg("--tpm2-public-key-pcrs=11")
                .arg(option("tpm2-public-key", self.key())),
            Step::Unseal => command
                .arg("decrypt")
                .arg(option("tpm2-signature", self.signatures())),
        };
        command
            .arg(format!("--tpm2-device={}", self.tcti()))
            // Otherwise the name of the file, which has to be that of sealing.
            .arg("--name=secret")
            .args([input, output]);
        command
    }

    /// What the libraries of the others call the socket; they add `.ctrl` for that of the emulator's control channel.
    fn tcti(&self) -> String {
        format!("swtpm:path={}", self.socket.display())
    }
}
