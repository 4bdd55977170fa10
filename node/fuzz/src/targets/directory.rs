//! The record of the cluster directory on the ESP. The two slots around it are a target of their own.

use hearth_host::directory::{decode, encode, nodes};

use super::slots::payload_of;
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "directory",
    allocates: 64 << 10,
    check,
    seeds,
};

fn check(input: &[u8]) {
    if let Ok(Some(directory)) = decode(input) {
        let _ = nodes(&directory);
        assert_eq!(decode(&encode(&directory)), Ok(Some(directory)));
    }
}

fn seeds() -> Seeds {
    let stored = include_bytes!("../../../fixtures/cluster-directory.slot");
    vec![("stored", payload_of(stored))]
}
