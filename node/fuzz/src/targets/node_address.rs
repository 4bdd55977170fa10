//! Addresses that nodes tell each other in datagrams. Each must be refused here: who made the input is no node.

use hearth_api::certificates::self_signed;
use hearth_api::identity::{ClusterId, NodeId, SigningKey};
use hearth_api::proofs::check_address;
use hearth_api::tls::Trust;
use hearth_api::v1::NodeAddress;
use prost::Message;

use super::certificate::{NOW, authority};
use crate::{Seeds, Target};

pub(super) const TARGET: Target = Target {
    name: "node_address",
    allocates: 256 << 10,
    check,
    seeds,
};

fn check(input: &[u8]) {
    let Ok(record) = NodeAddress::decode(input) else {
        return;
    };
    let trust = Trust {
        cluster: ClusterId::from_bytes([0x55; 16]),
        ca: authority(),
    };
    assert!(
        check_address(&record, &trust, NOW).is_err(),
        "nobody has its key"
    );
}

fn seeds() -> Seeds {
    let key = SigningKey::from_seed([7; 32]);
    let record = NodeAddress {
        node_id: NodeId::from_public_key(&key.public()).to_string(),
        host: "192.0.2.1".to_owned(),
        counter: 7,
        certificate: self_signed(&key).to_vec(),
        signature: key.sign(b"another statement").to_vec(),
    };
    vec![("stranger", record.encode_to_vec())]
}
