//! The common part of every gRPC server of a node: TCP, TLS, limits, authorization.
//!
//! [`Server::serve`] accepts connections and completes their handshakes in tasks of their own, so
//! that a slow peer delays no other. Each connection then
//!
//! - takes a slot from the [limit](places) for nodes and users of the cluster or from that for
//!   everyone else, so that unauthenticated clients cannot take the slots of members, one node
//!   those of all other nodes, or the first unauthenticated clients those of later ones;
//! - gets HTTP/2 settings for its kind: the peer is known before HTTP/2 starts, and unauthenticated
//!   clients get few streams and small windows, so that all of them together use little memory;
//! - is closed when the peer's certificate expires, for unauthenticated clients after a maximum
//!   lifetime, and soon after its [`Admission`] revokes the peer;
//! - is closed with the server: when `serve` returns, or is dropped, no task of it remains.
//!
//! Each call passes [`authorize`] before it reaches a handler, and a handler that panics answers
//! `Internal`. The services themselves know nothing of this; they get the caller from
//! [`Caller::of`].

mod authorize;
mod connection;
mod delays;
mod local;
mod places;
mod reflection;
mod services;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info, warn};

pub use authorize::{Admission, Authorize, Caller};
pub use connection::ConnectionInfo;
pub use local::serve_local;
pub use reflection::with_reflection;
pub use services::Services;

use crate::certificates::CertificateError;
use crate::identity::NodeId;
use crate::lifetime::End;
use crate::shares::{Shares, block};
use crate::tls::{self, Clock, OwnCertificate, PeerCertificate, TlsError, Trust};
use connection::{Connection, Stream};
use delays::Delays;
use places::ConnectionLimiter;

/// Delay after a failed accept: mostly out of file descriptors, where retrying at once would only waste CPU time.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Concurrent handshakes. A further one replaces the oldest one of the address that has the most:
    /// old handshakes are mostly those of silent peers, which must not block others.
    pub handshakes: usize,
    /// A handshake that takes longer is aborted.
    pub handshake_timeout: Duration,
    /// Connections of nodes and users of the cluster.
    pub identified: usize,
    /// Of these, connections of one node. One more is refused.
    pub per_node: usize,
    /// Delay of handshakes from an address at which a node was refused because of that.
    pub per_node_delay: Duration,
    /// Connections of unauthenticated clients. A further one replaces an idle one, or else the
    /// oldest.
    pub anonymous: usize,
    /// Of these, connections from one address. A further one replaces another from the same
    /// address. Many machines may share an address.
    pub anonymous_per_address: usize,
    /// Maximum lifetime of a connection of an unauthenticated client.
    pub anonymous_lifetime: Duration,
    /// How long a peer that is no longer admitted still gets the reason as the answer to its calls.
    /// Then its connection is closed.
    pub revocation_grace: Duration,
    /// Concurrent calls on one connection of a node or user of the cluster.
    pub streams: u32,
    /// Concurrent calls on one connection of an unauthenticated client.
    pub anonymous_streams: u32,
    /// Bytes that one connection of an unauthenticated client may send before they are read, in all
    /// its calls together.
    pub anonymous_window: u32,
    /// How long running calls may continue at shutdown.
    pub shutdown_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshakes: 64,
            handshake_timeout: Duration::from_secs(10),
            identified: 1024,
            per_node: 64,
            per_node_delay: Duration::from_secs(2),
            anonymous: 128,
            anonymous_per_address: 64,
            anonymous_lifetime: Duration::from_secs(600),
            revocation_grace: Duration::from_secs(1),
            streams: 128,
            // One of them watches the health, one makes calls.
            anonymous_streams: 8,
            // The initial window of HTTP/2, per stream and per connection.
            anonymous_window: (1 << 16) - 1,
            shutdown_grace: Duration::from_secs(2),
        }
    }
}

/// The layer between TCP and HTTP/2.
pub enum Transport {
    /// TLS: everything but the debug service.
    Tls {
        /// Made by [`tls::server_config`] of the same node.
        config: Arc<ServerConfig>,
        /// Which callers are accepted.
        trust: Trust,
        /// The clock by which certificates expire.
        clock: Clock,
    },
    /// No TLS: all callers are [`PeerCertificate::None`].
    Plain,
}

impl Transport {
    /// TLS for a node with these certificates.
    pub fn of_node(own: &Arc<OwnCertificate>) -> Result<Self, TlsError> {
        Ok(Self::Tls {
            config: tls::server_config(Arc::clone(own))?,
            trust: Trust::of_node(own),
            clock: own.clock(),
        })
    }
}

