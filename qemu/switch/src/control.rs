//! The control protocol of a network's process: a line of JSON, answered by one.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::faults::{BadFaults, Faults};
use super::{NetworkStatus, Port};
use crate::Mac;

/// Longer lines are rejected.
pub(super) const MAX_REQUEST: usize = 64 << 10;

/// Longer lines are not answers; the status of a thousand ports fits.
pub(super) const MAX_ANSWER: usize = 4 << 20;

/// A query or an order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(super) enum Request {
    AddPort {
        name: String,
        mac: Mac,
        address: Ipv4Addr,
    },
    Forward {
        name: String,
        guest: u16,
    },
    ForwardShared {
        address: Ipv4Addr,
        guest: u16,
    },
    SetFaults {
        name: String,
        faults: Faults,
    },
    Block {
        a: String,
        b: String,
        on: bool,
    },
    Part {
        groups: Vec<Vec<String>>,
    },
    SetAddress {
        name: String,
        address: Ipv4Addr,
    },
    SetDhcp {
        name: String,
        on: bool,
    },
    Status,
    Stop,
}

/// The answer to a request.
pub(super) type Answer = Result<Reply, Refusal>;

/// The answer to a successful request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Done,
    Port(Port),
    PortForward(SocketAddr),
    Status(Box<NetworkStatus>),
}

/// Why a request was rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// It is malformed.
    #[error("cannot parse the request: {0}")]
    Request(String),
    /// The name of a port is invalid.
    #[error("port {0:?}: expected a name of 1 to 32 of a-z, 0-9 and '-'")]
    Name(String),
    /// There is no such port.
    #[error("no port {0:?}")]
    NoPort(String),
    /// The port exists, for another machine.
    #[error("port {name:?} exists with Ethernet address {mac}")]
    PortTaken {
        /// Name of the port.
        name: String,
        /// Its machine's Ethernet address.
        mac: Mac,
    },
    /// Another port's machine has this Ethernet address.
    #[error("Ethernet address {mac} is in use by port {owner:?}")]
    MacTaken {
        /// The Ethernet address.
        mac: Mac,
        /// Name of the port that has it.
        owner: String,
    },
    /// The Ethernet address cannot be that of a machine.
    #[error("expected a unicast Ethernet address other than the gateway's, got {0}")]
    BadMac(Mac),
    /// Another port's machine has this address.
    #[error("address {address} is in use by port {owner:?}")]
    AddressTaken {
        /// The address.
        address: Ipv4Addr,
        /// Name of the port that has it.
        owner: String,
    },
    /// The address cannot be that of a machine in this network.
    #[error(
        "expected a host address in {gateway}/{prefix} other than the gateway's, got {address}"
    )]
    BadAddress {
        /// Address of the gateway.
        address: Ipv4Addr,
        /// Address of the gateway.
        gateway: Ipv4Addr,
        /// Length of the subnet's prefix.
        prefix: u8,
    },
    /// The faults are invalid.
    #[error(transparent)]
    Faults(#[from] BadFaults),
    /// A port cannot be blocked from itself, or be in two groups.
    #[error("port {0:?} cannot be blocked from itself")]
    Itself(String),
    /// TCP port 0 does not exist.
    #[error("cannot forward port 0 of {0:?}")]
    GuestPort(String),
    /// A system call failed.
    #[error("cannot {step}: {source_text}")]
    System {
        /// The step that failed.
        step: String,
        /// The underlying error, as text.
        source_text: String,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_and_answers_are_read_back() {
        for request in [
            Request::AddPort {
                name: "node-0".to_owned(),
                mac: Mac::of_machine(1),
                address: Ipv4Addr::new(10, 98, 0, 10),
            },
            Request::SetFaults {
                name: "node-0".to_owned(),
                faults: Faults {
                    loss: 0.25,
                    mtu: Some(1400),
                    ..Faults::default()
                },
            },
            Request::Part {
                groups: vec![vec!["node-0".to_owned()], Vec::new()],
            },
            Request::Stop,
        ] {
            let line = serde_json::to_string(&request).expect("JSON");
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(
                serde_json::from_str::<Request>(&line).expect("read"),
                request
            );
        }
        let refusal = Refusal::NoPort("node-9".to_owned());
        for answer in [Ok(Reply::Done), Err(refusal)] {
            let line = serde_json::to_string(&answer).expect("JSON");
            assert_eq!(serde_json::from_str::<Answer>(&line).expect("read"), answer);
        }
    }

    proptest! {
        #[test]
        fn any_line_is_read(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = serde_json::from_slice::<Request>(&line);
            let _ = serde_json::from_slice::<Answer>(&line);
        }
    }
}
