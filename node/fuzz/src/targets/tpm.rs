//! Responses of a TPM to everything that the node asks.

use std::io;
use std::time::Duration;

use hearth_tpm::{
    Pcr, PcrSelection, PcrSignatures, Policy, PolicyKey, Retries, Sealed, SignedPolicy, Tpm,
    Transport,
};

use crate::parts::{Parts, sized};
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "tpm",
    // A command has a buffer of 4 KiB, and there are hundreds.
    allocates: 16 << 20,
    check,
    seeds,
};

const LITERAL: PcrSelection = PcrSelection::of([Pcr::SECURE_BOOT]);
const SIGNED: PcrSelection = PcrSelection::of([Pcr::KERNEL_IMAGE]);

/// No answer may make the node ask more often than this.
const MAX_COMMANDS: usize = 2000;

/// The generator of P-256, which is a public key like any other.
pub(super) const GENERATOR: [[u8; 32]; 2] = [
    [
        0x6b, 0x17, 0xd1, 0xf2, 0xe1, 0x2c, 0x42, 0x47, 0xf8, 0xbc, 0xe6, 0xe5, 0x63, 0xa4, 0x40,
        0xf2, 0x77, 0x03, 0x7d, 0x81, 0x2d, 0xeb, 0x33, 0xa0, 0xf4, 0xa1, 0x39, 0x45, 0xd8, 0x98,
        0xc2, 0x96,
    ],
    [
        0x4f, 0xe3, 0x42, 0xe2, 0xfe, 0x1a, 0x7f, 0x9b, 0x8e, 0xe7, 0xeb, 0x4a, 0x7c, 0x0f, 0x9e,
        0x16, 0x2b, 0xce, 0x33, 0x57, 0x6b, 0x31, 0x5e, 0xce, 0xcb, 0xb6, 0x40, 0x68, 0x37, 0xbf,
        0x51, 0xf5,
    ],
];

/// Answers with these responses, then with the last of them for ever.
struct Scripted {
    responses: Vec<Vec<u8>>,
    asked: usize,
}

impl Transport for Scripted {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        assert!(self.asked < MAX_COMMANDS, "the node asks for ever");
        let at = self.asked.min(self.responses.len().saturating_sub(1));
        self.asked += 1;
        match self.responses.get(at).map(|response| response.split_at(1)) {
            None => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(([SUCCESS], body)) => Ok(response(command, body)),
            Some((_, whole)) => Ok(whole.to_vec()),
        }
    }
}

/// The first byte of what is a body, to which a header that says success is added.
const SUCCESS: u8 = 0;

fn response(command: &[u8], body: &[u8]) -> Vec<u8> {
    let size = (10 + body.len()) as u32;
    [&command[..2], &size.to_be_bytes(), &[0; 4], body].concat()
}

/// What is asked; responses, each with its length.
fn check(input: &[u8]) {
    let mut parts = Parts::of(input);
    let question = parts.byte();
    let mut responses = Vec::new();
    while !parts.is_empty() {
        let response = parts.sized();
        if !response.is_empty() {
            responses.push(response.to_vec());
        }
    }
    let retries = Retries {
        first: Duration::ZERO,
        longest: Duration::ZERO,
        attempts: 2,
    };
    let script = Scripted {
        responses,
        asked: 0,
    };
    let mut tpm = Tpm::with_retries(script, retries);
    match question % 7 {
        0 => drop(tpm.identity()),
        1 => drop(tpm.lockout()),
        2 => drop(tpm.random(40)),
        3 => drop(tpm.pcr_values(LITERAL)),
        4 => drop(tpm.storage_key()),
        5 => drop(tpm.seal(b"secret", &policy())),
        _ => {
            let signatures = PcrSignatures::default();
            drop(tpm.unseal(&sealed(), Some(&signatures)));
        }
    }
    // Whatever has happened, it goes on.
    let _ = tpm.random(1);
}

fn policy() -> Policy {
    let point: [u8; 64] = std::array::from_fn(|at| GENERATOR[at / 32][at % 32]);
    let signed = SignedPolicy::new(PolicyKey::EcdsaP256(point), SIGNED);
    Policy::new(LITERAL, signed.ok()).expect("a PCR is selected")
}

fn sealed() -> Sealed {
    Sealed::decode(&super::sealed_record::literal()).expect("the seed is a record")
}

fn seeds() -> Seeds {
    let script = |question: u8, bodies: &[&[u8]]| {
        let response = |body: &&[u8]| sized(&[&[SUCCESS], *body].concat());
        let responses: Vec<u8> = bodies.iter().flat_map(response).collect();
        [&[question][..], &responses].concat()
    };
    let none_loaded: &[u8] = &[0, 0, 0, 0, 1, 0, 0, 0, 0];
    let one_loaded: &[u8] = &[0, 0, 0, 0, 1, 0, 0, 0, 1, 0x80, 0, 0, 0];
    let properties: &[u8] = &[0, 0, 0, 0, 6, 0, 0, 0, 1, 0, 0, 1, 5, b'I', b'B', b'M', 0];
    let random: &[u8] = &[0, 4, 1, 2, 3, 4];
    let pcr = [
        &[
            0, 0, 0, 1, 0, 0, 0, 1, 0, 11, 3, 0x80, 0, 0, 0, 0, 0, 1, 0, 32,
        ][..],
        &[0; 32],
    ]
    .concat();
    let key = storage_key();
    let session = [&[2, 0, 0, 0, 0, 32][..], &[5; 32]].concat();
    let after = [none_loaded, none_loaded];
    vec![
        ("identity", script(0, &[&after[..], &[properties]].concat())),
        ("lockout", script(1, &[&after[..], &[properties]].concat())),
        ("random", script(2, &[&after[..], &[random]].concat())),
        (
            "flushed",
            script(
                2,
                &[&[one_loaded, &[], none_loaded][..], &[random]].concat(),
            ),
        ),
        ("pcrs", script(3, &[&after[..], &[&pcr]].concat())),
        (
            "storage_key",
            script(4, &[&after[..], &[&key, &[]]].concat()),
        ),
        (
            "seal",
            script(5, &[&after[..], &[&key, &pcr, &session]].concat()),
        ),
        (
            "unseal",
            script(6, &[&after[..], &[&key, &pcr, &session]].concat()),
        ),
    ]
}

/// What TPM2_CreatePrimary returns: a handle, the storage key with the generator as its point, and the authorization area
/// of an empty password.
fn storage_key() -> Vec<u8> {
    let template = [
        &[0, 0x23, 0, 0x0b, 0, 3, 4, 0x72, 0, 0, 0, 6, 0, 128, 0, 0x43][..],
        &[0, 0x10, 0, 3, 0, 0x10],
    ]
    .concat();
    let [x, y] = GENERATOR;
    let public = [&template[..], &[0, 32], &x, &[0, 32], &y].concat();
    let parameters = [&[0, public.len() as u8][..], &public].concat();
    let size = parameters.len() as u32;
    let handle = [0x80, 0, 0, 0];
    [
        &handle[..],
        &size.to_be_bytes(),
        &parameters,
        &[0, 0, 1, 0, 0],
    ]
    .concat()
}
