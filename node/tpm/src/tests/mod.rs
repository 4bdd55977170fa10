//! Tests against a real TPM 2.0, emulated by swtpm.

mod attesting;
mod faults;
mod formats;
mod hostile;
mod policies;
mod sealing;

use std::io;
use std::sync::{Arc, Mutex};

use super::channel::Channel;
use super::testing::Swtpm;
use super::{
    Digest, Pcr, PcrSelection, PcrSignatures, PcrValues, Policy, Retries, SignedPolicy, SigningKey,
    SwtpmSocket, Tpm, Transport,
};

/// A secret of the size that the node seals.
const SECRET: &[u8; 32] = b"the key of a sealed configuratio";

const LITERAL: PcrSelection = PcrSelection::of([Pcr::SECURE_BOOT]);
const SIGNED: PcrSelection = PcrSelection::of([Pcr::KERNEL_IMAGE]);

fn literal() -> Policy {
    Policy::new(LITERAL, None).unwrap()
}

fn signed_by(key: &SigningKey) -> Policy {
    let signed = SignedPolicy::new(key.public().clone(), SIGNED).unwrap();
    Policy::new(LITERAL, Some(signed)).unwrap()
}

fn ecdsa_key() -> SigningKey {
    let pem = SigningKey::generate().unwrap();
    SigningKey::from_pem(pem.as_bytes()).unwrap()
}

/// A key that was made for these tests: `openssl genpkey -algorithm RSA`.
fn rsa_key() -> SigningKey {
    SigningKey::from_pem(include_bytes!("rsa.pem")).unwrap()
}

/// What the stub measures of an image with this content.
fn measured(content: &[u8]) -> Digest {
    Digest::of(&[content])
}

/// The values of the signed PCRs after that image was booted.
fn after(content: &[u8]) -> PcrValues {
    let value = Digest::ZERO.extended(&measured(content));
    PcrValues::from_iter([(Pcr::KERNEL_IMAGE, value)])
}

/// What an image with this content brings in its section `.pcrsig`, read as the node reads it.
fn signatures(key: &SigningKey, content: &[u8]) -> PcrSignatures {
    let mut signatures = PcrSignatures::default();
    signatures.sign(key, &after(content)).unwrap();
    PcrSignatures::parse(signatures.to_json().as_bytes()).unwrap()
}

/// One connection for several clients: the emulator has one at a time.
#[derive(Clone)]
struct Shared(Arc<Mutex<SwtpmSocket>>);

impl Transport for Shared {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        self.0.lock().unwrap().transmit(command)
    }
}

/// Stands between a client and the TPM, and does with each command what it likes.
struct Between<F>(Shared, F);

impl<F> Transport for Between<F>
where
    F: FnMut(&mut Shared, &[u8]) -> io::Result<Vec<u8>> + Send,
{
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        (self.1)(&mut self.0, command)
    }
}

/// A machine that has booted an image.
struct Machine {
    swtpm: Swtpm,
    wire: Shared,
    tpm: Tpm,
}

impl Machine {
    fn booted(content: &[u8]) -> Self {
        Self::with(Swtpm::start(), content)
    }

    /// The same machine after its power was cut and another image was booted.
    fn reboot(self, content: &[u8]) -> Self {
        let Self { mut swtpm, .. } = self;
        swtpm.restart();
        Self::with(swtpm, content)
    }

    fn with(swtpm: Swtpm, content: &[u8]) -> Self {
        let wire = Shared(Arc::new(Mutex::new(swtpm.transport())));
        let mut tpm = Tpm::new(wire.clone());
        tpm.extend(Pcr::SECURE_BOOT, &measured(b"keys of Secure Boot"));
        tpm.extend(Pcr::KERNEL_IMAGE, &measured(content));
        Self { swtpm, wire, tpm }
    }

    /// Another client of its TPM, with something between.
    fn between<F>(&self, act: F) -> Tpm
    where
        F: FnMut(&mut Shared, &[u8]) -> io::Result<Vec<u8>> + Send + 'static,
    {
        let pause = std::time::Duration::from_micros(100);
        let retries = Retries {
            first: pause,
            longest: pause,
            attempts: 8,
        };
        Tpm::with_retries(Between(self.wire.clone(), act), retries)
    }

    /// The objects and sessions that are loaded now.
    fn loaded(&self) -> Vec<u32> {
        let mut channel = Channel::new(Box::new(self.wire.clone()), Retries::default());
        let mut ask = |first| channel.handles(first).unwrap().0;
        [0x8000_0000, 0x0200_0000, 0x0300_0000]
            .map(&mut ask)
            .concat()
    }
}

/// The code of a command.
fn code_of(command: &[u8]) -> u32 {
    u32::from_be_bytes(command[6..10].try_into().unwrap())
}

/// The response of a TPM that refuses a command.
fn refusal(code: u32) -> Vec<u8> {
    [
        &0x8001_u16.to_be_bytes()[..],
        &10_u32.to_be_bytes(),
        &code.to_be_bytes(),
    ]
    .concat()
}
