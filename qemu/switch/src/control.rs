//! What can be asked of a network's process: a line of JSON, answered by one.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::{
    NetworkStatus, Port,
    faults::{BadFaults, Faults},
};
use crate::Mac;

/// Longer lines are no requests.
pub(super) const MAX_REQUEST: usize = 64 << 10;

/// Longer lines are no answers: the status of a thousand ports.
pub(super) const MAX_ANSWER: usize = 4 << 20;

/// A question or an order.
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

/// What comes back.
pub(super) type Answer = Result<Reply, Refusal>;

/// What comes back if it was done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Done,
    Port(Port),
    Forwarded(SocketAddr),
    Status(Box<NetworkStatus>),
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// It was not understood.
    #[error("the request is not understood: {0}")]
    Request(String),
    /// A port cannot be named so.
    #[error("port {0:?}: wanted a name of 1 to 32 of a-z, 0-9 and '-'")]
    Name(String),
    /// There is no such port.
    #[error("there is no port {0:?}")]
    NoPort(String),
    /// There is such a port already, for another machine.
    #[error("port {name:?} is that of {mac}")]
    PortTaken {
        /// The port.
        name: String,
        /// Its machine's Ethernet address.
        mac: Mac,
    },
    /// Another port's machine has that Ethernet address.
    #[error("{mac} is the Ethernet address of port {owner:?}")]
    MacTaken {
        /// The address.
        mac: Mac,
        /// Whose it is.
        owner: String,
    },
    /// An Ethernet address that no machine may have.
    #[error("{0} cannot be a machine's Ethernet address")]
    BadMac(Mac),
    /// Another port's machine has that address.
    #[error("{address} is the address of port {owner:?}")]
    AddressTaken {
        /// The address.
        address: Ipv4Addr,
        /// Whose it is.
        owner: String,
    },
    /// An address that no machine of this network can have.
    #[error("{address}: wanted an address of a host in {gateway}/{prefix}, other than that")]
    BadAddress {
        /// The address.
        address: Ipv4Addr,
        /// The gateway's.
        gateway: Ipv4Addr,
        /// Length of the subnet's prefix.
        prefix: u8,
    },
    /// Faults that cannot be.
    #[error(transparent)]
    Faults(#[from] BadFaults),
    /// A port cannot be kept from itself, nor be in two groups.
    #[error("port {0:?} cannot be blocked from itself")]
    Itself(String),
    /// There is no TCP port 0.
    #[error("port 0 of {0:?} cannot be forwarded")]
    GuestPort(String),
    /// The system did not do it.
    #[error("cannot {step}: {source_text}")]
    System {
        /// What failed.
        step: String,
        /// What the system said.
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
