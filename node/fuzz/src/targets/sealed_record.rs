//! A secret that a TPM has sealed, from the ESP.

use hearth_tpm::{Pcr, Sealed};

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "sealed_record",
    allocates: 64 << 10,
    check,
    seeds,
};

fn check(input: &[u8]) {
    if let Ok(sealed) = Sealed::decode(input) {
        assert_eq!(sealed.encode(), input, "a record has one encoding");
    }
}

/// The fields before the policy, as the module of [`Sealed`] describes them.
fn start() -> Vec<u8> {
    [&b"HTPM\x01"[..], &[0x11; 32], &[0x22; 32]].concat()
}

const PRIVATE: &[u8] = b"\0\x04blob";

/// A secret that was sealed to the state of Secure Boot.
pub(super) fn literal() -> Vec<u8> {
    let pcrs = [1 << Pcr::SECURE_BOOT.index(), 0, 0];
    [&start()[..], &pcrs, &[0x33; 32], &[0], PRIVATE].concat()
}

fn seeds() -> Seeds {
    let image = [0, 1 << (Pcr::KERNEL_IMAGE.index() - 8), 0];
    let signed =
        |kind: u8, key: &[u8]| [&start()[..], &[0; 3], &[kind], key, &image, PRIVATE].concat();
    vec![
        ("literal", literal()),
        ("ecdsa", signed(1, &[0x44; 64])),
        ("rsa", signed(2, &[0xff; 256])),
    ]
}
