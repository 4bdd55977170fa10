//! A local TCP load balancer for the API servers: 127.0.0.1:[`PORT_KUBERNETES_BALANCER`].
//!
//! Kubernetes programs have the address of one API server, which they read once. In a Hearth
//! cluster controllers are added and removed, and nodes change their addresses. So the programs of
//! the node connect to the balancer, which forwards each connection to a server that is ready: the
//! node's own, if it is a controller (it is the closest, and the only one that a controller without
//! network can reach), and otherwise the others in turn (round robin).
//!
//! It forwards bytes and does not terminate TLS: clients verify the certificate of the API server,
//! so a machine that takes over its address cannot impersonate it.
//!
//! Readiness is determined by probing each server periodically ([`readiness`]), not only by
//! connecting: the kernel accepts connections for a server that hangs, and a server that has lost
//! etcd reports this when it is probed. Connections to a server that does not answer any more are
//! closed if another server is ready: clients would wait for up to a minute.
//!
//! While no server is ready, connections are held for up to [`Timing::hold`] until one is. A
//! starting server accepts connections long before it can answer, and requests at that time slow
//! down its start; clients that are refused retry, and connect late once a server is ready. After
//! that time a connection is forwarded to any server that accepts it: probes only affect when and
//! in which order servers are tried, so if the probes are wrong about all servers, each is still
//! tried.
//!
//! Limits: [`MAX_CONNECTIONS`] connections at a time; further ones wait in the kernel's queue. A
//! server that does not accept a connection costs [`Timing::connect`]; a machine that has gone down
//! is detected by TCP keepalive and by data that is not acknowledged.

mod readiness;
mod table;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use hearth_agent::{PeerAddresses, PeerResolver, View};
use hearth_api::names::{PORT_KUBERNETES, PORT_KUBERNETES_BALANCER};
use hearth_base::event::{self, Value, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome, SpawnError};
use hearth_host::handover::MemberData;
use nix::sys::socket::{setsockopt, sockopt};
use rustls::ClientConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::Worker;
use readiness::{Probe, ProbeError, Probes, Readyz};
use table::Table;

/// Maximum number of connections at a time. A node has some tens.
const MAX_CONNECTIONS: usize = 512;
/// TCP keepalive: idle time, interval of probes, and number of probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 3;
/// `TCP_USER_TIMEOUT`: time within which sent data has to be acknowledged.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(20);

/// Intervals and timeouts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// Interval between two probes of a server.
    pub every: Duration,
    /// The same, while no server is ready.
    pub probe_every_unready: Duration,
    /// Timeout of a probe: TLS on an emulated processor takes seconds.
    pub answer: Duration,
    /// Timeout of a connection to a server.
    pub connect: Duration,
    /// How long a connection waits until a server is ready. Most clients time out after ten
    /// seconds.
    pub hold: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(5),
            probe_every_unready: Duration::from_secs(2),
            answer: Duration::from_secs(10),
            connect: Duration::from_secs(3),
            hold: Duration::from_secs(8),
        }
    }
}

/// The current API servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Servers {
    /// The server on this node, if it is a controller.
    pub own: Option<SocketAddr>,
    /// All other servers; `own` may be among them.
    pub others: Vec<SocketAddr>,
}

impl Servers {
    /// The servers whose addresses are known.
    pub(crate) fn of(known: &PeerResolver) -> Self {
        let addresses = known.addresses();
        let controllers = known.view.iter().flat_map(|view| &view.nodes);
        let controllers = controllers.filter(|(id, node)| {
            let is_controller = node.roles.kubernetes_controller.is_some();
            is_controller && known.view.as_ref().is_some_and(|view| view.has(id))
        });
        let mut servers = Self::default();
        for (id, _) in controllers {
            let Some(address) = addresses.get(id) else {
                continue;
            };
            let server = SocketAddr::new(*address, PORT_KUBERNETES);
            if *id == known.own {
                servers.own = Some(server);
            } else {
                servers.others.push(server);
            }
        }
        servers
    }
}

/// Configuration, inputs and outputs of the balancer.
pub(crate) struct Balancer<F> {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// Makes the readiness probes.
    pub probes: F,
    /// Intervals and timeouts.
    pub timing: Timing,
    /// Input: the API servers.
    pub servers: Value<Servers>,
    /// Output: how many of them are ready.
    pub ready: Writer<usize>,
}

/// The address that the balancer listens on.
pub(crate) fn address() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, PORT_KUBERNETES_BALANCER))
}

/// The URL of the API servers for the programs of this node.
pub(crate) fn url() -> String {
    format!("https://{}", address())
}

