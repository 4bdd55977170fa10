//! Forwarding of host connections to a machine's TCP ports.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener as StdTcpListener};
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{sleep, timeout};

use super::links::WayTo;
use super::{ACCEPT_AGAIN, Machine, Shared};
use crate::tunnel::{self, Ends, Opener};

/// Maximum number of forwarded connections. Further ones wait for others to end.
pub(super) const MOST: usize = 1024;

/// How long a connection waits for the holder of a shared address.
const HOLDER_ANSWERS: Duration = Duration::from_secs(5);

/// Whose ports they are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Machine(Machine),
    /// The machine that has this address at the time.
    Shared(Ipv4Addr),
}

impl Target {
    /// The address by which it is reached, and the way to it.
    async fn find(self, shared: &Shared) -> Option<(Ipv4Addr, WayTo<'_>)> {
        match self {
            Self::Machine(machine) => {
                let gateway = shared.gateway.borrow();
                let address = gateway.dhcp.found_at(machine.mac.0, Instant::now())?;
                Some((address, WayTo::new(shared, machine)))
            }
            Self::Shared(address) => {
                let heard = shared.gateway.borrow_mut().share(address);
                if shared.holder(address).is_none() {
                    let answer = heard.notified();
                    let question = shared.gateway.borrow().ask(address);
                    let now = Instant::now();
                    shared.fabric.borrow_mut().take_from_gateway(&question, now);
                    timeout(HOLDER_ANSWERS, answer).await.ok()?;
                }
                let way = WayTo::holder_of(shared, address, shared.holder(address)?);
                Some((address, way))
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
    let Some((address, way)) = target.find(&shared).await else {
        // Every port's machine has an address, but a shared one may be at none.
        tracing::debug!(?target, "no machine for a connection");
        return;
    };
    let opened = shared.gateway.borrow_mut().open();
    let Some((port, inbox)) = opened else {
        // There are more ports than slots.
        tracing::error!(?target, "no free gateway port for a connection");
        return;
    };
    let ends = Ends {
        from: SocketAddr::new(shared.options.gateway.into(), port),
        to: SocketAddr::new(address.into(), guest),
    };
    let end = tunnel::carry(host, Opener::Host, ends, shared.clock, &inbox, &way).await;
    shared.gateway.borrow_mut().close(port);
    tracing::debug!(from = %ends.from, to = %ends.to, ?end, "connection");
}