/// The server had to stop.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Error of tonic's server.
    #[error("gRPC server on {address} failed")]
    Grpc {
        /// The listening address.
        address: SocketAddr,
        /// Tonic's error.
        source: tonic::transport::Error,
    },
    /// The same, of a server for programs of this machine.
    #[error("gRPC server on a unix socket failed")]
    Local(#[source] tonic::transport::Error),
    /// The listening socket cannot be used.
    #[error("cannot use the listening socket")]
    Listener(#[from] io::Error),
}

/// A server that is not running yet.
pub struct Server {
    transport: Transport,
    limits: Limits,
    admission: Option<Arc<dyn Admission>>,
}

impl Server {
    /// A server with the default limits.
    pub fn new(transport: Transport) -> Self {
        Self {
            transport,
            limits: Limits::default(),
            admission: None,
        }
    }

    /// Sets the limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Adds a check of each call after that of its permissions.
    #[must_use]
    pub fn admission(mut self, admission: Arc<dyn Admission>) -> Self {
        self.admission = Some(admission);
        self
    }

    /// Serves until `cancel`. Then new connections are refused at once, running calls get a short
    /// grace period, and no task remains when this returns.
    ///
    /// Boxed, so that all of it down to HTTP/2 is compiled once here, and not again in each crate
    /// that has a server.
    pub fn serve(
        self,
        listener: TcpListener,
        services: Services,
        cancel: CancellationToken,
    ) -> BoxFuture<'static, Result<(), ServeError>> {
        Box::pin(self.serve_until(listener, services, cancel))
    }

    async fn serve_until(
        self,
        listener: TcpListener,
        services: Services,
        cancel: CancellationToken,
    ) -> Result<(), ServeError> {
        let address = listener.local_addr()?;
        let limits = self.limits;
        let authorize = Authorize::new(self.clock(), self.admission.clone());
        // tonic runs each connection in a task of its own. Their sockets are closed when this guard
        // is dropped, however this function ends.
        let connections = CancellationToken::new();
        let _guard = connections.clone().drop_guard();
        let (identified, of_identified) = mpsc::channel(16);
        let (anonymous, of_anonymous) = mpsc::channel(16);
        let ready = Ready {
            identified,
            anonymous,
        };
        let accept = self.accept(listener, connections.clone(), ready, cancel.clone());

        // Settings are per server, so there are two servers.
        let grpc = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(Duration::from_secs(10)))
            .http2_keepalive_timeout(Some(Duration::from_secs(5)))
            .http2_max_header_list_size(16 << 10);
        let for_identified = grpc
            .clone()
            .max_concurrent_streams(limits.streams)
            .layer(authorize.clone())
            .serve_with_incoming_shutdown(
                services.clone(),
                ReceiverStream::new(of_identified),
                cancel.clone().cancelled_owned(),
            );
        let for_anonymous = grpc
            .max_concurrent_streams(limits.anonymous_streams)
            .initial_stream_window_size(limits.anonymous_window)
            .initial_connection_window_size(limits.anonymous_window)
            .layer(authorize)
            .serve_with_incoming_shutdown(
                services,
                ReceiverStream::new(of_anonymous),
                cancel.clone().cancelled_owned(),
            );
        let grpc = async { tokio::try_join!(for_identified, for_anonymous) };
        let end_of_grace = async {
            cancel.cancelled().await;
            tokio::time::sleep(limits.shutdown_grace).await;
            connections.cancel();
            std::future::pending::<Infallible>().await
        };
        let (served, ()) = tokio::select! {
            both = async { tokio::join!(grpc, accept) } => both,
            never = end_of_grace => match never {},
        };
        served
            .map(drop)
            .map_err(|source| ServeError::Grpc { address, source })
    }

    fn clock(&self) -> Clock {
        match &self.transport {
            Transport::Tls { clock, .. } => Arc::clone(clock),
            Transport::Plain => tls::wall_clock(),
        }
    }

    /// Accepts until `cancel`; connections with a complete handshake go to `ready`.
    async fn accept(
        self,
        listener: TcpListener,
        connections: CancellationToken,
        ready: Ready,
        cancel: CancellationToken,
    ) {
        let handshake = Arc::new(Handshake {
            places: ConnectionLimiter::new(self.limits),
            delays: Delays::new(self.limits.per_node_delay),
            shares: Shares::new(self.limits.handshakes, self.limits.handshakes),
            transport: self.transport,
            admission: self.admission,
            limits: self.limits,
            connections,
            ready,
        });
        let mut running = JoinSet::new();
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                Some(_) = running.join_next() => {}
                accepted = listener.accept() => {
                    match accepted {
                        Ok((stream, remote)) => {
                            // A listener of both families has IPv4 addresses in those of IPv6.
                            let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
                            let task = Arc::clone(&handshake).run(stream, remote);
                            running.spawn(task.in_current_span());
                        }
                        Err(error) => {
                            warn!(%error, "cannot accept connections; retrying");
                            tokio::time::sleep(ACCEPT_AGAIN).await;
                        }
                    }
                }
            }
        }
    }
}

/// Performs handshakes on accepted sockets.
struct Handshake {
    transport: Transport,
    limits: Limits,
    admission: Option<Arc<dyn Admission>>,
    places: ConnectionLimiter,
    delays: Delays,
    shares: Arc<Shares<IpAddr>>,
    connections: CancellationToken,
    ready: Ready,
}

