//! Outgoing TCP connections: directly, through a proxy, or to a resolver.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_keepalive;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::super::Shared;
use super::super::links::WayTo;
use super::Sockets;
use crate::Mac;
use crate::tunnel::{self, Ends, Opener};
use crate::way_out::proxy::{self, MAX_HEAD, Proxy};
use crate::way_out::{Flow, Target, start_of_payload};
use crate::wire::{Inbox, refuse};

/// Bound for the remote host to accept: as long as Linux tries. The machine waits as long as its own bound.
const CONNECT: Duration = Duration::from_secs(130);

/// Bound for one of the resolvers to accept, before the next is tried.
const RESOLVER: Duration = Duration::from_secs(3);

/// Makes and carries one connection of a machine.
pub(super) async fn serve(
    shared: Rc<Shared>,
    flow: Flow,
    target: Target,
    syn: Vec<u8>,
    inbox: Rc<Inbox>,
) {
    let connecting = timeout(CONNECT, connect(&shared, target));
    let connected = connecting
        .await
        .unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()));
    match connected {
        Ok(host) => {
            let end = carry(&shared, &flow, host, syn, &inbox).await;
            close(&shared, &flow);
            tracing::debug!(from = %flow.machine, to = %flow.remote, ?end, "outgoing connection");
        }
        Err(error) => {
            tracing::debug!(from = %flow.machine, to = %flow.remote, %error, "cannot connect");
            close(&shared, &flow);
            answer(&shared, &flow, syn, &error);
        }
    }
}

fn close(shared: &Shared, flow: &Flow) {
    if let Some(router) = &mut shared.gateway.borrow_mut().router {
        router.close(flow);
    }
}

async fn carry(
    shared: &Shared,
    flow: &Flow,
    host: TcpStream,
    syn: Vec<u8>,
    inbox: &Inbox,
) -> Option<tunnel::End> {
    let machine = shared.machine(Mac(flow.mac))?;
    if let Err(error) = host.set_nodelay(true) {
        tracing::debug!(%error, "cannot disable Nagle's algorithm for an outgoing connection");
    }
    // So that the end of a remote host that is gone is noticed.
    if let Err(error) = set_socket_keepalive(&host, true) {
        tracing::debug!(%error, "cannot enable keep-alive for an outgoing connection");
    }
    // The machine has repeated its request, and nothing else.
    inbox.clear();
    let ends = Ends {
        from: flow.remote,
        to: flow.machine,
    };
    let way = WayTo::new(shared, machine);
    let opener = Opener::Machine(syn);
    Some(tunnel::carry(host, opener, ends, shared.clock, inbox, &way).await)
}

/// Tells the machine why there is no connection, as the remote host or a router would. What takes too long is answered
/// with nothing.
fn answer(shared: &Shared, flow: &Flow, syn: Vec<u8>, error: &io::Error) {
    let refused = matches!(
        error.kind(),
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof
    );
    if !refused {
        // Ports and sequence number.
        return super::report(shared, flow, error, start_of_payload(&syn));
    }
    for frame in refuse(syn, shared.clock.at(Instant::now())) {
        super::deliver(shared, flow, &frame);
    }
}

async fn connect(shared: &Shared, target: Target) -> io::Result<TcpStream> {
    let Some(sockets) = &shared.sockets else {
        return Err(ErrorKind::Unsupported.into());
    };
    match target {
        Target::Alias(address) => TcpStream::connect(address).await,
        Target::Resolvers => connect_to_resolver(sockets).await,
        Target::Outside(address) => match sockets.proxies.to(address) {
            None => TcpStream::connect(address).await,
            Some(proxy) => connect_through(sockets, proxy, address).await,
        },
    }
}

async fn connect_to_resolver(sockets: &Sockets) -> io::Result<TcpStream> {
    let servers = sockets.resolvers.borrow_mut().present();
    let mut last = ErrorKind::ConnectionRefused.into();
    for server in servers {
        match timeout(RESOLVER, TcpStream::connect(server)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

async fn connect_through(
    sockets: &Sockets,
    proxy: &Proxy,
    destination: SocketAddr,
) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect((proxy.host.as_str(), proxy.port)).await?;
    let request = proxy::request(proxy, destination);
    stream.write_all(request.as_bytes()).await?;
    let head = read_head(&mut stream).await?;
    if let Err(error) = proxy::verdict(&head) {
        if !sockets.proxy_refused.replace(true) {
            tracing::warn!(?proxy, %destination, %error, "the proxy makes no connection");
        }
        return Err(io::Error::new(ErrorKind::ConnectionRefused, error));
    }
    Ok(stream)
}

/// Reads byte by byte, because what follows the head belongs to the machine.
async fn read_head(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while head.len() < MAX_HEAD && !proxy::is_complete(&head) {
        head.push(stream.read_u8().await?);
    }
    Ok(head)
}
