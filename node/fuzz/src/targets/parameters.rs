//! The parameters of a machine, from the ESP or from fw_cfg.

use hearth_api::v1::NodeParameters;
use hearth_parameters::parse;
use prost::Message;

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "parameters",
    allocates: 256 << 10,
    check,
    seeds,
};

fn check(input: &[u8]) {
    let Ok(parameters) = parse(input) else {
        return;
    };
    // Tools write what they have decoded.
    let message = NodeParameters::decode(input).expect("it was decoded before");
    let again = parse(&message.encode_to_vec()).expect("what was accepted is encoded");
    assert_eq!(format!("{parameters:?}"), format!("{again:?}"));
}

fn seeds() -> Seeds {
    vec![
        (
            "bootstrap",
            include_bytes!("../../../fixtures/parameters-bootstrap.pb").to_vec(),
        ),
        (
            "recovery",
            include_bytes!("../../../fixtures/parameters-bootstrap-recovery.pb").to_vec(),
        ),
        (
            "register",
            include_bytes!("../../../fixtures/parameters-register.pb").to_vec(),
        ),
    ]
}