/// Queues of connections that are ready to be served.
struct Ready {
    /// Of nodes and users of the cluster.
    identified: mpsc::Sender<io::Result<Connection>>,
    /// Of unauthenticated clients.
    anonymous: mpsc::Sender<io::Result<Connection>>,
}

impl Ready {
    async fn send(&self, connection: Connection) {
        let to = match connection.is_unauthenticated() {
            true => &self.anonymous,
            false => &self.identified,
        };
        // An error means that the server has stopped.
        let _ = to.send(Ok(connection)).await;
    }
}

/// Why a socket does not become a connection.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("cannot set up the socket")]
    Socket(#[source] io::Error),
    #[error("TLS handshake not complete within {0:?}")]
    Slow(Duration),
    #[error("the peer has closed the connection before its handshake")]
    Gone,
    #[error("too many concurrent handshakes: another one has taken the place of this one")]
    Replaced,
    #[error("TLS handshake failed")]
    Handshake(#[source] io::Error),
    #[error("client certificate rejected")]
    Certificate(#[from] CertificateError),
    #[error("limit of {0} connections of nodes and users reached")]
    Full(usize),
    #[error("{0} already has {1} connections")]
    Greedy(NodeId, usize),
}

impl Handshake {
    async fn run(self: Arc<Self>, stream: TcpStream, remote: SocketAddr) {
        let from = block(remote.ip());
        let connection = async {
            self.delays.wait(from, connection::closed(&stream)).await?;
            let share = self.shares.take(from);
            tokio::select! {
                biased;
                () = share.lost() => Err(Refused::Replaced),
                connection = self.connection(stream, remote) => connection,
            }
        };
        match connection.await {
            Ok(connection) => self.ready.send(connection).await,
            Err(refused) => {
                if matches!(refused, Refused::Greedy(..)) {
                    self.delays.refused(from);
                }
                let why = crate::chain(&refused);
                match refused {
                    Refused::Certificate(_) | Refused::Full(_) | Refused::Greedy(..) => {
                        info!(%remote, %why, "connection rejected");
                    }
                    _ => debug!(%remote, %why, "connection failed"),
                }
            }
        }
    }

    async fn connection(
        &self,
        stream: TcpStream,
        remote: SocketAddr,
    ) -> Result<Connection, Refused> {
        stream.set_nodelay(true).map_err(Refused::Socket)?;
        let local = stream.local_addr().map_err(Refused::Socket)?;
        let (stream, peer, end) = match &self.transport {
            Transport::Plain => {
                let end = End::with(self.connections.clone(), "the server is shutting down");
                (Stream::Plain(stream), PeerCertificate::None, end)
            }
            Transport::Tls {
                config,
                trust,
                clock,
            } => {
                let (stream, peer) = self.tls(stream, config, trust, clock).await?;
                let end = End::with(self.connections.clone(), "the server is shutting down");
                let end = match &peer {
                    PeerCertificate::Identified { not_after, .. } => {
                        end.or_past(*not_after, Arc::clone(clock))
                    }
                    _ => end.or_after(self.limits.anonymous_lifetime),
                };
                (stream, peer, end)
            }
        };
        let place = self.places.take(&peer, remote.ip())?;
        let end = end.or_with(place.given_up.clone(), "replaced: connection limit reached");
        let end = match &self.admission {
            Some(admission) => {
                let revoked = Arc::clone(admission).revoked(peer.clone());
                end.or_when(revocation_grace(revoked, self.limits.revocation_grace))
            }
            None => end,
        };
        let info = ConnectionInfo {
            peer,
            remote,
            local,
            activity: Arc::clone(&place.activity),
        };
        Ok(Connection::new(stream, info, end, place))
    }

    async fn tls(
        &self,
        stream: TcpStream,
        config: &Arc<ServerConfig>,
        trust: &Trust,
        clock: &Clock,
    ) -> Result<(Stream, PeerCertificate), Refused> {
        let bound = self.limits.handshake_timeout;
        let stream = timeout(bound, TlsAcceptor::from(Arc::clone(config)).accept(stream))
            .await
            .map_err(|_| Refused::Slow(bound))?
            .map_err(|error| match tls::refused_certificate(&error) {
                Some(reason) => Refused::Certificate(reason),
                None => Refused::Handshake(error),
            })?;
        let certificates = stream.get_ref().1.peer_certificates().unwrap_or(&[]);
        let peer = trust.judge(certificates, tls::now(clock))?;
        Ok((Stream::Tls(Box::new(stream)), peer))
    }
}

/// The reason to close a connection whose peer is no longer admitted, after a grace period.
async fn revocation_grace(revoked: BoxFuture<'static, ()>, grace: Duration) -> &'static str {
    revoked.await;
    // Closing at once would be too soon: a peer whose streams are cut again and again would never
    // learn why.
    tokio::time::sleep(grace).await;
    "the peer is no longer admitted"
}

#[cfg(test)]
mod tests;
