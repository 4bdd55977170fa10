//! What a curator believes of a machine, and what it does not.

use proptest::prelude::*;

use super::{Machine, measured};
use crate::attestation::{
    Asked, AttestationKey, Challenge, ChallengeError, EndorsementKey, Proof, ProofError, QUOTED,
    Quote, QuoteError, Quoted,
};
use crate::boot_log::BootEvent;
use crate::commands::Template;
use crate::pcr::{Digest, Pcr};
use crate::{Command, Error, SessionError};

const CALLER: [u8; 32] = [7; 32];

/// The events of a machine that has booted an image with this content: [`Machine`] measures nothing else that is quoted.
fn events(content: &[u8]) -> Vec<BootEvent> {
    vec![BootEvent {
        pcr: Pcr::KERNEL_IMAGE,
        digest: measured(content),
    }]
}

/// A machine, a challenge for it, and its answer.
struct Asking {
    machine: Machine,
    challenge: Challenge,
    proof: Proof,
}

impl Asking {
    fn of(mut machine: Machine) -> Self {
        let (endorsement, attestation) = machine.tpm.attestation_keys().unwrap();
        let challenge = Challenge::new(&endorsement, &attestation).unwrap();
        let proof = machine.tpm.attest(challenge.asked(), &CALLER).unwrap();
        Self {
            machine,
            challenge,
            proof,
        }
    }

    fn verify(&self, proof: &Proof) -> Result<(), ProofError> {
        self.challenge.verify(&CALLER, proof, &events(b"image"))
    }
}

#[test]
fn a_machine_proves_what_it_booted() {
    let asking = Asking::of(Machine::booted(b"image"));
    assert_eq!(asking.verify(&asking.proof), Ok(()));
    assert_eq!(asking.machine.loaded(), [0_u32; 0]);
    for wrong in [
        events(b"other image"),
        Vec::new(),
        events(b"image").repeat(2),
    ] {
        let refused = asking.challenge.verify(&CALLER, &asking.proof, &wrong);
        assert_eq!(refused, Err(ProofError::Log));
    }
    // An event of a register that is not quoted proves nothing, so there must be none.
    let pcr = Pcr::SECURE_BOOT;
    let other = BootEvent {
        pcr,
        ..events(b"x")[0]
    };
    let more = [events(b"image"), vec![other]].concat();
    let refused = asking.challenge.verify(&CALLER, &asking.proof, &more);
    assert_eq!(refused, Err(ProofError::Log));
}

#[test]
fn the_keys_stay_the_same_over_reboots_and_a_clear() {
    let mut machine = Machine::booted(b"image");
    let keys = machine.tpm.attestation_keys().unwrap();
    machine.tpm.clear();
    assert_eq!(machine.tpm.attestation_keys().unwrap(), keys);
    let mut machine = machine.reboot(b"image");
    assert_eq!(machine.tpm.attestation_keys().unwrap(), keys);
    let mut other = Machine::booted(b"image");
    let (endorsement, attestation) = other.tpm.attestation_keys().unwrap();
    assert!(endorsement.name() != keys.0.name() && attestation.name() != keys.1.name());
    let (again, _) = keys;
    assert_eq!(EndorsementKey::from_bytes(&again.to_bytes()), Ok(again));
}

/// The template by which manufacturers certify the key.
#[test]
fn the_policy_of_the_endorsement_key_is_that_of_the_profile() {
    let key = EndorsementKey::from_bytes(&[0, 1, 1, 0, 1, 1]).unwrap();
    let area = key.0.public_area(Template::Endorsement);
    let policy = "837197674484b3f81a90cc8d46a5d724fd52d76e06520b64f2a1da1b331469aa";
    assert!(hex::encode(area).contains(policy));
}

#[test]
fn an_answer_is_for_one_challenge_and_one_caller() {
    let asking = Asking::of(Machine::booted(b"image"));
    let (endorsement, attestation) = {
        let mut tpm = asking.machine.between(super::Transport::transmit);
        tpm.attestation_keys().unwrap()
    };
    let next = Challenge::new(&endorsement, &attestation).unwrap();
    let replayed = next.verify(&CALLER, &asking.proof, &events(b"image"));
    assert_eq!(replayed, Err(ProofError::OtherTpm));
    let other = asking
        .challenge
        .verify(&[8; 32], &asking.proof, &events(b"image"));
    assert!(
        matches!(
            other,
            Err(ProofError::Quote(QuoteError::OtherChallenge { .. }))
        ),
        "{other:?}"
    );
}

/// A machine that presents the endorsement key of another one, or an attestation key that is not in the same TPM, cannot
/// decrypt the secret.
#[test]
fn a_key_of_another_machine_is_of_no_use() {
    let mut own = Machine::booted(b"image");
    let (endorsement, attestation) = own.tpm.attestation_keys().unwrap();
    let mut other = Machine::booted(b"image");
    let (other_endorsement, other_attestation) = other.tpm.attestation_keys().unwrap();
    for (endorsement, attestation) in [
        (other_endorsement, attestation),
        (endorsement, other_attestation),
    ] {
        let challenge = Challenge::new(&endorsement, &attestation).unwrap();
        let refused = own.tpm.attest(challenge.asked(), &CALLER).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Tpm {
                    command: Command::ActivateCredential,
                    ..
                }
            ),
            "{refused}"
        );
    }
}

