//! Measurements and signatures against other implementations and a recorded boot.
#![allow(clippy::unwrap_used)] // A test's helpers fail the test.

use goblin::pe::PE;
use hearth_image::authenticode::{self, AuthenticodeError};
use hearth_image::measurements::{Booted, Measurements};
use hearth_image::pe::{Section, append_sections};
use hearth_image::uki::{Built, CommandLine, Uki};
use hearth_tpm::boot_log::{self, BootEvent};
use hearth_tpm::images::TrustedImage;
use hearth_tpm::{
    Digest, Pcr, PcrSelection, PcrSignatures, PcrValues, PolicyKey, SigningKey, pcr_policy,
};
use proptest::prelude::*;
use ring::digest::{Context, SHA256};

const STUB: &str = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub";

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
        authenticode::sha256(&program).unwrap().0[..],
        by_goblin(&program)
    );
    // Data after the last section counts.
    program.extend([7; 16]);
    let digest = authenticode::sha256(&program).unwrap();
    assert_eq!(digest.0[..], by_goblin(&program));
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
    assert_eq!(json["uki_sha256"], Digest::of(&[&program]).to_string());
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

/// What a curator reads of the file accepts the boot whose registers the file has.
#[test]
fn the_events_of_a_boot_lead_to_its_registers() {
    let program = program();
    let json = measurements(&program, "quiet");
    let image = TrustedImage::parse(json.to_string().as_bytes()).unwrap();
    let note = |note: &[u8]| Digest::of(&[note]);
    let before = [
        note(b"Calling EFI Application from Boot Option"),
        note(&[0; 4]),
    ];
    let programs = before.iter().chain(&image.programs);
    let lines = image.command_lines.iter().flat_map(|line| [line; 2]);
    let event = |pcr| {
        move |digest: &Digest| BootEvent {
            pcr,
            digest: *digest,
        }
    };
    let events: Vec<BootEvent> = programs
        .map(event(Pcr::BOOT_PROGRAMS))
        .chain(lines.map(event(Pcr::COMMAND_LINE)))
        .collect();
    let pcrs = PcrSelection::of([Pcr::BOOT_PROGRAMS, Pcr::COMMAND_LINE]);
    let values = boot_log::replay(&events, pcrs).unwrap();
    for row in json["measurements"].as_array().unwrap() {
        let pcr = Pcr::new(row["pcr"].as_u64().unwrap() as u8).unwrap();
        if let Some(value) = values.get(pcr) {
            assert_eq!(row["value"], value.to_string());
        }
    }
}

fn measurements(program: &[u8], command_line: &str) -> serde_json::Value {
    let measured = Measurements::of(&Booted {
        loader: program,
        uki: program,
        pcr_11: Digest::ZERO,
        kernel: program,
        command_line,
    });
    serde_json::from_str(&measured.unwrap().to_json(program)).unwrap()
}

/// A file that passes for a kernel.
fn kernel() -> Vec<u8> {
    let mut kernel = vec![0; 0x400];
    for (at, bytes) in [
        (0, &b"MZ"[..]),
        (0x202, b"HdrS"),
        (0x206, &[0x0f, 2]),
        (0x20e, &[0, 1]),
        (0x236, &[0b1001, 0]),
        (0x300, b"6.12.9"),
    ] {
        kernel[at..at + bytes.len()].copy_from_slice(bytes);
    }
    kernel
}

fn uki(policy_key: Option<&SigningKey>) -> Built {
    Uki {
        stub: &std::fs::read(STUB).unwrap(),
        os_release: "ID=test\n",
        command_line: &CommandLine::parse("quiet").unwrap(),
        initramfs: b"initramfs",
        kernel: &kernel(),
        policy_key,
    }
    .build()
    .unwrap()
}

/// The content of a section, by goblin.
fn section<'a>(program: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let pe = PE::parse(program).unwrap();
    let found = pe
        .sections
        .iter()
        .find(|section| section.name().unwrap() == name)?;
    let start = found.pointer_to_raw_data as usize;
    Some(&program[start..start + found.virtual_size as usize])
}

#[test]
fn a_signed_image_carries_the_key_and_its_signature_for_pcr_11() {
    let pem = SigningKey::generate().unwrap();
    let key = SigningKey::from_pem(pem.as_bytes()).unwrap();
    let signed = uki(Some(&key));
    let public = PolicyKey::from_pem(section(&signed.program, ".pcrpkey").unwrap()).unwrap();
    assert_eq!(&public, key.public());
    let signatures = PcrSignatures::parse(section(&signed.program, ".pcrsig").unwrap()).unwrap();
    let [signature] = &signatures.iter().collect::<Vec<_>>()[..] else {
        panic!("{signatures:?}");
    };
    let policy = pcr_policy(&PcrValues::from_iter([(Pcr::KERNEL_IMAGE, signed.pcr_11)]));
    assert_eq!(signature.pcrs, PcrSelection::of([Pcr::KERNEL_IMAGE]));
    assert_eq!(signature.fingerprint, public.fingerprint());
    assert_eq!(signature.policy, policy);
    assert!(public.verifies(&policy.0, &signature.signature));

    let again = SigningKey::from_pem(pem.as_bytes()).unwrap();
    assert_eq!(uki(Some(&again)).program, signed.program);
    let unsigned = uki(None);
    assert_eq!(section(&unsigned.program, ".pcrpkey"), None);
    assert_eq!(section(&unsigned.program, ".pcrsig"), None);
    // The key is measured.
    assert_ne!(unsigned.pcr_11, signed.pcr_11);
}