/// Starts the balancer, and the runnable that tracks the servers, as children of a worker that is
/// not healthy yet. `tls` is for the probes. Returns how many servers are ready.
pub(crate) fn start(
    ctx: &Context,
    parts: &Worker,
    member: &MemberData,
    tls: Value<Arc<ClientConfig>>,
) -> Result<Value<usize>, SpawnError> {
    let (servers_writer, servers) = event::value();
    let (ready_writer, ready) = event::value();
    let following = Arc::new(Following {
        known: PeerResolver {
            own: member.own.node(),
            own_address: parts.address.get(),
            saved: member.directory.clone(),
            learned: parts.learned.get().unwrap_or_default(),
            view: parts.view.get(),
        },
        view: parts.view.clone(),
        learned: parts.learned.clone(),
        address: parts.address.clone(),
        servers: servers_writer,
    });
    ctx.run("servers", move |ctx| follow(ctx, following.clone()))?;
    let balancer = Arc::new(Balancer {
        listen: address(),
        probes: Readyz { tls },
        timing: Timing::default(),
        servers,
        ready: ready_writer,
    });
    ctx.run("balancer", move |ctx| run(ctx, balancer.clone()))?;
    Ok(ready)
}

/// Runs the balancer until it is cancelled.
pub(crate) async fn run<F: Probes>(ctx: Context, balancer: Arc<Balancer<F>>) -> Outcome {
    let listener = TcpListener::bind(balancer.listen).await;
    let listener = listener
        .map_err(|error| Failure::msg(format!("cannot listen on {}: {error}", balancer.listen)))?;
    let shared = Arc::new(Shared {
        table: Mutex::default(),
        timing: balancer.timing,
        better: Notify::new(),
    });
    ctx.healthy();
    tokio::select! {
        outcome = accept(listener, &shared) => outcome,
        outcome = watch(&balancer, &shared) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

struct Shared {
    table: Mutex<Table>,
    timing: Timing,
    /// Notified when a server becomes ready, or when the servers change.
    better: Notify,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // No code that holds the lock panics in the middle of a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches the list of servers, and probes each of them periodically. Returns only on an error.
async fn watch<F: Probes>(balancer: &Balancer<F>, shared: &Shared) -> Outcome {
    let mut servers = balancer.servers.watch();
    let mut asked: Vec<SocketAddr> = Vec::new();
    let mut answers = FuturesUnordered::new();
    loop {
        let (address, probe, answer) = tokio::select! {
            servers = servers.next() => {
                let Servers { own, others } = servers?;
                shared.table().set(own, &others);
                for address in shared.table().addresses() {
                    if !asked.contains(&address) {
                        tracing::info!(%address, "API server added");
                        asked.push(address);
                        let probe = balancer.probes.probe(address);
                        answers.push(ask(balancer.timing, address, probe, Duration::ZERO));
                    }
                }
                shared.better.notify_waiters();
                tell(balancer, shared);
                continue;
            }
            Some(answer) = answers.next() => answer,
        };
        if !shared.table().addresses().contains(&address) {
            tracing::info!(%address, "API server removed");
            asked.retain(|asked| *asked != address);
            continue;
        }
        let news = match &answer {
            Ok(()) => shared.table().answers(address),
            Err(_) => shared.table().fails(address),
        };
        match answer {
            Ok(()) if news => {
                tracing::info!(%address, "API server is ready");
                shared.better.notify_waiters();
            }
            Err(why) if news => tracing::warn!(%address, "API server is not ready: {why}"),
            _ => {}
        }
        let after = match shared.table().answering() {
            0 => balancer.timing.probe_every_unready,
            _ => balancer.timing.every,
        };
        answers.push(ask(balancer.timing, address, probe, after));
        tell(balancer, shared);
    }
}

/// Probes one server after a delay, and returns the probe for the next time.
async fn ask<P: Probe>(
    timing: Timing,
    address: SocketAddr,
    mut probe: P,
    after: Duration,
) -> (SocketAddr, P, Result<(), ProbeError>) {
    sleep(after).await;
    let answer = timeout(timing.answer, probe.ready()).await;
    let late = |_| Err(ProbeError::Late(timing.answer));
    let answer = answer.unwrap_or_else(late);
    (address, probe, answer)
}

fn tell<F>(balancer: &Balancer<F>, shared: &Shared) {
    let ready = shared.table().answering();
    if balancer.ready.value().get() != Some(ready) {
        balancer.ready.set(ready);
    }
}

/// Accepts connections. Returns only on an error; then all connections are closed.
async fn accept(listener: TcpListener, shared: &Arc<Shared>) -> Outcome {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        // Above the limit, connections wait in the kernel's queue.
        let place = places.clone().acquire_owned().await?;
        let client = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => client,
                Err(error) => {
                    // An error of this connection, or too many open files: retry.
                    tracing::warn!("cannot accept a connection: {error}");
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!("task of a connection failed: {error}");
                }
                continue;
            }
        };
        let shared = shared.clone();
        connections.spawn(async move {
            pass_on(client, &shared).await;
            drop(place);
        });
    }
}