#[test]
fn a_point_that_is_not_on_the_curve_is_an_error() {
    let bytes = [&[0, 32][..], &[1; 32], &[0, 32], &[1; 32]].concat();
    let endorsement = EndorsementKey::from_bytes(&bytes).unwrap();
    let attestation = AttestationKey::from_bytes(&bytes).unwrap();
    let error = Challenge::new(&endorsement, &attestation).err();
    assert_eq!(
        error,
        Some(ChallengeError::EndorsementKey(SessionError::NotAPoint))
    );
    for wrong in [&bytes[..67], &[&bytes[..], &[0]].concat(), &[0, 33], &[]] {
        assert!(EndorsementKey::from_bytes(wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn a_tpm_without_a_certificate_has_none() {
    let mut machine = Machine::booted(b"image");
    assert_eq!(machine.tpm.endorsement_certificate().unwrap(), None);
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

#[test]
fn a_certificate_is_read_in_parts() {
    let mut machine = Machine::booted(b"image");
    let certificate: Vec<u8> = (0..1300_u32).map(|at| at as u8).collect();
    machine.tpm.certify(&certificate);
    let read = machine.tpm.endorsement_certificate().unwrap();
    assert_eq!(read, Some(certificate));
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

/// A changed byte anywhere in quote, signature or secret.
#[test]
fn a_changed_answer_proves_nothing() {
    let asking = Asking::of(Machine::booted(b"image"));
    let Proof { secret, quote } = &asking.proof;
    let changed = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1;
        bytes
    };
    let attested = (0..quote.attested.len()).map(|at| Quote {
        attested: changed(&quote.attested, at),
        ..quote.clone()
    });
    let signatures = (0..64).map(|at| Quote {
        signature: changed(&quote.signature, at).try_into().unwrap(),
        ..quote.clone()
    });
    for (at, quote) in attested.chain(signatures).enumerate() {
        let proof = Proof {
            quote,
            ..asking.proof.clone()
        };
        assert_eq!(
            asking.verify(&proof),
            Err(QuoteError::Signature.into()),
            "byte {at}"
        );
    }
    for wrong in (0..32)
        .map(|at| changed(secret, at))
        .chain([Vec::new(), secret[..31].to_vec()])
    {
        let proof = Proof {
            secret: wrong,
            ..asking.proof.clone()
        };
        assert_eq!(asking.verify(&proof), Err(ProofError::OtherTpm));
    }
}

/// Structures that are no quote, by a key that signs anything.
#[test]
fn only_a_quote_of_the_right_registers_counts() {
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};

    let random = SystemRandom::new();
    let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
    let signer = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &random).unwrap();
    let (x, y) = signer.public_key().as_ref()[1..].split_at(32);
    let point = [&[0, 32], x, &[0, 32], y].concat();
    let key = AttestationKey::from_bytes(&point).unwrap();
    let real = Asking::of(Machine::booted(b"image"));
    let attested = &real.proof.quote.attested;
    let qualifying = real.challenge.asked().qualifying(&CALLER);
    let verify = |attested: &[u8]| {
        let signature = signer.sign(&random, attested).unwrap();
        let quote = Quote {
            attested: attested.to_vec(),
            signature: signature.as_ref().try_into().unwrap(),
        };
        quote.verify(&key, &qualifying)
    };
    assert!(verify(attested).is_ok());
    for length in 0..attested.len() {
        let result = verify(&attested[..length]);
        assert!(matches!(result, Err(QuoteError::Malformed(_))), "{length}");
    }
    // The selection is before the size of the digest, and the digest.
    let at = attested.len() - 32 - 2 - 3;
    let mut other = attested.clone();
    other[at] ^= 1;
    assert!(matches!(verify(&other), Err(QuoteError::OtherPcrs(pcrs)) if pcrs != QUOTED));
}

fn asked() -> impl Strategy<Value = Asked> {
    let bytes = || proptest::collection::vec(any::<u8>(), 0..300);
    (any::<[u8; 32]>(), bytes(), bytes()).prop_map(|(nonce, credential, encrypted_seed)| Asked {
        nonce,
        credential,
        encrypted_seed,
    })
}

/// A curator that lies gets nothing but an error, and leaves nothing behind.
#[test]
fn no_question_leaves_anything_loaded() {
    let machine = std::cell::RefCell::new(Machine::booted(b"image"));
    let config = ProptestConfig::with_cases(24);
    proptest!(config, |(asked in asked())| {
        let mut machine = machine.borrow_mut();
        prop_assert!(machine.tpm.attest(&asked, &CALLER).is_err());
        prop_assert_eq!(machine.loaded(), Vec::<u32>::new());
    });
}

proptest! {
    #[test]
    fn no_bytes_are_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Quoted::parse(&bytes);
        let _ = EndorsementKey::from_bytes(&bytes);
    }
}

#[test]
fn a_digest_of_a_replay_depends_on_the_order() {
    let event = |content: &[u8]| BootEvent {
        pcr: Pcr::BOOT_PROGRAMS,
        digest: measured(content),
    };
    let replayed = |events: &[BootEvent]| crate::boot_log::replay(events, QUOTED).unwrap();
    let (one, two) = (event(b"1"), event(b"2"));
    assert_ne!(replayed(&[one, two]), replayed(&[two, one]));
    assert_eq!(replayed(&[]).get(Pcr::BOOT_PROGRAMS), Some(Digest::ZERO));
}
