//! A policy holds for the state that was sealed to, and for images that the builder has signed for.

use super::{
    LITERAL, Machine, SECRET, SIGNED, after, ecdsa_key, literal, measured, rsa_key, signatures,
    signed_by,
};
use crate::channel::Error;
use crate::commands::SessionKind;
use crate::{
    Digest, Pcr, PcrSelection, PcrSignatures, PcrValues, Policy, SignedPolicy, SigningKey,
    UnsealError, pcr_policy,
};

#[test]
fn a_literal_pcr_that_differs_is_named() {
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &literal()).unwrap();
    let expected = sealed.pcr_values().get(Pcr::SECURE_BOOT).unwrap();
    let measurement = measured(b"another key in db");
    machine.tpm.extend(Pcr::SECURE_BOOT, &measurement);
    let found = expected.extended(&measurement);
    let refused = machine.tpm.unseal(&sealed, None).unwrap_err();
    let UnsealError::PcrsDiffer(differences) = &refused else {
        panic!("{refused}");
    };
    assert_eq!(differences.len(), 1);
    assert_eq!(differences[0].pcr, Pcr::SECURE_BOOT);
    assert_eq!(differences[0].expected, expected);
    assert_eq!(differences[0].found, found);
    let message = format!("PCR 7: expected {expected}, got {found}");
    assert!(refused.to_string().ends_with(&message), "{refused}");
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

/// The messages come from values that were read; it is the TPM that refuses.
#[test]
fn the_tpm_refuses_a_record_that_names_the_present_values() {
    let mut machine = Machine::booted(b"image");
    let mut sealed = machine.tpm.seal(SECRET, &literal()).unwrap();
    machine.tpm.extend(Pcr::SECURE_BOOT, &measured(b"more"));
    sealed.literal = machine.tpm.pcr_values(LITERAL).unwrap();
    let refused = machine.tpm.unseal(&sealed, None).unwrap_err();
    assert!(refused.to_string().contains("INTEGRITY"), "{refused}");
}

fn opens_with_the_next_release(key: &SigningKey) {
    let mut machine = Machine::booted(b"release 1");
    let sealed = machine.tpm.seal(SECRET, &signed_by(key)).unwrap();
    let secret = machine
        .tpm
        .unseal(&sealed, Some(&signatures(key, b"release 1")));
    assert_eq!(secret.unwrap()[..], SECRET[..]);
    let mut machine = machine.reboot(b"release 2");
    let secret = machine
        .tpm
        .unseal(&sealed, Some(&signatures(key, b"release 2")));
    assert_eq!(secret.unwrap()[..], SECRET[..]);
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

#[test]
fn the_next_release_opens_by_ecdsa() {
    opens_with_the_next_release(&ecdsa_key());
}

#[test]
fn the_next_release_opens_by_rsa() {
    opens_with_the_next_release(&rsa_key());
}

#[test]
fn an_image_without_the_builders_signature_does_not_open() {
    let (key, other) = (ecdsa_key(), ecdsa_key());
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &signed_by(&key)).unwrap();
    let none = PcrSignatures::default();
    let by_another = signatures(&other, b"image");
    let for_another = signatures(&key, b"another image");
    let cases = [
        (None, 0),
        (Some(&none), 0),
        (Some(&by_another), 1),
        (Some(&for_another), 1),
    ];
    for (signatures, count) in cases {
        let refused = machine.tpm.unseal(&sealed, signatures).unwrap_err();
        let UnsealError::NoSignature {
            key: expected,
            found,
            available,
        } = refused
        else {
            panic!("{refused}");
        };
        assert_eq!(expected, key.public().fingerprint());
        assert_eq!(found, after(b"image"));
        assert_eq!(available, count);
    }
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

#[test]
fn a_signature_that_only_claims_to_be_the_builders_does_not_open() {
    for (key, other) in [(ecdsa_key(), ecdsa_key()), (rsa_key(), ecdsa_key())] {
        let mut machine = Machine::booted(b"image");
        let sealed = machine.tpm.seal(SECRET, &signed_by(&key)).unwrap();
        let claimed = key.public().fingerprint().to_string();
        let real = other.public().fingerprint().to_string();
        let json = signatures(&other, b"image").to_json();
        let forged = PcrSignatures::parse(json.replace(&real, &claimed).as_bytes()).unwrap();
        let refused = machine.tpm.unseal(&sealed, Some(&forged)).unwrap_err();
        assert!(
            matches!(&refused, UnsealError::InvalidSignature { key: named, .. } if named.to_string() == claimed),
            "{refused}"
        );
        // An invalid one does not hide a valid one.
        let mut both = forged;
        both.sign(&key, &after(b"image")).unwrap();
        let secret = machine.tpm.unseal(&sealed, Some(&both)).unwrap();
        assert_eq!(secret[..], SECRET[..]);
    }
}

#[test]
fn a_policy_may_have_its_signed_part_alone() {
    let key = ecdsa_key();
    let signed = SignedPolicy::new(key.public().clone(), SIGNED).unwrap();
    let policy = Policy::new(PcrSelection::EMPTY, Some(signed)).unwrap();
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &policy).unwrap();
    machine.tpm.extend(Pcr::SECURE_BOOT, &measured(b"any"));
    let secret = machine
        .tpm
        .unseal(&sealed, Some(&signatures(&key, b"image")));
    assert_eq!(secret.unwrap()[..], SECRET[..]);
}

#[test]
fn a_policy_cannot_be_empty() {
    assert!(Policy::new(PcrSelection::EMPTY, None).is_err());
    assert!(SignedPolicy::new(ecdsa_key().public().clone(), PcrSelection::EMPTY).is_err());
}

/// What is computed here is what a TPM computes in a trial session.
#[test]
fn digests_are_those_of_a_trial_session() {
    for key in [ecdsa_key(), rsa_key()] {
        let mut machine = Machine::booted(b"image");
        let all = PcrSelection::of([Pcr::SECURE_BOOT, Pcr::KERNEL_IMAGE]);
        let values = machine.tpm.pcr_values(all).unwrap();
        let literal: PcrValues = values
            .iter()
            .filter(|(pcr, _)| *pcr == Pcr::SECURE_BOOT)
            .collect();
        let policy = signed_by(&key);
        let by_the_tpm: Result<[Digest; 2], Error> = machine.tpm.call(|channel| {
            let storage = channel.storage_key()?;
            let trial = channel.start_session(&storage, SessionKind::Trial)?.handle;
            channel.policy_pcr(trial, &values)?;
            let pcrs = channel.policy_get_digest(trial)?;
            // A trial session takes any ticket.
            let ticket = [&[0x80, 0x22, 0x40, 0, 0, 7][..], &[0, 0]].concat();
            channel.policy_authorize(trial, &pcrs, key.public(), &ticket)?;
            channel.policy_pcr(trial, &literal)?;
            Ok([pcrs, channel.policy_get_digest(trial)?])
        });
        let computed = [pcr_policy(&values), policy.digest(&literal)];
        assert_eq!(by_the_tpm.unwrap(), computed);
        assert_eq!(machine.loaded(), [0_u32; 0]);
    }
}