/// Forwards one connection to the first server that accepts it. On any error the client's
/// connection is closed.
async fn pass_on(mut client: TcpStream, shared: &Shared) {
    let Some((mut server, cut)) = server(shared).await else {
        tracing::debug!("no API server accepts a connection");
        return;
    };
    if let Err(error) = keep_alive(&client).and_then(|()| keep_alive(&server)) {
        tracing::warn!("cannot set TCP keepalive: {error}");
        return;
    }
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
        () = cut.cancelled() => tracing::debug!("closed a connection to a failed API server"),
    }
}

/// Connects to the first server that accepts; with the token that closes the connection.
async fn server(shared: &Shared) -> Option<(TcpStream, CancellationToken)> {
    let until = Instant::now() + shared.timing.hold;
    loop {
        let mut better = std::pin::pin!(shared.better.notified());
        // Before the attempt, otherwise a notification during it would be missed.
        better.as_mut().enable();
        let order = shared.table().order();
        if let Some(connected) = connect(shared, order).await {
            return Some(connected);
        }
        if timeout_at(until, better).await.is_err() {
            break;
        }
    }
    let order = shared.table().last_resort();
    connect(shared, order).await
}

/// Tries each server once.
async fn connect(
    shared: &Shared,
    order: Vec<(SocketAddr, CancellationToken)>,
) -> Option<(TcpStream, CancellationToken)> {
    for (address, cut) in order {
        match timeout(shared.timing.connect, TcpStream::connect(address)).await {
            Ok(Ok(server)) => return Some((server, cut)),
            Ok(Err(error)) => tracing::debug!(%address, "cannot connect: {error}"),
            Err(_) => tracing::debug!(%address, "connection timed out"),
        }
        shared.table().refuses(address);
    }
    None
}

/// Sets keepalive and timeouts, so that the kernel detects a peer that is gone.
fn keep_alive(stream: &TcpStream) -> nix::Result<()> {
    let fd = stream.as_fd();
    let seconds = |duration: Duration| u32::try_from(duration.as_secs()).unwrap_or(u32::MAX);
    let acknowledged = u32::try_from(ACKNOWLEDGED_WITHIN.as_millis()).unwrap_or(u32::MAX);
    setsockopt(&fd, sockopt::TcpNoDelay, &true)?;
    setsockopt(&fd, sockopt::KeepAlive, &true)?;
    setsockopt(&fd, sockopt::TcpKeepIdle, &seconds(KEEPALIVE_IDLE))?;
    setsockopt(&fd, sockopt::TcpKeepInterval, &seconds(KEEPALIVE_INTERVAL))?;
    setsockopt(&fd, sockopt::TcpKeepCount, &KEEPALIVE_COUNT)?;
    setsockopt(&fd, sockopt::TcpUserTimeout, &acknowledged)
}

/// Inputs and output of the runnable that tracks the API servers.
pub(crate) struct Following {
    /// Initial state.
    pub known: PeerResolver,
    /// Input: the nodes and their roles.
    pub view: Value<Arc<View>>,
    /// Input: the addresses of other nodes.
    pub learned: Value<PeerAddresses>,
    /// Input: the address of this node.
    pub address: Value<IpAddr>,
    /// Output: the API servers.
    pub servers: Writer<Servers>,
}

/// Tracks the addresses of the API servers until it is cancelled.
pub(crate) async fn follow(ctx: Context, following: Arc<Following>) -> Outcome {
    let mut views = following.view.watch();
    let mut learned = following.learned.watch();
    let mut addresses = following.address.watch();
    let mut known = following.known.clone();
    ctx.healthy();
    loop {
        let servers = Servers::of(&known);
        if following.servers.value().get().as_ref() != Some(&servers) {
            following.servers.set(servers);
        }
        tokio::select! {
            view = views.next() => known.view = Some(view?),
            news = learned.next() => known.learned = news?,
            address = addresses.next() => known.own_address = Some(address?),
            () = ctx.cancelled() => return Ok(()),
        }
    }
}
