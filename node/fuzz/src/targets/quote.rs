//! What a machine presents as its TPM's: keys, and the answer to a challenge.

use hearth_tpm::attestation::{AttestationKey, Challenge, EndorsementKey, Proof, Quote, Quoted};

use super::tpm::GENERATOR;
use crate::parts::{Parts, sized};
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "quote",
    // The challenge has two buffers of 4 KiB.
    allocates: 64 << 10,
    check,
    seeds,
};

/// The keys, each with its length; then secret, quote and signature. Nothing that was not signed is accepted.
fn check(input: &[u8]) {
    let mut parts = Parts::of(input);
    let endorsement = EndorsementKey::from_bytes(parts.sized());
    let attestation = AttestationKey::from_bytes(parts.sized());
    let (Ok(endorsement), Ok(attestation)) = (endorsement, attestation) else {
        return;
    };
    let bytes = endorsement.to_bytes();
    assert_eq!(
        EndorsementKey::from_bytes(&bytes).as_ref(),
        Ok(&endorsement)
    );
    let Ok(challenge) = Challenge::new(&endorsement, &attestation) else {
        return;
    };
    let secret = parts.sized().to_vec();
    let attested = parts.sized().to_vec();
    let mut signature = [0; 64];
    let given = parts.sized();
    let length = given.len().min(signature.len());
    signature[..length].copy_from_slice(&given[..length]);
    let proof = Proof {
        secret,
        quote: Quote {
            attested: attested.clone(),
            signature,
        },
    };
    assert!(challenge.verify(&[0; 32], &proof, &[]).is_err());
    let _ = Quoted::parse(&attested);
}

fn seeds() -> Seeds {
    let [x, y] = GENERATOR;
    let point = [&[0, 32][..], &x, &[0, 32], &y].concat();
    let quote = [
        &[0xff, 0x54, 0x43, 0x47, 0x80, 0x18, 0, 34, 0, 11][..],
        &[1; 32],
        &[0, 32],
        &[2; 32],
        &[0; 25],
        &[0, 0, 0, 1, 0, 11, 3, 0x10, 0x18, 0, 0, 32],
        &[3; 32],
    ]
    .concat();
    let all = [&point[..], &point, &[7; 32], &quote, &[9; 64]];
    let whole: Vec<u8> = all.iter().flat_map(|part| sized(part)).collect();
    let keys: Vec<u8> = all[..2].iter().flat_map(|part| sized(part)).collect();
    vec![("answer", whole), ("keys", keys)]
}
