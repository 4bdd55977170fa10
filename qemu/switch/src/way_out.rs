//! The way out: what machines send to other networks is translated to sockets of the host, without privileges.
//!
//! This module decides, for each packet, what is to be done; it does no I/O. `serve::way_out` has the sockets.
//!
//! | a machine sends | the host does |
//! |---|---|
//! | a TCP connection | connects a socket of its own first; the machine's connection is accepted only then, by a stack of its own that takes the remote address for its own (`tunnel`) |
//! | UDP | sends it from a socket for this flow, connected to the remote address, and returns the answers |
//! | an echo request | the same, from an unprivileged ICMP socket, where the host allows those |
//! | DNS over UDP or TCP to the gateway | asks the host's resolvers |
//!
//! # What machines reach
//! Everything that the user who runs this process reaches, by any address that is not excluded below: the networks
//! behind the host, and services of the host that listen on an address other than loopback. This is why the way out is
//! an option, and why tests do without.
//!
//! Never translated: loopback, link-local, multicast, broadcast and reserved addresses ([`Policy`]), and those of the
//! machines' own subnets. The host's loopback is reached only where the options name an address for it
//! ([`WayOut::aliases`]), and by DNS, whose resolvers may be there. The source must be a machine of this network with an
//! address of its subnets: like a router that knows of no networks behind the machines.
//!
//! # What is refused, and what is not answered
//! A connection that the remote host refuses is reset, and so is one beyond the limits: it is never closed in favour of
//! another. What the host cannot reach is answered with the ICMP message of a router, what takes too long with nothing.
//! A UDP flow beyond the limits replaces the one of the same machine that was idle longest; where all machines together
//! have too many, one of the machine that has most. Fragments are not reassembled, and datagrams that do not fit into
//! one packet are dropped in both directions.
//!
//! # Why this design
//! Raw packets would need privileges. One host socket for each flow, connected to its remote address, lets the host's
//! kernel filter what returns and report errors of exactly this flow; a socket for each port of a machine would need
//! both of those here. Debian's passt serves one machine per process, not a switch. Connecting first, and accepting
//! afterwards, gives the machine the truth about who refuses: a proxy that accepts everything breaks clients that try
//! several addresses.
//!
//! IPv6 is translated to IPv6 and IPv4 to IPv4, never one to the other. Where the host has no IPv6, it is refused like
//! any other network that the host does not reach.

pub(super) mod dns;
mod flows;
mod packet;
mod policy;
pub(super) mod proxy;
pub(super) mod resolvers;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::NetworkOptions;
use super::learning::Address;
use super::wire::Inbox;
pub(super) use flows::{Flows, Limits, Quota};
use packet::{Content, Segment};
pub(super) use packet::{Unreachable, datagram, reply, start_of_payload, too_large, unreachable};
pub(super) use policy::Policy;
use proxy::ProxySettings;

/// The port of name servers.
const DNS: u16 = 53;

/// Limits of TCP connections. Each holds two buffers and an inbox.
const CONNECTIONS: Limits = Limits {
    machine: 512,
    total: 1024,
};

/// The options of the way out. The default is that of the host: its resolvers, and the proxy of its environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WayOut {
    /// The resolvers that DNS queries are sent to. None: those of the host's resolv.conf, which is read again when it
    /// has changed.
    pub resolvers: Option<Vec<SocketAddr>>,
    /// The proxy of outgoing TCP connections. None: that of the process's environment.
    pub proxy: Option<ProxySettings>,
    /// Addresses that stand for others, by the address that machines use: the only way to the host's loopback. They are
    /// reached without a proxy.
    pub aliases: BTreeMap<IpAddr, IpAddr>,
}

impl WayOut {
    /// The default, and the loopback address of the host at this one.
    pub fn with_loopback_at(address: Ipv4Addr) -> Self {
        Self {
            aliases: BTreeMap::from([(address.into(), Ipv4Addr::LOCALHOST.into())]),
            ..Self::default()
        }
    }
}

/// What a flow carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Protocol {
    Tcp,
    Udp,
    /// Echo requests and replies.
    Ping,
}

