//! The sealed configuration on the ESP: the message, and the lengths around it.

use hearth_enrolment::sealed::{Sealed, owners_key};

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "sealed_configuration",
    allocates: 256 << 10,
    check,
    seeds,
};

fn check(input: &[u8]) {
    let _ = Sealed::from_record(input);
    let _ = owners_key(input);
    if let Ok(sealed) = Sealed::decode(input) {
        let again = Sealed::decode(&sealed.encode()).expect("what was accepted is encoded");
        assert!(again.is_same(&sealed), "encoded to another configuration");
    }
}

fn seeds() -> Seeds {
    vec![
        (
            "founding",
            include_bytes!("../../../fixtures/sealed-founding-full.pb").to_vec(),
        ),
        (
            "registering",
            include_bytes!("../../../fixtures/sealed-registering-answered.pb").to_vec(),
        ),
        (
            "member",
            include_bytes!("../../../fixtures/sealed-member-with-both-keys.pb").to_vec(),
        ),
        (
            "recoverable",
            include_bytes!("../../../fixtures/sealed-member-recoverable.pb").to_vec(),
        ),
        (
            "disowned",
            include_bytes!("../../../fixtures/sealed-disowned.pb").to_vec(),
        ),
        // For the record: a length, and nothing else.
        ("record", vec![0; 4]),
    ]
}
