//! Statements that are signed outside of TLS: for each statement one function that makes its bytes,
//! used by signers and verifiers alike.
//!
//! Each statement begins with a name of its own and a zero byte, so that a signature of one can
//! never be taken for another, and every part of variable length is preceded by its length. The
//! layouts are documented in the proto files, at the fields that hold the signatures.
//!
//! Ed25519 needs no randomness here and is deterministic, so a statement that is signed again has
//! the same signature.

use rustls_pki_types::{CertificateDer, UnixTime};

use crate::certificates::CertificateError;
use crate::identity::{ClusterId, JoinKey, NodeId, PublicKey, SigningKey};
use crate::tls::{OwnCertificate, PeerCertificate, Trust};
use crate::v1::{DisownOrder, NodeAddress};

const JOIN_KEY: &[u8] = b"hearth join key v1\0";
const DISOWN: &[u8] = b"hearth disown v1\0";
const RESET: &[u8] = b"hearth reset v1\0";
const NODE_ADDRESS: &[u8] = b"hearth node address v1\0";

/// Why a statement is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// The signature is invalid for this statement and key.
    #[error("{what}: invalid signature")]
    Signature {
        /// Name of the statement.
        what: &'static str,
    },
    /// A field has the wrong value.
    #[error("{what}.{field}: {why}")]
    Field {
        /// Name of the statement.
        what: &'static str,
        /// Name of the field.
        field: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The certificate in the statement is invalid.
    #[error("{what}: invalid certificate")]
    Certificate {
        /// Name of the statement.
        what: &'static str,
        /// What is wrong with it.
        source: CertificateError,
    },
}

/// Proves that the machine with the node key also holds the join key.
pub fn prove_join_key(node: &PublicKey, key: &JoinKey) -> [u8; 64] {
    key.sign(&join_key_statement(node, &key.public()))
}

/// Verifies [`prove_join_key`].
pub fn check_join_key(
    node: &PublicKey,
    join_key: &PublicKey,
    proof: &[u8],
) -> Result<(), ProofError> {
    let statement = join_key_statement(node, join_key);
    let verified = join_key.verify(&statement, proof);
    verified.map_err(|_| ProofError::Signature {
        what: "join_key_proof",
    })
}

fn join_key_statement(node: &PublicKey, join_key: &PublicKey) -> Vec<u8> {
    [JOIN_KEY, node.as_bytes(), join_key.as_bytes()].concat()
}

/// What becomes of a machine whose node was removed from its cluster, when its keys are wiped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRemoval {
    /// It waits for a person.
    Wait,
    /// It destroys its enrolment and its data, and restarts like a new one.
    Reset,
}

impl AfterRemoval {
    /// As requests and records have it: whether it is reset.
    pub fn of(reset: bool) -> Self {
        match reset {
            false => Self::Wait,
            true => Self::Reset,
        }
    }

    /// The same, back.
    pub fn is_reset(self) -> bool {
        self == Self::Reset
    }
}

/// Makes the order to a node to wipe its keys; `ca` is the key of the cluster's CA.
pub fn disown(
    ca: &SigningKey,
    cluster: ClusterId,
    node: NodeId,
    afterwards: AfterRemoval,
) -> DisownOrder {
    let sign = |name| ca.sign(&removal_statement(name, cluster, node)).to_vec();
    DisownOrder {
        cluster_id: cluster.as_bytes().to_vec(),
        node_id: node.to_string(),
        signature: sign(DISOWN),
        reset_signature: match afterwards {
            AfterRemoval::Wait => Vec::new(),
            AfterRemoval::Reset => sign(RESET),
        },
    }
}

/// Verifies that the order is for this node of this cluster and signed by the cluster's CA.
///
/// # Errors
/// Names the field that is wrong.
pub fn check_disown(
    order: &DisownOrder,
    ca: &PublicKey,
    cluster: ClusterId,
    node: NodeId,
) -> Result<AfterRemoval, ProofError> {
    const WHAT: &str = "disown order";
    let other = |field, why: String| ProofError::Field {
        what: WHAT,
        field,
        why,
    };
    if order.cluster_id != cluster.as_bytes() {
        return Err(other(
            "cluster_id",
            format!("expected that of cluster {cluster}"),
        ));
    }
    if order.node_id != node.to_string() {
        return Err(other("node_id", format!("expected {node}")));
    }
    let check = |name, signature: &[u8]| {
        let verified = ca.verify(&removal_statement(name, cluster, node), signature);
        verified.map_err(|_| ProofError::Signature { what: WHAT })
    };
    check(DISOWN, &order.signature)?;
    if order.reset_signature.is_empty() {
        return Ok(AfterRemoval::Wait);
    }
    check(RESET, &order.reset_signature)?;
    Ok(AfterRemoval::Reset)
}

fn removal_statement(name: &[u8], cluster: ClusterId, node: NodeId) -> Vec<u8> {
    let node = node.to_string();
    let mut statement = [name, cluster.as_bytes()].concat();
    push(&mut statement, node.as_bytes());
    statement
}

/// Makes this node's signed address record.
pub fn sign_address(own: &OwnCertificate, host: std::net::IpAddr, counter: u64) -> NodeAddress {
    let mut address = NodeAddress {
        node_id: own.node().to_string(),
        host: host.to_string(),
        counter,
        certificate: own.certificate().to_vec(),
        signature: Vec::new(),
    };
    address.signature = own.key().sign(&address_statement(&address)).to_vec();
    address
}

