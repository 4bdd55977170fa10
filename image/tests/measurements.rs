//! Measurements and signatures against other implementations and a recorded boot.
#![allow(clippy::unwrap_used)] // A test's helpers fail the test.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use goblin::pe::PE;
use hearth_image::authenticode::{self, AuthenticodeError};
use hearth_image::measurements::{Booted, Measurements};
use hearth_image::pcr::{Pcr, sha256};
use hearth_image::pe::{Section, append_sections};
use hearth_image::policy::{KeyError, PolicyKey};
use proptest::prelude::*;
use ring::digest::{Context, SHA256};
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey, VerificationAlgorithm,
};

const STUB: &str = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub";
const RSA: &[u8] = include_bytes!("fixtures/rsa-2048.pem");

fn program() -> Vec<u8> {
    let stub = std::fs::read(STUB)
        .unwrap_or_else(|error| panic!("{STUB}: {error} (Debian's package systemd-boot-efi)"));
    let section = Section {
        name: ".osrel",
        data: b"ID=test\n",
    };
    append_sections(&stub, &[section]).unwrap()
}

/// By goblin, which pads to eight bytes.
fn by_goblin(program: &[u8]) -> Vec<u8> {
    assert_eq!(program.len() % 8, 0);
    let mut hash = Context::new(&SHA256);
    for range in PE::parse(program).unwrap().authenticode_ranges() {
        hash.update(range);
    }
    hash.finish().as_ref().to_vec()
}

#[test]
fn programs_have_the_digest_that_others_compute() {
    let mut program = program();
    assert_eq!(
        authenticode::sha256(&program).unwrap()[..],
        by_goblin(&program)
    );
    // Data after the last section counts.
    program.extend([7; 16]);
    let digest = authenticode::sha256(&program).unwrap();
    assert_eq!(digest[..], by_goblin(&program));
    // The checksum does not.
    let optional = u32::from_le_bytes(program[0x3c..0x40].try_into().unwrap()) as usize + 24;
    program[optional + 64] ^= 1;
    assert_eq!(authenticode::sha256(&program).unwrap(), digest);
    program[optional + 68] ^= 1;
    assert_ne!(authenticode::sha256(&program).unwrap(), digest);
}

#[test]
fn a_signature_for_secure_boot_does_not_change_the_digest() {
    let mut program = program();
    let digest = authenticode::sha256(&program).unwrap();
    let entry = u32::from_le_bytes(program[0x3c..0x40].try_into().unwrap()) as usize + 24 + 144;
    let (start, size) = (program.len() as u32, 24u32);
    program[entry..entry + 4].copy_from_slice(&start.to_le_bytes());
    program[entry + 4..entry + 8].copy_from_slice(&size.to_le_bytes());
    program.extend([0x5a; 24]);
    assert_eq!(authenticode::sha256(&program).unwrap(), digest);
    let size = program.len() as u32;
    program[entry + 4..entry + 8].copy_from_slice(&size.to_le_bytes());
    let error = authenticode::sha256(&program).unwrap_err();
    assert!(
        matches!(error, AuthenticodeError::Certificates { size: found, .. } if found == size as usize),
        "{error}"
    );
}

#[test]
fn what_is_no_program_is_named() {
    let error = authenticode::sha256(b"\x7fELF").unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("the DOS signature: expected 0x5a4d"),
        "{text}"
    );
    let error = authenticode::sha256(b"MZ").unwrap_err();
    assert_eq!(
        error.to_string(),
        "truncated at 2 bytes, inside its DOS header"
    );
}

proptest! {
    #[test]
    fn damaged_programs_crash_nothing(end in 0usize..1200, at in 0usize..1024, byte: u8) {
        let mut program = program();
        program[at] = byte;
        let _ = authenticode::sha256(&program);
        program.truncate(end);
        let _ = authenticode::sha256(&program);
    }
}

