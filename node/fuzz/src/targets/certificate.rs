//! Certificates of peers. Each must be refused here: who made the input has no key of the authority.

use std::sync::LazyLock;
use std::time::Duration;

use hearth_api::certificates::{ClusterCa, self_signed, verify_self_signed};
use hearth_api::identity::SigningKey;
use hearth_api::private::StoredAuthority;
use prost::Message;
use rustls_pki_types::UnixTime;

use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "certificate",
    allocates: 256 << 10,
    check,
    seeds,
};

/// In 2027.
pub(super) const NOW: UnixTime = UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000));

/// The authority of a cluster, which has issued none of the inputs.
pub(super) fn authority() -> ClusterCa {
    static CA: LazyLock<ClusterCa> =
        LazyLock::new(|| ClusterCa::parse(&stored()).expect("the fixture is an authority"));
    CA.clone()
}

fn stored() -> Vec<u8> {
    let record = include_bytes!("../../../fixtures/authority-cluster.pb");
    let record = StoredAuthority::decode(&record[..]);
    record.expect("the fixture is a record").certificate
}

fn check(input: &[u8]) {
    let _ = verify_self_signed(input, NOW);
    let verified = authority().verify_at_any_time(input);
    assert!(verified.is_err(), "nobody has its key");
    if let Ok(ca) = ClusterCa::parse(input) {
        assert_eq!(ca.certificate().as_ref(), input);
    }
}

fn seeds() -> Seeds {
    let own = self_signed(&SigningKey::from_seed([7; 32]));
    vec![("authority", stored()), ("possession", own.to_vec())]
}
