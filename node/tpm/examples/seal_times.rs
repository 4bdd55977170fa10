//! How long it takes to seal and unseal, for a comparison with other programs on the same emulator:
//! `seal_times SOCKET [ROUNDS]`, where SOCKET is the absolute path of swtpm's socket.
//!
//! It seals a 32-byte key to PCR 7, and to PCR 7 and a signed policy for the present value of PCR 11, and prints the
//! milliseconds of each call as JSON.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use hearth_tpm::{
    Pcr, PcrSelection, PcrSignatures, Policy, SignedPolicy, SigningKey, SwtpmSocket, Tpm,
};
use serde::Serialize;

/// What is measured, in milliseconds.
#[derive(Default, Serialize)]
struct Times {
    seal_ms: Vec<f64>,
    unseal_ms: Vec<f64>,
}

#[derive(Serialize)]
struct Report {
    tpm: String,
    record_bytes: usize,
    pcr: Times,
    pcr_and_signature: Times,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments
        .next()
        .context("usage: seal_times SOCKET [ROUNDS]")?;
    let rounds = arguments.next().map_or(Ok(20), |rounds| rounds.parse())?;
    let socket = SwtpmSocket::connect(Path::new(&socket)).context(socket)?;
    let mut tpm = Tpm::new(socket);

    let signed_pcrs = PcrSelection::of([Pcr::KERNEL_IMAGE]);
    let key = SigningKey::from_pem(SigningKey::generate()?.as_bytes())?;
    let mut signatures = PcrSignatures::default();
    signatures.sign(&key, &tpm.pcr_values(signed_pcrs)?)?;
    let signed = SignedPolicy::new(key.public().clone(), signed_pcrs)?;

    let literal = PcrSelection::of([Pcr::SECURE_BOOT]);
    let pcr = Policy::new(literal, None)?;
    let both = Policy::new(literal, Some(signed))?;
    let secret = *tpm.random(32)?.first_chunk::<32>().context("32 bytes")?;
    let report = Report {
        tpm: tpm.identity()?.to_string(),
        record_bytes: tpm.seal(&secret, &both)?.encode().len(),
        pcr: measure(&mut tpm, &secret, &pcr, None, rounds)?,
        pcr_and_signature: measure(&mut tpm, &secret, &both, Some(&signatures), rounds)?,
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Seals and unseals `rounds` times.
fn measure(
    tpm: &mut Tpm,
    secret: &[u8],
    policy: &Policy,
    signatures: Option<&PcrSignatures>,
    rounds: usize,
) -> Result<Times> {
    let mut times = Times::default();
    for _ in 0..rounds {
        let start = Instant::now();
        let sealed = tpm.seal(secret, policy)?;
        times.seal_ms.push(milliseconds(start));
        let start = Instant::now();
        let opened = tpm.unseal(&sealed, signatures)?;
        times.unseal_ms.push(milliseconds(start));
        ensure!(opened[..] == *secret, "another secret was released");
    }
    Ok(times)
}

fn milliseconds(start: Instant) -> f64 {
    (start.elapsed().as_secs_f64() * 1e5).round() / 100.0
}
