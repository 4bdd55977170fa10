//! A TPM that lies, or something that answers in its place.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::{
    LITERAL, Machine, SECRET, Transport, after, code_of, ecdsa_key, literal, signatures, signed_by,
};
use crate::key::name_of;
use crate::sealed::StorageKeyName;
use crate::{
    Command, Digest, Error, Pcr, PcrValues, Retries, SealError, Sealed, SessionError, Tpm,
    UnsealError,
};

/// Answers every command with the next of these.
struct Scripted(std::vec::IntoIter<Vec<u8>>);

impl Transport for Scripted {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        let body = self.0.next().ok_or(io::ErrorKind::UnexpectedEof)?;
        // One in four is not even a response.
        if body.first().is_none_or(|first| first % 4 == 0) {
            return Ok(body);
        }
        // The others look like success.
        let size = u32::try_from(10 + body.len()).unwrap();
        Ok([&command[..2], &size.to_be_bytes(), &[0; 4], &body].concat())
    }
}

/// Every call, whatever it returns.
fn call_everything(tpm: &mut Tpm, sealed: &Sealed) {
    let _ = tpm.identity();
    let _ = tpm.lockout();
    let _ = tpm.random(40);
    let _ = tpm.pcr_values(LITERAL);
    let _ = tpm.storage_key();
    let _ = tpm.seal(SECRET, sealed.policy());
    let _ = tpm.unseal(sealed, None);
}

/// Bodies of responses: noise, small numbers as in sizes and counts, and what passes the first checks.
fn body() -> impl Strategy<Value = Vec<u8>> {
    let handles = (0_u8..2, 0_u32..80, vec(any::<u8>(), 0..64)).prop_map(|(more, count, rest)| {
        [&[more, 0, 0, 0, 1][..], &count.to_be_bytes(), &rest].concat()
    });
    let nothing_loaded = Just(vec![0, 0, 0, 0, 1, 0, 0, 0, 0]);
    prop_oneof![
        vec(any::<u8>(), 0..200),
        vec(0_u8..4, 0..200),
        handles,
        nothing_loaded,
    ]
}

fn sealed() -> Sealed {
    let values = PcrValues::from_iter([(Pcr::SECURE_BOOT, Digest::ZERO)]);
    Sealed {
        storage_key: StorageKeyName(Digest::ZERO),
        unique: [0; 32],
        policy: signed_by(&ecdsa_key()),
        literal: values,
        private: vec![1; 64],
    }
}

proptest! {
    #[test]
    fn no_response_causes_a_panic(bodies in vec(body(), 0..60)) {
        let retries = Retries { first: Duration::ZERO, longest: Duration::ZERO, attempts: 2 };
        let mut tpm = Tpm::with_retries(Scripted(bodies.into_iter()), retries);
        call_everything(&mut tpm, &sealed());
    }
}

/// One changed byte in any response: the right secret or an error, and nothing left.
#[test]
fn a_changed_response_never_yields_another_secret() {
    let key = ecdsa_key();
    let machine = Machine::booted(b"image");
    let of_image = signatures(&key, b"image");
    let sealed = machine
        .between(|wire, command| wire.transmit(command))
        .seal(SECRET, &signed_by(&key))
        .unwrap();
    let mut opened = 0;
    for step in 0..400_usize {
        let count = AtomicUsize::new(0);
        let mut tpm = machine.between(move |wire, command| {
            let mut response = wire.transmit(command)?;
            if count.fetch_add(1, Ordering::Relaxed) == step % 19 {
                let at = step * 7 % response.len();
                response[at] ^= 1 << (step % 8);
            }
            Ok(response)
        });
        if let Ok(secret) = tpm.unseal(&sealed, Some(&of_image)) {
            assert_eq!(secret[..], SECRET[..], "step {step}");
            opened += 1;
        }
        let _ = tpm.random(1);
        assert_eq!(machine.loaded(), [0_u32; 0], "step {step}");
    }
    // What is not used may change: the update counter of the PCRs, creation data.
    assert!(opened < 200, "{opened} of 400");
}