/// Verifies that a node of the cluster has signed this record about itself. Returns the node and
/// its address.
pub fn check_address(
    address: &NodeAddress,
    trust: &Trust,
    now: UnixTime,
) -> Result<(NodeId, std::net::IpAddr), ProofError> {
    const WHAT: &str = "node address";
    let wrong = |field, why: String| ProofError::Field {
        what: WHAT,
        field,
        why,
    };
    let id: NodeId = address
        .node_id
        .parse()
        .map_err(|error| wrong("node_id", format!("{error}")))?;
    let host: std::net::IpAddr = address
        .host
        .parse()
        .map_err(|error| wrong("host", format!("{error}")))?;
    let certificate = CertificateDer::from(address.certificate.as_slice());
    let peer = trust
        .judge(&[certificate], now)
        .map_err(|source| ProofError::Certificate { what: WHAT, source })?;
    let PeerCertificate::Identified {
        identity,
        public_key,
        ..
    } = peer
    else {
        return Err(wrong("certificate", "not issued by the cluster".into()));
    };
    if identity.subject != crate::identity::Subject::Node(id) {
        return Err(wrong("certificate", format!("expected that of {id}")));
    }
    public_key
        .verify(&address_statement(address), &address.signature)
        .map_err(|_| ProofError::Signature { what: WHAT })?;
    Ok((id, host))
}

fn address_statement(address: &NodeAddress) -> Vec<u8> {
    let mut statement = NODE_ADDRESS.to_vec();
    push(&mut statement, address.node_id.as_bytes());
    push(&mut statement, address.host.as_bytes());
    statement.extend(address.counter.to_le_bytes());
    statement
}

/// Appends a part of variable length. Everything that is signed is smaller than the maximum message
/// size, so the length always fits.
pub(crate) fn push(statement: &mut Vec<u8>, part: &[u8]) {
    let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
    statement.extend(length.to_le_bytes());
    statement.extend(part);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestCluster;
    use crate::tls;

    #[test]
    fn a_join_key_is_proven_for_its_node_only() {
        let (node, other) = (SigningKey::generate().public(), SigningKey::generate());
        let key = JoinKey::generate();
        let proof = prove_join_key(&node, &key);
        assert!(check_join_key(&node, &key.public(), &proof).is_ok());
        assert!(check_join_key(&other.public(), &key.public(), &proof).is_err());
        assert!(check_join_key(&node, &other.public(), &proof).is_err());
        assert!(check_join_key(&node, &key.public(), &[]).is_err());
    }

    #[test]
    fn a_disown_order_is_for_one_node_of_one_cluster() {
        let ca = SigningKey::generate();
        let (cluster, other) = (ClusterId::generate(), ClusterId::generate());
        let (a, b) = (NodeId::from_bytes([1; 16]), NodeId::from_bytes([2; 16]));
        let order = disown(&ca, cluster, a, AfterRemoval::Wait);
        let checked = check_disown(&order, &ca.public(), cluster, a);
        assert_eq!(checked.ok(), Some(AfterRemoval::Wait));
        let reset = disown(&ca, cluster, a, AfterRemoval::Reset);
        let checked = check_disown(&reset, &ca.public(), cluster, a);
        assert_eq!(checked.ok(), Some(AfterRemoval::Reset));
        // Nobody but the CA makes one of the other.
        let forged = DisownOrder {
            reset_signature: order.signature.clone(),
            ..order.clone()
        };
        assert!(check_disown(&forged, &ca.public(), cluster, a).is_err());
        assert!(check_disown(&order, &ca.public(), cluster, b).is_err());
        assert!(check_disown(&order, &ca.public(), other, a).is_err());
        let stranger = SigningKey::generate().public();
        assert!(check_disown(&order, &stranger, cluster, a).is_err());
        // A changed node ID invalidates the signature.
        let renamed = DisownOrder {
            node_id: b.to_string(),
            ..order
        };
        assert!(check_disown(&renamed, &ca.public(), cluster, b).is_err());
    }

    #[test]
    fn an_address_is_its_nodes_own_word() {
        let cluster = TestCluster::new();
        let node = cluster.node();
        let clock = tls::wall_clock();
        let now = tls::now(&clock);
        let own = crate::testing::own(&node);
        let (trust, id) = (Trust::of_node(&own), own.node());
        let host = "192.0.2.7".parse().expect("an address");
        let address = sign_address(&own, host, 3);
        assert_eq!(check_address(&address, &trust, now).ok(), Some((id, host)));
        let forged = [
            NodeAddress {
                host: "192.0.2.8".into(),
                ..address.clone()
            },
            NodeAddress {
                counter: 4,
                ..address.clone()
            },
            NodeAddress {
                certificate: cluster.node().certificate.to_vec(),
                ..address.clone()
            },
            NodeAddress::default(),
        ];
        for forged in forged {
            assert!(check_address(&forged, &trust, now).is_err(), "{forged:?}");
        }
        let stranger = TestCluster::new().node();
        let stranger = Trust::of_node(&crate::testing::own(&stranger));
        assert!(check_address(&address, &stranger, now).is_err());
    }
}
