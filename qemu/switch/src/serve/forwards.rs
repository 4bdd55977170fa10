//! Forwarding of host connections to a machine's TCP ports.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener as StdTcpListener};
use std::rc::Rc;
use std::time::Instant;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::sleep;

use super::links::WayTo;
use super::{ACCEPT_AGAIN, Shared};
use crate::Mac;
use crate::tunnel::{self, Ends, Opener};

/// Maximum number of forwarded connections. Further ones wait for others to end.
pub(super) const MOST: usize = 1024;

/// The machine whose ports they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) port: usize,
    pub(super) mac: Mac,
}

/// Listens on any free port of the host.
pub(super) fn listen() -> io::Result<(TcpListener, SocketAddr)> {
    let listener = StdTcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((TcpListener::from_std(listener)?, address))
}

/// Forwards every connection to a machine's port.
pub(super) async fn serve_forward(
    shared: Rc<Shared>,
    machine: Machine,
    guest: u16,
    listener: TcpListener,
) {
    let mac = machine.mac;
    loop {
        let host = match listener.accept().await {
            Ok((host, _)) => host,
            Err(error) => {
                // There is no notification of free resources.
                tracing::warn!(%mac, guest, %error, "cannot accept a connection of the host");
                sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        // The semaphore is never closed.
        let Ok(place) = shared.places.clone().acquire_owned().await else {
            return;
        };
        shared.spawn(carry(shared.clone(), machine, guest, host, place));
    }
}

async fn carry(
    shared: Rc<Shared>,
    machine: Machine,
    guest: u16,
    host: TcpStream,
    _place: OwnedSemaphorePermit,
) {
    let mac = machine.mac;
    if let Err(error) = host.set_nodelay(true) {
        tracing::debug!(%error, "cannot disable Nagle's algorithm for a connection of the host");
    }
    let opened = {
        let mut gateway = shared.gateway.borrow_mut();
        let address = gateway.dhcp.found_at(mac.0, Instant::now());
        address.and_then(|address| Some((address, gateway.open()?)))
    };
    let Some((address, (port, inbox))) = opened else {
        // There are more ports than slots, and every port's machine has an address.
        tracing::error!(%mac, "no free gateway port for a connection");
        return;
    };
    let ends = Ends {
        from: SocketAddrV4::new(shared.options.gateway, port),
        to: SocketAddrV4::new(address, guest),
        mac: mac.0,
    };
    let way = WayTo::new(&shared.fabric, machine.port);
    let end = tunnel::carry(host, Opener::Host, ends, shared.clock, &inbox, &way).await;
    shared.gateway.borrow_mut().close(port);
    tracing::debug!(from = %ends.from, to = %ends.to, ?end, "connection");
}
