//! One address on this machine behind which all API servers are:
//! 127.0.0.1:[`PORT_KUBERNETES_BALANCER`].
//!
//! Programs of Kubernetes take the address of one API server, and read it once.
//! Here controllers come and go, and nodes move. So the node's own programs ask
//! the balancer, which takes each connection to a server that works: this
//! node's own, if it is a controller, for that is the shortest way and the
//! one that a controller that was cut off has; and the others in turn.
//!
//! It passes bytes on and never looks into them: TLS is between client and
//! server, and whoever takes a server's place proves nothing to the clients.
//!
//! Whether a server works is found out by asking each of them all the time
//! whether it is ready ([`readiness`]), not by connecting alone: the kernel takes
//! connections for a server that hangs, and a server that has lost etcd says so
//! if it is asked. Connections to a server that does not answer any more are
//! cut if there is another one: clients wait up to a minute before they look for
//! themselves.
//!
//! While none is ready, connections are held ([`Timing::hold`]) for the first
//! that is. A server that starts takes connections long before it can answer, and
//! what it is asked then makes it later; and clients that are refused ask again
//! and again, and are late when there is one. After that they go to whichever
//! takes them: what was seen only changes when and in which order servers are
//! tried, so a balancer that is wrong about all of them still tries each.
//!
//! Bounds: so many connections at a time ([`MAX_CONNECTIONS`]); the kernel's
//! queue beyond. A server that takes no connection costs [`Timing::connect`]; a
//! machine that has vanished is found out by keep-alive and by data that is
//! not acknowledged.

mod readiness;
mod table;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use hearth_agent::{Known, Learned, View};
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

/// Connections at a time. A node has some tens.
const MAX_CONNECTIONS: usize = 512;
/// A connection is asked for a sign of life after so long without any, so
/// often again, and given up after so many.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 3;
/// What was sent must be acknowledged within.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(20);

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// Between two questions to a server.
    pub every: Duration,
    /// The same, while none is ready.
    pub soon: Duration,
    /// For an answer: TLS on an emulated processor takes seconds.
    pub answer: Duration,
    /// To be connected.
    pub connect: Duration,
    /// How long a connection waits for a server that is ready. Most clients give
    /// up after ten seconds without an answer.
    pub hold: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(5),
            soon: Duration::from_secs(2),
            answer: Duration::from_secs(10),
            connect: Duration::from_secs(3),
            hold: Duration::from_secs(8),
        }
    }
}

/// The API servers of the moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Servers {
    /// This node's, if it is a controller.
    pub own: Option<SocketAddr>,
    /// All, or all others.
    pub others: Vec<SocketAddr>,
}

impl Servers {
    /// As far as this node knows.
    pub(crate) fn of(known: &Known) -> Self {
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

/// What the balancer is given.
pub(crate) struct Balancer<F> {
    /// Where it listens.
    pub listen: SocketAddr,
    /// How the servers are asked whether they are ready.
    pub probes: F,
    /// How long things may take.
    pub timing: Timing,
    /// Will be read: where they are.
    pub servers: Value<Servers>,
    /// Will be written: how many of them are ready.
    pub ready: Writer<usize>,
}

/// The balancer's own address.
pub(crate) fn address() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, PORT_KUBERNETES_BALANCER))
}

/// Under which this node's programs find the API servers.
pub(crate) fn url() -> String {
    format!("https://{}", address())
}

