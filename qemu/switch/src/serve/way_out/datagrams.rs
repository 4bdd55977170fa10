//! Flows of UDP and of echo requests: one connected socket for each.
//!
//! An ICMP socket is used like one of UDP: the kernel gives it an identifier of its own, as it gives the other a port.

use std::cell::Cell;
use std::io;
use std::net::{SocketAddr, UdpSocket as StdUdpSocket};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, socket_with};
use tokio::net::UdpSocket;
use tokio::sync::Notify;
use tokio::time::sleep_until;

use super::super::Shared;
use super::Sockets;
use crate::way_out::{Flow, Protocol, reply, too_large};

/// The time after which a flow of UDP ends that carries nothing: the minimum for address translation (RFC 4787, REQ-5).
const UDP_IDLE: Duration = Duration::from_secs(120);

/// The same for echo requests (RFC 5508, REQ-1).
const PING_IDLE: Duration = Duration::from_secs(60);

/// Larger than any packet of this network, so that what is too large shows.
const BUFFER: usize = 2048;

/// A flow's socket.
pub(super) struct Session {
    socket: UdpSocket,
    /// When it last carried something.
    used: Cell<Instant>,
    /// Another flow has taken its place.
    evicted: Notify,
}

/// A flow has no socket.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error("this host allows no unprivileged ICMP sockets")]
    NoPings,
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Sends what a machine has sent. The first datagram of a flow opens its socket.
pub(super) fn send(shared: &Rc<Shared>, flow: Flow, target: SocketAddr, payload: &[u8]) {
    let Some(sockets) = &shared.sockets else {
        return;
    };
    let known = sockets.sessions.borrow_mut().get(&flow).cloned();
    let session = match known.map_or_else(|| open(shared, sockets, flow, target), Ok) {
        Ok(session) => session,
        Err(OpenError::NoPings) => return warn_of_pings(sockets),
        Err(OpenError::System(error)) => {
            if super::reason(&flow, &error).is_none() {
                tracing::warn!(to = %flow.remote, %error, "cannot open a socket for a machine");
            }
            return report(shared, &flow, &error);
        }
    };
    session.used.set(Instant::now());
    // An error is that of an earlier datagram, and has kept this one from being sent.
    for _ in 0..2 {
        match rustix::net::send(&session.socket, payload, SendFlags::DONTWAIT) {
            Ok(_) => return,
            // The host's queue is full, or this does not fit into the host's network.
            Err(Errno::AGAIN | Errno::MSGSIZE) => return,
            Err(error) => report(shared, &flow, &error.into()),
        }
    }
}

fn open(
    shared: &Rc<Shared>,
    sockets: &Sockets,
    flow: Flow,
    target: SocketAddr,
) -> Result<Rc<Session>, OpenError> {
    let socket = match flow.protocol {
        Protocol::Ping => icmp_socket(target)?,
        Protocol::Udp | Protocol::Tcp => udp_socket(target)?,
    };
    rustix::net::connect(&socket, &target).map_err(io::Error::from)?;
    let session = Rc::new(Session {
        socket: UdpSocket::from_std(socket)?,
        used: Cell::new(Instant::now()),
        evicted: Notify::new(),
    });
    let mut sessions = sockets.sessions.borrow_mut();
    if let Err(session) = sessions.insert(flow, session.clone()) {
        if let Some(evicted) = sessions.evict_for(flow.mac) {
            evicted.evicted.notify_one();
        }
        // There is room now.
        let _ = sessions.insert(flow, session);
    }
    shared.spawn(receive(shared.clone(), flow, session.clone()));
    Ok(session)
}

fn udp_socket(target: SocketAddr) -> io::Result<StdUdpSocket> {
    let socket = StdUdpSocket::bind(super::any_for(target))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn icmp_socket(target: SocketAddr) -> Result<StdUdpSocket, OpenError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, protocol) = match target {
        SocketAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
        SocketAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
    };
    match socket_with(family, SocketType::DGRAM, flags, Some(protocol)) {
        Ok(socket) => Ok(socket.into()),
        Err(Errno::ACCESS | Errno::PERM) => Err(OpenError::NoPings),
        Err(error) => Err(OpenError::System(error.into())),
    }
}

/// Passes to the machine what its flow receives, until that is idle for too long.
async fn receive(shared: Rc<Shared>, flow: Flow, session: Rc<Session>) {
    let idle = match flow.protocol {
        Protocol::Ping => PING_IDLE,
        Protocol::Udp | Protocol::Tcp => UDP_IDLE,
    };
    let mut buffer = vec![0; BUFFER];
    loop {
        let end = session.used.get() + idle;
        tokio::select! {
            () = session.evicted.notified() => break,
            () = sleep_until(end.into()) => {
                if session.used.get() + idle <= Instant::now() {
                    break;
                }
            }
            received = session.socket.recv(&mut buffer) => match received {
                Ok(length) => {
                    session.used.set(Instant::now());
                    pass_on(&shared, &flow, &buffer[..length]);
                }
                Err(error) => report(&shared, &flow, &error),
            }
        }
    }
    if let Some(sockets) = &shared.sockets {
        let mut sessions = sockets.sessions.borrow_mut();
        sessions.remove_if(&flow, |other| Rc::ptr_eq(other, &session));
    }
}

fn pass_on(shared: &Shared, flow: &Flow, payload: &[u8]) {
    match reply(flow, payload) {
        Some(frame) => super::deliver(shared, flow, &frame),
        None => {
            let too_large = too_large(flow, payload);
            tracing::debug!(from = %flow.remote, to = %flow.machine, too_large, "dropped a datagram");
        }
    }
}

/// Says once that echo requests are not translated.
fn warn_of_pings(sockets: &Sockets) {
    if !sockets.no_pings.replace(true) {
        tracing::warn!(
            "this host allows no unprivileged ICMP sockets (sysctl net.ipv4.ping_group_range): echo requests of machines \
             to other networks are not answered"
        );
    }
}

/// Tells the machine what a router would.
fn report(shared: &Shared, flow: &Flow, error: &io::Error) {
    tracing::debug!(from = %flow.machine, to = %flow.remote, %error, "a datagram does not arrive");
    super::report(shared, flow, error, None);
}
