//! A busy TPM, a TPM that refuses, and power cuts: at each command in turn.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::{
    Machine, SECRET, Transport, code_of, ecdsa_key, literal, refusal, signatures, signed_by,
};
use crate::{Command, Error, ResponseCode, SealError, SigningKey, Tpm, UnsealError};

/// The commands of [`round_trip`].
const COMMANDS: [Command; 13] = [
    Command::CreatePrimary,
    Command::Create,
    Command::Load,
    Command::Unseal,
    Command::FlushContext,
    Command::LoadExternal,
    Command::PolicyAuthorize,
    Command::StartAuthSession,
    Command::VerifySignature,
    Command::GetCapability,
    Command::GetRandom,
    Command::PcrRead,
    Command::PolicyPcr,
];

/// Seals, unseals, and whatever else there is.
fn round_trip(tpm: &mut Tpm, key: &SigningKey) -> Result<(), Error> {
    let of_seal = |error| match error {
        SealError::Command(error) => error,
        other => panic!("{other}"),
    };
    let of_unseal = |error| match error {
        UnsealError::Command(error) => error,
        other => panic!("{other}"),
    };
    let sealed = tpm.seal(SECRET, &signed_by(key)).map_err(of_seal)?;
    let signatures = signatures(key, b"image");
    let secret = tpm.unseal(&sealed, Some(&signatures)).map_err(of_unseal)?;
    assert_eq!(secret[..], SECRET[..]);
    tpm.identity()?;
    tpm.random(1)?;
    Ok(())
}

#[test]
fn a_busy_tpm_is_waited_for() {
    let key = ecdsa_key();
    let machine = Machine::booted(b"image");
    let refused = Arc::new(Mutex::new(BTreeSet::new()));
    let (seen, mut busy) = (refused.clone(), [0x922, 0x90a, 0x908, 0x920, 0x923].iter());
    let mut tpm = machine.between(move |wire, command| match busy.next() {
        Some(code) => {
            seen.lock().unwrap().insert(code_of(command));
            Ok(refusal(*code))
        }
        None => {
            busy = [0x922, 0x90a, 0x908, 0x920, 0x923].iter();
            wire.transmit(command)
        }
    });
    round_trip(&mut tpm, &key).unwrap();
    let expected: BTreeSet<u32> = COMMANDS.iter().map(|command| *command as u32).collect();
    assert_eq!(*refused.lock().unwrap(), expected);
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

#[test]
fn a_tpm_that_stays_busy_is_given_up() {
    let machine = Machine::booted(b"image");
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let mut tpm = machine.between(move |_, _| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(refusal(0x922))
    });
    let error = tpm.random(1).unwrap_err();
    assert_eq!(error.code(), Some(ResponseCode::RETRY));
    assert_eq!(sent.load(Ordering::Relaxed), 8);
}

#[test]
fn a_tpm_that_is_locked_out_says_so() {
    let mut machine = Machine::booted(b"image");
    let sealed = machine.tpm.seal(SECRET, &literal()).unwrap();
    let mut tpm = machine.between(|wire, command| match code_of(command) {
        code if code == Command::Unseal as u32 => Ok(refusal(0x921)),
        _ => wire.transmit(command),
    });
    let refused = tpm.unseal(&sealed, None);
    assert!(matches!(refused, Err(UnsealError::LockedOut(_))));
    assert_eq!(machine.loaded(), [0_u32; 0]);
}

/// What happens to one command, and to those after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The TPM refuses it.
    Refused,
    /// It does not reach the TPM.
    Lost,
    /// The TPM executes it, and the response is lost.
    Unanswered,
    /// The TPM executes it, and nothing passes any more until the fault is repaired.
    Cut,
}

/// Fails one command in turn until none is left to fail. Returns how many there were.
fn fail_each(fault: Fault) -> usize {
    let key = ecdsa_key();
    let machine = Machine::booted(b"image");
    for target in 0.. {
        let sent = Arc::new(AtomicUsize::new(0));
        let is_cut = Arc::new(AtomicBool::new(false));
        let (count, cut) = (sent.clone(), is_cut.clone());
        let mut tpm = machine.between(move |wire, command| {
            let lost = || Err(io::Error::from(io::ErrorKind::ConnectionReset));
            if cut.load(Ordering::Relaxed) {
                return lost();
            }
            if count.fetch_add(1, Ordering::Relaxed) != target {
                return wire.transmit(command);
            }
            match fault {
                Fault::Refused => return Ok(refusal(0x101)),
                Fault::Lost => {}
                Fault::Unanswered => drop(wire.transmit(command)?),
                Fault::Cut => {
                    wire.transmit(command)?;
                    cut.store(true, Ordering::Relaxed);
                }
            }
            lost()
        });
        let result = round_trip(&mut tpm, &key);
        if sent.load(Ordering::Relaxed) <= target {
            result.unwrap();
            return target;
        }
        if fault != Fault::Cut {
            assert_eq!(
                machine.loaded(),
                [0_u32; 0],
                "{fault:?} at command {target}"
            );
        }
        is_cut.store(false, Ordering::Relaxed);
        tpm.random(1).unwrap();
        assert_eq!(
            machine.loaded(),
            [0_u32; 0],
            "{fault:?} at command {target}"
        );
        round_trip(&mut tpm, &key).unwrap();
    }
    unreachable!("the range has no end")
}

#[test]
fn a_refusal_of_any_command_leaves_nothing_loaded() {
    assert!(fail_each(Fault::Refused) > COMMANDS.len());
}

#[test]
fn a_command_that_is_lost_leaves_nothing_loaded() {
    assert!(fail_each(Fault::Lost) > COMMANDS.len());
}

#[test]
fn a_response_that_is_lost_leaves_nothing_loaded() {
    assert!(fail_each(Fault::Unanswered) > COMMANDS.len());
}

#[test]
fn a_power_cut_at_any_command_leaves_nothing_loaded_after_the_next_call() {
    assert!(fail_each(Fault::Cut) > COMMANDS.len());
}

/// A client that was killed cannot flush: the next one does.
#[test]
fn what_another_client_has_left_is_flushed() {
    let mut machine = Machine::booted(b"image");
    let mut killed = machine.between(|wire, command| match code_of(command) {
        code if code == Command::FlushContext as u32 => Err(io::ErrorKind::BrokenPipe.into()),
        _ => wire.transmit(command),
    });
    let sealed = killed.seal(SECRET, &literal()).unwrap();
    drop(killed);
    assert_eq!(machine.loaded().len(), 1);
    machine.tpm = Tpm::new(machine.wire.clone());
    assert_eq!(machine.tpm.unseal(&sealed, None).unwrap()[..], SECRET[..]);
    assert_eq!(machine.loaded(), [0_u32; 0]);
}
