//! The host's sockets of the way out: what the router has decided ([`crate::way_out`]) is done here.

mod connections;
mod datagrams;
mod names;

use std::cell::{Cell, RefCell};
use std::env;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::time::Instant;

use rustix::io::Errno;

use super::Shared;
use crate::Mac;
use crate::way_out::proxy::{Proxies, ProxySettings};
use crate::way_out::resolvers::Resolvers;
use crate::way_out::{Flow, Flows, Limits, Outgoing, Quota, Unreachable, WayOut, unreachable};
use datagrams::Session;

/// Limits of flows of UDP and echo requests. Each has a socket and a small buffer.
const FLOWS: Limits = Limits {
    machine: 256,
    total: 1024,
};

/// Limits of DNS queries that have not been answered.
const QUERIES: Limits = Limits {
    machine: 64,
    total: 256,
};

/// What the sockets of the way out have in common.
pub(super) struct Sockets {
    proxies: Proxies,
    resolvers: RefCell<Resolvers>,
    sessions: RefCell<Flows<Rc<Session>>>,
    queries: RefCell<Quota>,
    /// The host allows no ICMP sockets, which the log says once.
    no_pings: Cell<bool>,
    /// The host does not reach IPv6 networks, which the log says once.
    no_ipv6: Cell<bool>,
    /// The proxy has refused a connection, which the log says once.
    proxy_refused: Cell<bool>,
}

impl Sockets {
    pub(super) fn new(options: &WayOut) -> Self {
        let of_environment = || ProxySettings::of(|name| env::var(name).ok());
        let settings = options.proxy.clone().unwrap_or_else(of_environment);
        let (proxies, wrong) = Proxies::new(&settings);
        for (name, error) in wrong {
            tracing::warn!(name, %error, "cannot use a proxy: connections are made without it");
        }
        if !proxies.is_empty() {
            tracing::info!(?proxies, "outgoing connections are made through proxies");
        }
        Self {
            proxies,
            resolvers: RefCell::new(Resolvers::new(options.resolvers.clone())),
            sessions: RefCell::new(Flows::new(FLOWS)),
            queries: RefCell::new(Quota::new(QUERIES)),
            no_pings: Cell::new(false),
            no_ipv6: Cell::new(false),
            proxy_refused: Cell::new(false),
        }
    }

    /// The number of flows of UDP and of echo requests.
    pub(super) fn flows(&self) -> usize {
        self.sessions.borrow().len()
    }
}

/// Does what the router has decided. Never waits: what takes time is a task of its own.
pub(super) fn act(shared: &Rc<Shared>, outgoing: Outgoing) {
    match outgoing {
        Outgoing::Connect {
            flow,
            target,
            syn,
            inbox,
        } => shared.spawn(connections::serve(shared.clone(), flow, target, syn, inbox)),
        Outgoing::Send {
            flow,
            target,
            payload,
        } => datagrams::send(shared, flow, target, &payload),
        Outgoing::Query { flow, message } => names::ask(shared, flow, message),
    }
}

/// Sends a frame to the machine of a flow. Dropped if the machine does not read its frames.
fn deliver(shared: &Shared, flow: &Flow, frame: &[u8]) {
    let Some(machine) = shared.machine(Mac(flow.mac)) else {
        return;
    };
    let mut fabric = shared.fabric.borrow_mut();
    if fabric.has_room(machine.port) {
        fabric.take_from_gateway(frame, Instant::now());
    }
}

/// The address from which a socket reaches this one: any, and a free port.
fn any_for(target: SocketAddr) -> SocketAddr {
    let address: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    SocketAddr::new(address, 0)
}

/// What the gateway tells the machine when a flow's packets do not arrive. `start` as in [`unreachable()`].
fn report(shared: &Shared, flow: &Flow, error: &io::Error, start: Option<[u8; 8]>) {
    let Some(why) = reason(flow, error) else {
        return;
    };
    if why == Unreachable::Network && flow.remote.is_ipv6() {
        warn_of_ipv6(shared);
    }
    let router = shared.options.gateway_for(flow.machine.ip());
    if let Some(frame) = unreachable(flow, router, why, start) {
        deliver(shared, flow, &frame);
    }
}

/// Says once that the host has no IPv6.
fn warn_of_ipv6(shared: &Shared) {
    let sockets = shared.sockets.as_ref();
    if sockets.is_some_and(|sockets| !sockets.no_ipv6.replace(true)) {
        tracing::warn!(
            "this host has no route to IPv6 networks: what machines send there is refused as unreachable"
        );
    }
}

/// What a router would tell of this error; nothing about what only concerns this process.
fn reason(flow: &Flow, error: &io::Error) -> Option<Unreachable> {
    match error.kind() {
        ErrorKind::NetworkUnreachable => Some(Unreachable::Network),
        // A host without an IPv6 address, and a kernel without IPv6. With IPv4, it is ports that are missing.
        ErrorKind::AddrNotAvailable if flow.remote.is_ipv6() => Some(Unreachable::Network),
        _ if Errno::from_io_error(error) == Some(Errno::AFNOSUPPORT) => Some(Unreachable::Network),
        ErrorKind::HostUnreachable | ErrorKind::NetworkDown => Some(Unreachable::Host),
        ErrorKind::ConnectionRefused => Some(Unreachable::Port),
        ErrorKind::PermissionDenied => Some(Unreachable::Prohibited),
        _ => None,
    }
}
