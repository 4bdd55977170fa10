//! The record in the header of the data partition. The two slots around it are a target of their own.

use hearth_host::storage::header::Header;

use super::slots::payload_of;
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "data_header",
    allocates: 64 << 10,
    check,
    seeds,
};

fn check(input: &[u8]) {
    if let Ok(header) = Header::decode(input) {
        assert_eq!(Header::decode(&header.encode()), Ok(header));
    }
}

fn seeds() -> Seeds {
    let ready = include_bytes!("../../../fixtures/data-header-ready-encrypted.slot");
    let initialising = include_bytes!("../../../fixtures/data-header-initialising-insecure.slot");
    vec![
        ("ready", payload_of(ready)),
        ("initialising", payload_of(initialising)),
    ]
}
