//! The comparison: rounds in which both sides alternate.
//!
//! The emulator has no resource manager, while both of the other programs expect the kernel's to flush what they leave
//! loaded. So that is done here before each process, and is not measured.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use hearth_tpm::testing::Swtpm;
use hearth_tpm::{Digest, Pcr, PcrSignatures, SigningKey};

use super::others::{Files, Other, Side, Step};
use super::{LITERAL, SIGNED, report};

/// systemd 252 accepts RSA keys only. This one was made for tests.
const KEY: &[u8] = include_bytes!("../../src/tests/rsa.pem");

/// Seconds of each round: for both steps, ours and theirs.
#[derive(Default)]
struct Samples([[Vec<f64>; 2]; 2]);

impl Samples {
    fn of(&mut self, step: Step, side: Side) -> &mut Vec<f64> {
        &mut self.0[step as usize][side as usize]
    }
}

/// Compares with each of the others, `rounds` times, and prints the records.
pub(crate) fn run(rounds: u32) -> Result<()> {
    let bench = Bench::new()?;
    for other in Other::ALL {
        let mut samples = Samples::default();
        // The first round warms the caches and is not counted.
        bench.round(other, 0, &mut Samples::default())?;
        for number in 0..rounds {
            bench.round(other, number, &mut samples)?;
        }
        for step in Step::ALL {
            let ours = samples.of(step, Side::Ours).clone();
            let theirs = samples.of(step, Side::Theirs).clone();
            let (name, step) = (other.name(), step.name());
            report(
                &format!("storage.{step}_seconds_{}", other.policy()),
                "s",
                &ours,
            );
            report(&format!("storage.{step}_seconds_{name}"), "s", &theirs);
            let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(a, b)| a / b).collect();
            report(&format!("storage.{step}_ratio_{name}"), "ratio", &ratios);
        }
    }
    Ok(())
}

struct Bench {
    swtpm: Swtpm,
    files: Files,
    _folder: tempfile::TempDir,
}

impl Bench {
    /// A TPM as it is after a boot, and an image's signature for it.
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir().context("cannot create a folder")?;
        let swtpm = Swtpm::start();
        let files = Files {
            folder: folder.path().to_owned(),
            socket: swtpm.socket(),
        };
        let mut tpm = swtpm.tpm();
        // systemd-creds warns of registers that nothing was measured into.
        tpm.extend(Pcr::SECURE_BOOT, &Digest::of(&[b"Secure Boot"]));
        tpm.extend(Pcr::KERNEL_IMAGE, &Digest::of(&[b"image"]));
        let key = SigningKey::from_pem(KEY)?;
        let mut signatures = PcrSignatures::default();
        signatures.sign(&key, &tpm.pcr_values(SIGNED)?)?;
        fs::write(files.key(), key.public().to_pem())?;
        fs::write(files.signatures(), signatures.to_json())?;
        Ok(Self {
            swtpm,
            files,
            _folder: folder,
        })
    }

    /// Both steps on both sides: first ours, in odd rounds first theirs.
    fn round(&self, other: Other, number: u32, samples: &mut Samples) -> Result<()> {
        let secret = self.swtpm.tpm().random(32)?;
        fs::write(self.files.secret(), &*secret)?;
        let sides = match number % 2 {
            0 => [Side::Ours, Side::Theirs],
            _ => [Side::Theirs, Side::Ours],
        };
        for step in Step::ALL {
            for side in sides {
                let output = self.files.output(step, side);
                remove(&output)?;
                let command = self.files.command(other, side, step)?;
                let seconds = self.timed(command)?;
                samples.of(step, side).push(seconds);
                // Nobody wins by failing fast.
                let written = fs::read(&output).with_context(|| format!("no {output:?}"))?;
                ensure!(
                    (written == *secret) == (step == Step::Unseal),
                    "{} beside {}: {side:?} wrote something else",
                    step.name(),
                    other.name()
                );
            }
        }
        Ok(())
    }

    /// The seconds from the start of a process to its end.
    fn timed(&self, mut command: Command) -> Result<f64> {
        // The first call of a client flushes all that is loaded.
        self.swtpm.tpm().pcr_values(LITERAL)?;
        command.stderr(Stdio::piped());
        let started = Instant::now();
        let child = command.spawn();
        let child = child.with_context(|| format!("cannot start {command:?}"))?;
        let ended = child.wait_with_output()?;
        let seconds = started.elapsed().as_secs_f64();
        ensure!(
            ended.status.success(),
            "{command:?}: {}\n{}",
            ended.status,
            String::from_utf8_lossy(&ended.stderr)
        );
        Ok(seconds)
    }
}

/// Removes what an earlier round has written.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {path:?}"))
        }
        _ => Ok(()),
    }
}
