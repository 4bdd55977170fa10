//! Benchmark of what a node does with its TPM, run by `cargo xtask bench storage`, with an emulated one.
//!
//! `compare ROUNDS` measures sealing and unsealing by this crate, by clevis and by systemd-creds; `attest ROUNDS` measures
//! proofs of what was booted. Results are printed as one JSON object per line.
//!
//! `seal SOCKET SECRET RECORD [KEY]` and `unseal SOCKET RECORD SECRET [SIGNATURES]` are what it measures of this crate:
//! sealing to PCR 7, and with a key also to PCR 11 by that key's signature. SOCKET is the absolute path of swtpm's
//! socket, the others are files. The node does the same within a process that runs anyway. It is a process of its own
//! here because the others are programs: so start and end, files and the connection are part of the time on every side,
//! and nothing of ours is kept from one call to the next.
#![allow(clippy::disallowed_methods, reason = "a program of the host")]

mod attest;
mod compare;
mod others;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use hearth_tpm::{
    Pcr, PcrSelection, PcrSignatures, Policy, PolicyKey, Sealed, SignedPolicy, SwtpmSocket, Tpm,
};

/// What must be as it was when the secret was sealed.
const LITERAL: PcrSelection = PcrSelection::of([Pcr::SECURE_BOOT]);
/// What the key has to sign for.
const SIGNED: PcrSelection = PcrSelection::of([Pcr::KERNEL_IMAGE]);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["seal", socket, secret, record] => seal(socket, secret, record, None),
        ["seal", socket, secret, record, key] => seal(socket, secret, record, Some(key)),
        ["unseal", socket, record, secret] => unseal(socket, record, secret, None),
        ["unseal", socket, record, secret, signatures] => {
            unseal(socket, record, secret, Some(signatures))
        }
        ["compare", rounds] => compare::run(number(rounds)?),
        ["attest", rounds] => attest::run(number(rounds)?),
        _ => bail!(
            "usage: compare ROUNDS | attest ROUNDS | seal SOCKET SECRET RECORD [KEY] | unseal SOCKET RECORD SECRET [SIGNATURES]"
        ),
    }
}

fn seal(socket: &str, secret: &str, record: &str, key: Option<&str>) -> Result<()> {
    let signed = match key {
        Some(key) => Some(SignedPolicy::new(
            PolicyKey::from_pem(&read(key)?)?,
            SIGNED,
        )?),
        None => None,
    };
    let policy = Policy::new(LITERAL, signed)?;
    let sealed = tpm(socket)?.seal(&read(secret)?, &policy)?;
    fs::write(record, sealed.encode()).with_context(|| format!("cannot write {record}"))
}

fn unseal(socket: &str, record: &str, secret: &str, signatures: Option<&str>) -> Result<()> {
    let sealed = Sealed::decode(&read(record)?)?;
    let signatures = match signatures {
        Some(path) => Some(PcrSignatures::parse(&read(path)?)?),
        None => None,
    };
    let opened = tpm(socket)?.unseal(&sealed, signatures.as_ref())?;
    fs::write(secret, &*opened).with_context(|| format!("cannot write {secret}"))
}

fn tpm(socket: &str) -> Result<Tpm> {
    let connected = SwtpmSocket::connect(Path::new(socket));
    Ok(Tpm::new(connected.with_context(|| socket.to_owned())?))
}

fn number(rounds: &str) -> Result<u32> {
    let number = rounds.parse();
    number.with_context(|| format!("expected a number, got {rounds}"))
}

/// Prints one record.
fn report(name: &str, unit: &str, samples: &[f64]) {
    let record = serde_json::json!({ "name": name, "unit": unit, "samples": samples });
    println!("{record}");
}

fn read(path: &str) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {path}"))
}
