//! What the loader passes on for the policy of PCRs: signatures in JSON, and a key in PEM or DER.

use hearth_tpm::{PcrSignatures, PolicyKey};

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "pcr_signatures",
    allocates: 256 << 10,
    check,
    seeds,
};

fn check(input: &[u8]) {
    if let Ok(signatures) = PcrSignatures::parse(input) {
        let again = PcrSignatures::parse(signatures.to_json().as_bytes());
        assert_eq!(again.expect("what was accepted is encoded"), signatures);
    }
    let keys = [PolicyKey::from_pem(input), PolicyKey::from_der(input)];
    for key in keys.into_iter().flatten() {
        assert!(!key.verifies(b"not signed", input));
        let again = PolicyKey::from_pem(key.to_pem().as_bytes());
        assert_eq!(again.expect("what was accepted is encoded"), key);
    }
}

fn seeds() -> Seeds {
    let json = format!(
        r#"{{"sha256":[{{"pcrs":[11],"pkfp":"{}","pol":"{}","sig":"c2ln"}}]}}"#,
        "ab".repeat(32),
        "cd".repeat(32)
    );
    let point = [super::tpm::GENERATOR[0], super::tpm::GENERATOR[1]].concat();
    // SubjectPublicKeyInfo of a key over P-256, up to the point.
    let mut key = vec![
        0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01,
    ];
    key.extend([
        0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00, 0x04,
    ]);
    key.extend(point);
    let pem = PolicyKey::from_der(&key).map(|key| key.to_pem());
    vec![
        ("signatures", json.into_bytes()),
        ("pem", pem.expect("the key is one").into_bytes()),
        ("der", key),
    ]
}
