//! Attestation: the processor time that the proof of what was booted adds to a join.
//!
//! On the machine: its keys, the certificate, the event log, the credential and the quote. The emulator, which does the
//! work of a chip on the same processor, is counted with it. On the curator: the challenge, and the verification beside
//! as many trusted images as a cluster can have. All of them are repeated in one sample, because the kernel counts a
//! running process's time at its ticks.

use std::fs;
use std::hint::black_box;

use anyhow::{Context, Result};
use hearth_tpm::attestation::{Challenge, QUOTED};
use hearth_tpm::boot_log::{self, BootEvent};
use hearth_tpm::images::{TrustedImage, judge};
use hearth_tpm::testing::{Swtpm, event_log};
use hearth_tpm::{Digest, Pcr, Tpm};

use super::report;

/// Maximum number of trusted images of a cluster.
const IMAGES: usize = 64;
/// Challenges and verifications of one sample.
const COMPUTED: u32 = 1000;
/// Proofs of one sample.
const PROVEN: u32 = 10;
/// The public key of the caller's certificate.
const CALLER: [u8; 32] = [7; 32];

/// Seconds of each round.
#[derive(Default)]
struct Samples {
    machine: Vec<f64>,
    challenge: Vec<f64>,
    verification: Vec<f64>,
}

/// Measures `rounds` proofs and prints the records.
pub(crate) fn run(rounds: u32) -> Result<()> {
    let mut bench = Bench::new()?;
    let mut samples = Samples::default();
    // The first round warms the caches and is not counted.
    bench.round(&mut Samples::default())?;
    for _ in 0..rounds {
        bench.round(&mut samples)?;
    }
    for (name, samples) in [
        ("node", &samples.machine),
        ("challenge", &samples.challenge),
        ("verification", &samples.verification),
    ] {
        let name = format!("storage.attestation_{name}_cpu_seconds");
        report(&name, "s", samples);
    }
    Ok(())
}

struct Bench {
    swtpm: Swtpm,
    tpm: Tpm,
    log: Vec<u8>,
    trusted: Vec<TrustedImage>,
}

impl Bench {
    /// A machine that has booted the last of many trusted images.
    fn new() -> Result<Self> {
        let images = (0..IMAGES).map(|number| boot(&format!("image {number}")));
        let images: Vec<_> = images.collect();
        let trusted = images
            .iter()
            .filter_map(|events| TrustedImage::booted(events));
        let trusted = trusted.collect();
        let swtpm = Swtpm::start();
        let mut tpm = swtpm.tpm();
        let booted = images.last().context("no image")?;
        for event in booted {
            tpm.extend(event.pcr, &event.digest);
        }
        Ok(Self {
            swtpm,
            tpm,
            log: event_log(booted),
            trusted,
        })
    }

    fn round(&mut self, samples: &mut Samples) -> Result<()> {
        let (endorsement, attestation) = self.tpm.attestation_keys()?;
        let curator = cpu_seconds("self")?;
        for _ in 0..COMPUTED {
            black_box(Challenge::new(&endorsement, &attestation)?);
        }
        let taken = cpu_seconds("self")? - curator;
        samples.challenge.push(taken / f64::from(COMPUTED));

        let challenge = Challenge::new(&endorsement, &attestation)?;
        let mut last = None;
        let machine = self.machine_time()?;
        for _ in 0..PROVEN {
            black_box(self.tpm.attestation_keys()?);
            black_box(self.tpm.endorsement_certificate()?);
            let events = boot_log::events(&self.log, QUOTED)?;
            last = Some((self.tpm.attest(challenge.asked(), &CALLER)?, events));
        }
        let taken = self.machine_time()? - machine;
        samples.machine.push(taken / f64::from(PROVEN));

        let (proof, events) = last.context("no proof")?;
        let curator = cpu_seconds("self")?;
        for _ in 0..COMPUTED {
            challenge.verify(&CALLER, &proof, &events)?;
            black_box(judge(&self.trusted, &events)?);
        }
        let taken = cpu_seconds("self")? - curator;
        samples.verification.push(taken / f64::from(COMPUTED));
        Ok(())
    }

    /// Of this process and the emulator.
    fn machine_time(&self) -> Result<f64> {
        Ok(cpu_seconds("self")? + cpu_seconds(&self.swtpm.id().to_string())?)
    }
}

/// What firmware, boot loader and stub measure of an image with five sections.
fn boot(image: &str) -> Vec<BootEvent> {
    let event = |pcr, what: &str| BootEvent {
        pcr,
        digest: Digest::of(&[image.as_bytes(), what.as_bytes()]),
    };
    let started = ["setting", "loader", "image", "kernel"];
    let started = started.map(|what| event(Pcr::BOOT_PROGRAMS, what));
    let sections = ["linux", "osrel", "cmdline", "initrd", "uname"];
    let sections = sections.map(|what| event(Pcr::KERNEL_IMAGE, what));
    let command_line = event(Pcr::COMMAND_LINE, "command line");
    [&started[..], &sections, &[command_line]].concat()
}

/// Processor time that the threads of a process have had so far.
fn cpu_seconds(process: &str) -> Result<f64> {
    let mut nanoseconds = 0;
    let tasks = format!("/proc/{process}/task");
    for task in fs::read_dir(&tasks).context(tasks)? {
        let path = task?.path().join("schedstat");
        let text = fs::read_to_string(&path).with_context(|| format!("{path:?}"))?;
        let first = text.split(' ').next().unwrap_or_default();
        let count: u64 = first
            .parse()
            .with_context(|| format!("{path:?}: expected nanoseconds, got {first:?}"))?;
        nanoseconds += count;
    }
    Ok(nanoseconds as f64 / 1e9)
}