/// Starts the balancer and what follows the servers, as children of a worker
/// that is not healthy yet. The servers are asked with these certificates. Gives
/// how many are ready.
pub(crate) fn start(
    ctx: &Context,
    parts: &Worker,
    member: &MemberData,
    tls: Value<Arc<ClientConfig>>,
) -> Result<Value<usize>, SpawnError> {
    let (servers_writer, servers) = event::value();
    let (ready_writer, ready) = event::value();
    let following = Arc::new(Following {
        known: Known {
            own: member.node_id,
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

/// Serves until it is cancelled.
pub(crate) async fn run<F: Probes>(ctx: Context, balancer: Arc<Balancer<F>>) -> Outcome {
    let listener = TcpListener::bind(balancer.listen).await;
    let listener = listener
        .map_err(|error| Failure::msg(format!("listen on {}: {error}", balancer.listen)))?;
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
    /// One answers that did not, or there is another one.
    better: Notify,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing below panics halfway through a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows which servers there are, and asks each of them again and again.
/// Ends by an error only.
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
                        tracing::info!(%address, "an API server");
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
            tracing::info!(%address, "no API server any more");
            asked.retain(|asked| *asked != address);
            continue;
        }
        let news = match &answer {
            Ok(()) => shared.table().answers(address),
            Err(_) => shared.table().fails(address),
        };
        match answer {
            Ok(()) if news => {
                tracing::info!(%address, "the API server is ready");
                shared.better.notify_waiters();
            }
            Err(why) if news => tracing::warn!(%address, "the API server is not ready: {why}"),
            _ => {}
        }
        let after = match shared.table().answering() {
            0 => balancer.timing.soon,
            _ => balancer.timing.every,
        };
        answers.push(ask(balancer.timing, address, probe, after));
        tell(balancer, shared);
    }
}

/// Asks one server after a while, and gives back what asks it.
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

/// Takes connections. Ends by an error only; all of them end with it.
async fn accept(listener: TcpListener, shared: &Arc<Shared>) -> Outcome {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        // Whoever finds no place waits in the kernel's queue.
        let place = places.clone().acquire_owned().await?;
        let client = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => client,
                Err(error) => {
                    // Of one connection, or of too many open files: others end.
                    tracing::warn!("cannot take a connection: {error}");
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!("a connection has ended badly: {error}");
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

/// One connection, from a client to the first server that takes it. Whatever is
/// wrong with it, the client sees it end.
async fn pass_on(mut client: TcpStream, shared: &Shared) {
    let Some((mut server, cut)) = server(shared).await else {
        tracing::debug!("no API server takes a connection");
        return;
    };
    if let Err(error) = keep_alive(&client).and_then(|()| keep_alive(&server)) {
        tracing::warn!("cannot bound a connection: {error}");
        return;
    }
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
        () = cut.cancelled() => tracing::debug!("a connection is cut"),
    }
}

/// A connection to the first server that takes one, and when it is to be cut.
async fn server(shared: &Shared) -> Option<(TcpStream, CancellationToken)> {
    let until = Instant::now() + shared.timing.hold;
    loop {
        let mut better = std::pin::pin!(shared.better.notified());
        // Before it is tried, or what happens meanwhile would be missed.
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

/// Tries each once.
async fn connect(
    shared: &Shared,
    order: Vec<(SocketAddr, CancellationToken)>,
) -> Option<(TcpStream, CancellationToken)> {
    for (address, cut) in order {
        match timeout(shared.timing.connect, TcpStream::connect(address)).await {
            Ok(Ok(server)) => return Some((server, cut)),
            Ok(Err(error)) => tracing::debug!(%address, "cannot connect: {error}"),
            Err(_) => tracing::debug!(%address, "cannot connect in time"),
        }
        shared.table().refuses(address);
    }
    None
}

/// Has the kernel find out when the other end is gone.
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

/// What this node knows of all nodes, from whoever tells it.
pub(crate) struct Following {
    /// What is known from the beginning.
    pub known: Known,
    /// Will be read: who is a controller.
    pub view: Value<Arc<View>>,
    /// Will be read: where the others are.
    pub learned: Value<Learned>,
    /// Will be read: where this node is.
    pub address: Value<IpAddr>,
    /// Will be written: where the API servers are.
    pub servers: Writer<Servers>,
}

/// Follows where the API servers are, until it is cancelled.
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