/// Packets that belong together, as the machine sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Flow {
    /// The machine's Ethernet address: machines may have the same address one after the other.
    pub(super) mac: Address,
    pub(super) protocol: Protocol,
    /// The machine's endpoint. For echo requests, the port is their identifier.
    pub(super) machine: SocketAddr,
    /// The remote endpoint. Echo requests have no port there.
    pub(super) remote: SocketAddr,
}

/// Where the host sends what belongs to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// To this address; directly, or through the proxy for it.
    Outside(SocketAddr),
    /// To this address, directly.
    Alias(SocketAddr),
    /// To the resolvers.
    Resolvers,
}

/// What is to be done with a packet.
#[derive(Debug)]
pub(super) enum Verdict {
    /// It is for the gateway itself.
    Ours(Vec<u8>),
    /// Nothing, or it has been done.
    Done,
    /// The frame is a segment of a connection that does not exist: it is answered with a reset.
    Refuse(Vec<u8>),
    /// The host has to do something.
    Outgoing(Outgoing),
}

/// What the host has to do.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// Make a connection. The inbox receives its further segments.
    Connect {
        flow: Flow,
        target: Target,
        syn: Vec<u8>,
        inbox: Rc<Inbox>,
    },
    /// Send a datagram, or a whole ICMP message.
    Send {
        flow: Flow,
        target: SocketAddr,
        payload: Vec<u8>,
    },
    /// Ask the resolvers.
    Query { flow: Flow, message: Vec<u8> },
}

/// Decides about the packets of machines.
pub(super) struct Router {
    policy: Policy,
    /// The gateway's addresses.
    own: [IpAddr; 3],
    connections: Flows<Rc<Inbox>>,
}

impl Router {
    pub(super) fn new(options: &NetworkOptions, way_out: &WayOut) -> Self {
        Self {
            policy: Policy::new(options, way_out),
            own: options.own(),
            connections: Flows::new(CONNECTIONS),
        }
    }

    /// Decides about a frame with an IP packet that was sent to the gateway's Ethernet address.
    pub(super) fn take(&mut self, frame: Vec<u8>) -> Verdict {
        let Some((flow, content)) = packet::parse(&frame) else {
            return Verdict::Ours(frame);
        };
        let is_ours = self.own.contains(&flow.remote.ip());
        let resolves = is_ours && flow.remote.port() == DNS && flow.protocol != Protocol::Ping;
        if is_ours && !resolves {
            return Verdict::Ours(frame);
        }
        if !self.policy.may_send(flow.machine.ip()) {
            return Verdict::Done;
        }
        let target = match resolves {
            true => Some(Target::Resolvers),
            false => self.policy.target(flow.remote),
        };
        let Some(target) = target else {
            return Verdict::Done;
        };
        match (content, target) {
            (Content::Segment(segment), _) => self.segment(flow, target, segment, frame),
            (Content::Payload(message), Target::Resolvers) => {
                let message = message.to_vec();
                Verdict::Outgoing(Outgoing::Query { flow, message })
            }
            (Content::Payload(payload), Target::Outside(target) | Target::Alias(target)) => {
                let payload = payload.to_vec();
                Verdict::Outgoing(Outgoing::Send {
                    flow,
                    target,
                    payload,
                })
            }
        }
    }

    fn segment(&mut self, flow: Flow, target: Target, segment: Segment, frame: Vec<u8>) -> Verdict {
        if let Some(inbox) = self.connections.get(&flow) {
            inbox.put(frame);
            return Verdict::Done;
        }
        match segment {
            // A reset is never answered with another.
            Segment::Reset => Verdict::Done,
            Segment::Other => Verdict::Refuse(frame),
            Segment::Open => {
                let inbox = Rc::<Inbox>::default();
                match self.connections.insert(flow, inbox.clone()) {
                    Ok(()) => Verdict::Outgoing(Outgoing::Connect {
                        flow,
                        target,
                        syn: frame,
                        inbox,
                    }),
                    Err(_) => {
                        tracing::debug!(to = %flow.remote, "too many outgoing connections");
                        Verdict::Refuse(frame)
                    }
                }
            }
        }
    }

    /// A connection has ended.
    pub(super) fn close(&mut self, flow: &Flow) {
        self.connections.remove(flow);
    }

    /// The number of connections.
    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }
}

#[cfg(test)]
mod tests;
