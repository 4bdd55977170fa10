//! What is sealed is released on the same machine, and nowhere else.

use std::sync::{Arc, Mutex};

use super::{LITERAL, Machine, SECRET, ecdsa_key, literal, signatures, signed_by};
use crate::testing::Swtpm;
use crate::{Error, OtherTpm, Pcr, PcrSelection, SealError, Sealed, UnsealError};

#[test]
fn a_secret_survives_a_reboot() {
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &literal()).unwrap();
    assert_eq!(machine.loaded(), [0_u32; 0]);
    let record = sealed.encode();
    let mut machine = machine.reboot(b"image");
    let sealed = Sealed::decode(&record).unwrap();
    let secret = machine.tpm.unseal(&sealed, None).unwrap();
    assert_eq!(secret[..], SECRET[..]);
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

#[test]
fn every_length_up_to_128_bytes_is_sealed() {
    let mut machine = Machine::booted(b"image");
    for length in [1, 15, 16, 17, 32, 127, 128] {
        let secret = &[0x5a; 128][..length];
        let sealed = machine.tpm.seal(secret, &literal()).unwrap();
        assert_eq!(machine.tpm.unseal(&sealed, None).unwrap()[..], *secret);
    }
    for length in [0, 129] {
        let refused = machine.tpm.seal(&[0x5a; 129][..length], &literal());
        assert!(matches!(refused, Err(SealError::Length(found)) if found == length));
    }
}

#[test]
fn another_tpm_does_not_open_it() {
    let mut machine = Machine::booted(b"image");
    let mut other = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &literal()).unwrap();
    let refused = other.tpm.unseal(&sealed, None).unwrap_err();
    let expected = OtherTpm {
        expected: machine.tpm.storage_key().unwrap(),
        found: other.tpm.storage_key().unwrap(),
    };
    assert!(
        matches!(&refused, UnsealError::OtherTpm(found) if *found == expected),
        "{refused}"
    );
    // A record that names the other TPM does not help: its private blob is encrypted for the first one.
    let moved = Sealed {
        storage_key: expected.found,
        ..sealed
    };
    let refused = other.tpm.unseal(&moved, None).unwrap_err();
    assert!(
        refused.to_string().starts_with("TPM2_Load: parameter 1: "),
        "{refused}"
    );
    assert_eq!(other.loaded(), [0_u32; 0]);
}

#[test]
fn a_cleared_tpm_does_not_open_it() {
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &literal()).unwrap();
    machine.tpm.clear();
    let refused = machine.tpm.unseal(&sealed, None);
    assert!(matches!(refused, Err(UnsealError::OtherTpm(_))));
    machine.tpm.expect_storage_key(sealed.storage_key());
    let refused = machine.tpm.seal(SECRET, &literal());
    assert!(matches!(refused, Err(SealError::OtherTpm(_))));
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

#[test]
fn a_changed_record_does_not_open() {
    let key = ecdsa_key();
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &signed_by(&key)).unwrap();
    let signatures = signatures(&key, b"image");
    let record = sealed.encode();
    let mut decoded = 0;
    for at in (0..record.len()).step_by(3) {
        let mut changed = record.clone();
        changed[at] ^= 1 << (at % 8);
        let Ok(changed) = Sealed::decode(&changed) else {
            continue;
        };
        decoded += 1;
        let opened = machine.tpm.unseal(&changed, Some(&signatures));
        assert!(opened.is_err(), "byte {at} of {}", record.len());
    }
    assert!(decoded > record.len() / 4, "{decoded} of {}", record.len());
    assert_eq!(machine.loaded(), [0_u32; 0]);
    let secret = machine.tpm.unseal(&sealed, Some(&signatures)).unwrap();
    assert_eq!(secret[..], SECRET[..]);
}

#[test]
fn a_secret_never_passes_in_clear() {
    let key = ecdsa_key();
    let machine = Machine::booted(b"image");
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let record = recorded.clone();
    let mut tpm = machine.between(move |wire, command| {
        let response = super::Transport::transmit(wire, command)?;
        let mut record = record.lock().unwrap();
        record.extend_from_slice(command);
        record.extend_from_slice(&response);
        Ok(response)
    });
    let sealed = tpm.seal(SECRET, &signed_by(&key)).unwrap();
    let signatures = signatures(&key, b"image");
    let secret = tpm.unseal(&sealed, Some(&signatures)).unwrap();
    assert_eq!(secret[..], SECRET[..]);
    let recorded = recorded.lock().unwrap();
    let passed = |bytes: &[u8]| recorded.windows(bytes.len()).any(|window| window == bytes);
    // It passes, once in each direction.
    assert!(passed(&sealed.private));
    for part in SECRET.windows(6) {
        assert!(!passed(part), "{}", String::from_utf8_lossy(part));
    }
}

#[test]
fn a_tpm_says_what_it_is() {
    let mut machine = Machine::booted(b"image");
    let identity = machine.tpm.identity().unwrap();
    assert_eq!(identity.manufacturer, "IBM");
    assert_eq!(identity.vendor, "SW   TPM");
    assert_ne!(identity.firmware, [0, 0]);
    let lockout = machine.tpm.lockout().unwrap();
    assert!(!lockout.is_locked);
    assert_eq!(lockout.failed_tries, 0);
    assert_ne!(lockout.max_tries, 0);
    let random = machine.tpm.random(100).unwrap();
    assert_eq!(random.len(), 100);
    assert_ne!(random[..50], random[50..]);
    let all: PcrSelection = (0..24).filter_map(Pcr::new).collect();
    let values = machine.tpm.pcr_values(all).unwrap();
    assert_eq!(values.selection(), all);
    assert_eq!(
        values.get(Pcr::KERNEL_IMAGE),
        super::after(b"image").get(Pcr::KERNEL_IMAGE)
    );
}

#[test]
fn an_emulator_that_has_ended_is_reported_and_reached_again() {
    let mut swtpm = Swtpm::start();
    let mut tpm = swtpm.tpm();
    let before = tpm.pcr_values(LITERAL).unwrap();
    swtpm.restart();
    let error = tpm.pcr_values(LITERAL).unwrap_err();
    assert!(matches!(error, Error::Transport { .. }), "{error}");
    assert_eq!(tpm.pcr_values(LITERAL).unwrap(), before);
}
