//! Forwarding of host connections to a machine's TCP ports.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener as StdTcpListener};
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{sleep, timeout};

use super::links::WayTo;
use super::{ACCEPT_AGAIN, Shared};
use crate::Mac;
use crate::tunnel::{self, Ends, Opener};

/// Maximum number of forwarded connections. Further ones wait for others to end.
pub(super) const MOST: usize = 1024;

/// How long a connection waits for the holder of a shared address.
const HOLDER_ANSWERS: Duration = Duration::from_secs(5);

/// A port of the switch, and its machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) port: usize,
    pub(super) mac: Mac,
}

/// Whose ports they are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Machine(Machine),
    /// The machine that has this address at the time.
    Shared(Ipv4Addr),
}

impl Target {
    /// The machine, and the address by which it is reached.
    async fn find(self, shared: &Shared) -> Option<(Machine, Ipv4Addr)> {
        match self {
            Self::Machine(machine) => {
                let gateway = shared.gateway.borrow();
                let address = gateway.dhcp.found_at(machine.mac.0, Instant::now())?;
                Some((machine, address))
            }
            Self::Shared(address) => {
                let heard = shared.gateway.borrow_mut().share(address);
                let holder = shared.gateway.borrow().holder(address);
                let mac = match holder {
                    Some(mac) => mac,
                    None => {
                        let answer = heard.notified();
                        let question = shared.gateway.borrow().ask(address);
                        let now = Instant::now();
                        shared.fabric.borrow_mut().take_from_gateway(&question, now);
                        timeout(HOLDER_ANSWERS, answer).await.ok()?;
                        shared.gateway.borrow().holder(address)?
                    }
                };
                let mac = Mac(mac);
                let port = shared.port_of(mac)?;
                Some((Machine { port, mac }, address))
            }
        }
    }
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
    target: Target,
    guest: u16,
    listener: TcpListener,
) {
    loop {
        let host = match listener.accept().await {
            Ok((host, _)) => host,
            Err(error) => {
                // There is no notification of free resources.
                tracing::warn!(?target, guest, %error, "cannot accept a connection of the host");
                sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        // The semaphore is never closed.
        let Ok(place) = shared.places.clone().acquire_owned().await else {
            return;
        };
        shared.spawn(carry(shared.clone(), target, guest, host, place));
    }
}

async fn carry(
    shared: Rc<Shared>,
    target: Target,
    guest: u16,
    host: TcpStream,
    _place: OwnedSemaphorePermit,
) {
    if let Err(error) = host.set_nodelay(true) {
        tracing::debug!(%error, "cannot disable Nagle's algorithm for a connection of the host");
    }
    let Some((machine, address)) = target.find(&shared).await else {
        // Every port's machine has an address, but a shared one may be at none.
        tracing::debug!(?target, "no machine for a connection");
        return;
    };
    let mac = machine.mac;
    let opened = shared.gateway.borrow_mut().open();
    let Some((port, inbox)) = opened else {
        // There are more ports than slots.
        tracing::error!(%mac, "no free gateway port for a connection");
        return;
    };
    let ends = Ends {
        from: SocketAddr::new(shared.options.gateway.into(), port),
        to: SocketAddr::new(address.into(), guest),
        mac: mac.0,
    };
    let way = WayTo::new(&shared.fabric, machine.port);
    let end = tunnel::carry(host, Opener::Host, ends, shared.clock, &inbox, &way).await;
    shared.gateway.borrow_mut().close(port);
    tracing::debug!(from = %ends.from, to = %ends.to, ?end, "connection");
}