/// The value of PCR 12 was read from a machine that had booted with this command line through OVMF and systemd-boot.
#[test]
fn a_command_line_gives_the_value_of_a_recorded_boot() {
    let program = program();
    let json = measurements(
        &program,
        "console=tty0 console=ttyS0 clocksource=hpet random.trust_cpu=on panic=-1 gpt quiet",
    );
    assert_eq!(json["version"], 1);
    assert_eq!(json["bank"], "sha256");
    assert_eq!(json["uki_sha256"], hex::encode(sha256(&program)));
    let rows = json["measurements"].as_array().unwrap();
    let pcrs: Vec<u64> = rows
        .iter()
        .map(|row| row["pcr"].as_u64().unwrap())
        .collect();
    assert_eq!(pcrs, [4, 11, 12]);
    assert_eq!(rows[0]["boot_path"], "systemd-boot");
    assert_eq!(rows[1].get("boot_path"), None);
    assert_eq!(
        rows[2]["value"],
        "853e6067fb2739b2b771eb4d0b98d1b2bb22fc97a6fd41e713867bc9fc57a1ef"
    );
    let none = measurements(&program, "");
    assert_eq!(none["measurements"][2]["value"], "0".repeat(64));
}

fn measurements(program: &[u8], command_line: &str) -> serde_json::Value {
    let measured = Measurements::of(&Booted {
        loader: program,
        uki: program,
        pcr_11: Pcr::RESET,
        kernel: program,
        command_line,
    });
    serde_json::from_str(&measured.unwrap().to_json(program)).unwrap()
}

#[test]
fn signatures_verify_and_are_the_same_each_time() {
    let made = PolicyKey::generate().unwrap();
    let keys: [(&[u8], &dyn VerificationAlgorithm, usize); 2] = [
        // The prefix of SubjectPublicKeyInfo before the key.
        (made.as_bytes(), &ECDSA_P256_SHA256_ASN1, 26),
        (RSA, &RSA_PKCS1_2048_8192_SHA256, 24),
    ];
    let pcr_11 = Pcr::RESET.measure(b"a kernel");
    for (private, algorithm, prefix) in keys {
        let key = PolicyKey::parse(private).unwrap();
        let text = key.sign(pcr_11).unwrap();
        assert_eq!(
            PolicyKey::parse(private).unwrap().sign(pcr_11).unwrap(),
            text
        );
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let entry = &json["sha256"][0];
        assert_eq!(entry["pcrs"], serde_json::json!([11]));

        let public = pem::parse(key.public_pem()).unwrap();
        assert_eq!(public.tag(), "PUBLIC KEY");
        let bits = &public.contents()[prefix..];
        assert_eq!(entry["pkfp"], hex::encode(sha256(bits)));
        let policy = hex::decode(entry["pol"].as_str().unwrap()).unwrap();
        assert_eq!(policy, pcr_11.policy(11));
        let signature = STANDARD.decode(entry["sig"].as_str().unwrap()).unwrap();
        let public = UnparsedPublicKey::new(algorithm, bits);
        public.verify(&policy, &signature).unwrap();
        public.verify(b"something else", &signature).unwrap_err();
    }
}

#[test]
fn keys_that_a_tpm_cannot_verify_with_are_refused() {
    let refused = |text: &[u8]| PolicyKey::parse(text).unwrap_err();
    assert!(matches!(refused(b""), KeyError::Pem(_)));
    let key = PolicyKey::parse(RSA).unwrap();
    let error = refused(key.public_pem().as_bytes()).to_string();
    assert!(
        error.ends_with("(PKCS #8, not encrypted), got \"PUBLIC KEY\""),
        "{error}"
    );
    let ed25519 = ring::signature::Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new());
    let block = pem::Pem::new("PRIVATE KEY", ed25519.unwrap().as_ref());
    let error = refused(pem::encode(&block).as_bytes()).to_string();
    assert!(error.ends_with("got the algorithm 1.3.101.112"), "{error}");
    let block = pem::Pem::new("PRIVATE KEY", b"nonsense".as_slice());
    assert!(matches!(
        refused(pem::encode(&block).as_bytes()),
        KeyError::Pkcs8(_)
    ));
}