/// A client for which each response to one command is changed.
fn changed(
    machine: &Machine,
    target: Command,
    change: impl Fn(&mut Vec<u8>) + Send + 'static,
) -> Tpm {
    machine.between(move |wire, command| {
        let mut response = wire.transmit(command)?;
        if code_of(command) == target as u32 {
            change(&mut response);
        }
        Ok(response)
    })
}

#[test]
fn a_secret_that_was_changed_on_the_way_is_refused() {
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &literal()).unwrap();
    // Header, size of the parameters, size of the secret; then the secret.
    let mut tpm = changed(&machine, Command::Unseal, |response| response[20] ^= 1);
    let refused = tpm.unseal(&sealed, None).unwrap_err();
    let is_hmac = matches!(
        refused,
        UnsealError::Command(Error::Session {
            command: Command::Unseal,
            source: SessionError::Hmac
        })
    );
    assert!(is_hmac, "{refused}");
}

#[test]
fn pcrs_that_were_changed_on_the_way_are_not_sealed_to() {
    let machine = Machine::booted(b"image");
    let last = |response: &mut Vec<u8>| *response.last_mut().unwrap() ^= 1;
    let mut tpm = changed(&machine, Command::PcrRead, last);
    let refused = tpm.seal(SECRET, &literal());
    assert!(matches!(refused, Err(SealError::PcrsChanged { .. })));
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

/// Who controls the way to the TPM presents a storage key whose private half they know. They could read the salt of
/// every session, but a record names the TPM's own key.
#[test]
fn another_storage_key_is_refused() {
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &literal()).unwrap();
    let own = ecdsa_key();
    let point = &own.public().to_der()[27..];
    let point: [u8; 64] = point.try_into().unwrap();
    let sessions = Arc::new(AtomicUsize::new(0));
    let started = sessions.clone();
    let mut tpm = machine.between(move |wire, command| {
        let mut response = wire.transmit(command)?;
        match code_of(command) {
            code if code == Command::CreatePrimary as u32 => replace_point(&mut response, &point),
            code if code == Command::StartAuthSession as u32 => {
                started.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
        Ok(response)
    });
    let refused = tpm.unseal(&sealed, None);
    assert!(matches!(refused, Err(UnsealError::OtherTpm(_))));
    tpm.expect_storage_key(sealed.storage_key());
    let refused = tpm.seal(SECRET, &literal());
    assert!(matches!(refused, Err(SealError::OtherTpm(_))));
    assert_eq!(sessions.load(Ordering::Relaxed), 0);
}

/// Header, handle, size of the parameters, public area of 90 bytes with its size, whose last 68 bytes are the point.
fn replace_point(response: &mut [u8], point: &[u8; 64]) {
    let end = 10 + 4 + 4 + 2 + 90;
    let public = response[20..end].to_vec();
    assert_ne!(name_of(&public), name_of(point));
    response[end - 66..end - 34].copy_from_slice(&point[..32]);
    response[end - 32..end].copy_from_slice(&point[32..]);
}

/// A TPM that repeats the response of an earlier session is not believed.
#[test]
fn an_old_response_is_refused() {
    let key = ecdsa_key();
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &signed_by(&key)).unwrap();
    let of_image = signatures(&key, b"image");
    let mut old = None;
    let mut tpm = machine.between(move |wire, command| {
        let response = wire.transmit(command)?;
        if code_of(command) != Command::Unseal as u32 {
            return Ok(response);
        }
        Ok(old.get_or_insert(response).clone())
    });
    tpm.unseal(&sealed, Some(&of_image)).unwrap();
    let refused = tpm.unseal(&sealed, Some(&of_image)).unwrap_err();
    let hmac = "TPM2_Unseal: the response is not authentic: its HMAC is wrong";
    assert_eq!(refused.to_string(), hmac);
    assert_eq!(after(b"image").selection(), super::SIGNED);
}
