//! The record of the network configuration that an operator has set, on the ESP.

use hearth_host::network_setting::{decode, encode};

use super::slots::payload_of;
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "network_setting",
    allocates: 64 << 10,
    check,
    seeds,
};

fn check(input: &[u8]) {
    if let Ok(setting) = decode(input) {
        let again = decode(&encode(setting.as_ref()));
        assert_eq!(again.expect("it was encoded just now"), setting);
    }
}

fn seeds() -> Seeds {
    let stored = include_bytes!("../../../fixtures/network-setting.slot");
    vec![("stored", payload_of(stored))]
}
