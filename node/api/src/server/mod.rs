//! What every gRPC server of a node has in common: TCP, TLS, limits, who may
//! call what.
//!
//! [`Server::serve`] accepts connections and completes their handshakes in
//! tasks of their own, so that a slow peer holds up nobody. Then each
//! connection
//!
//! - has a place, of those for the cluster's own or of those for everyone
//!   else ([`places`]), so that strangers cannot take the places of members, nor
//!   one node those of all others, nor the first strangers those of the next;
//! - has as much of HTTP/2 as its kind needs: who the peer is is known before
//!   anything of HTTP/2 is said, and strangers get few streams and small
//!   windows, so that all of them together hold little memory;
//! - ends when the peer's certificate does, for strangers after a while, and
//!   soon after its [`Admission`] says that the peer is no longer welcome;
//! - ends with the server: when `serve` returns, or is dropped, no task of it
//!   goes on.
//!
//! Each call passes by [`authorize`] before it reaches a handler, and a
//! handler that panics answers `Internal`. The services themselves know
//! nothing of all this; they find out who calls by [`Caller::of`].

mod authorize;
mod connection;
mod places;
mod services;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info, warn};

pub use authorize::{Admission, Authorize, Caller};
pub use connection::ConnectionInfo;
pub use services::Services;

use crate::certificates::CertificateError;
use crate::identity::{NodeCredentials, NodeId};
use crate::lifetime::End;
use crate::tls::{self, Clock, OwnCertificate, PeerCertificate, TlsError, Trust};
use connection::{Connection, Stream};
use places::Places;

/// How much a server lets its callers take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Handshakes at a time. One more takes the place of the oldest: it is
    /// the silent that are old, and they must not keep the others out.
    pub handshakes: usize,
    /// A handshake that takes longer is given up.
    pub handshake_timeout: Duration,
    /// Connections of nodes and users of the cluster.
    pub identified: usize,
    /// Connections of one node, of these.
    pub per_node: usize,
    /// Connections of everyone else. One more takes the place of an idle one,
    /// or of the oldest.
    pub anonymous: usize,
    /// Connections of everyone else from one address, of these. One more takes
    /// the place of another from there. Many machines may share an address.
    pub anonymous_per_address: usize,
    /// After this a connection of everyone else ends.
    pub anonymous_lifetime: Duration,
    /// How long a peer that is no longer admitted can still hear that from the
    /// calls that it makes. Then its connection ends.
    pub farewell: Duration,
    /// Calls at a time on one connection of a node or user of the cluster.
    pub streams: u32,
    /// Calls at a time on one connection of everyone else.
    pub anonymous_streams: u32,
    /// Bytes that one connection of everyone else may send before they are
    /// read, in all its calls together.
    pub anonymous_window: u32,
    /// How long calls that still run are waited for at the end.
    pub shutdown_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshakes: 64,
            handshake_timeout: Duration::from_secs(10),
            identified: 1024,
            per_node: 64,
            anonymous: 128,
            anonymous_per_address: 64,
            anonymous_lifetime: Duration::from_secs(600),
            farewell: Duration::from_secs(1),
            streams: 128,
            // The health is watched on one, and one calls.
            anonymous_streams: 8,
            // The least that HTTP/2 starts with, for a stream and for all.
            anonymous_window: (1 << 16) - 1,
            shutdown_grace: Duration::from_secs(2),
        }
    }
}

/// What lies between TCP and HTTP/2.
pub enum Transport {
    /// TLS: everything but the debug service.
    Tls {
        /// Made by [`tls::server_config`] with the same trust and clock.
        config: Arc<ServerConfig>,
        /// By what callers are judged.
        trust: Trust,
        /// When it is.
        clock: Clock,
    },
    /// Nothing: all callers are [`PeerCertificate::None`].
    Plain,
}

impl Transport {
    /// TLS as a node with these credentials speaks it. By the second value
    /// the certificate can be exchanged while the server runs.
    pub fn of_node(
        credentials: &NodeCredentials,
        clock: Clock,
    ) -> Result<(Self, Arc<OwnCertificate>, NodeId), TlsError> {
        let (trust, node_id) = Trust::of_node(credentials, tls::now(&clock))?;
        let own = OwnCertificate::new(credentials)?;
        let config = tls::server_config(Arc::clone(&own), trust.clone(), Arc::clone(&clock))?;
        let transport = Self::Tls {
            config,
            trust,
            clock,
        };
        Ok((transport, own, node_id))
    }
}

/// The server cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// By tonic.
    #[error("gRPC server on {address}")]
    Grpc {
        /// Where it listens.
        address: SocketAddr,
        /// Why.
        source: tonic::transport::Error,
    },
    /// The socket is of no use.
    #[error("the listening socket")]
    Listener(#[from] io::Error),
}

/// A server before it serves.
pub struct Server {
    transport: Transport,
    limits: Limits,
    admission: Option<Arc<dyn Admission>>,
}

impl Server {
    /// With the default limits.
    pub fn new(transport: Transport) -> Self {
        Self {
            transport,
            limits: Limits::default(),
            admission: None,
        }
    }

    /// With other limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// With a check of each call beside that of its permissions.
    #[must_use]
    pub fn admission(mut self, admission: Arc<dyn Admission>) -> Self {
        self.admission = Some(admission);
        self
    }

    /// Serves until `cancel`. Then new connections are refused at once, calls
    /// that run have a short grace, and everything is over when this returns.
    ///
    /// Boxed, so that all of it down to HTTP/2 is compiled here, once, and not
    /// again in each crate that has a server.
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
        // tonic runs each connection in a task of its own. Their sockets break
        // when this guard goes, whichever way this function ends.
        let connections = CancellationToken::new();
        let _guard = connections.clone().drop_guard();
        let (identified, of_identified) = mpsc::channel(16);
        let (anonymous, of_anonymous) = mpsc::channel(16);
        let ready = Ready {
            identified,
            anonymous,
        };
        let accept = self.accept(listener, connections.clone(), ready, cancel.clone());

        // Settings are a server's, so there are two.
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

    /// Accepts until `cancel`; connections whose handshake is complete go to
    /// `ready`.
    async fn accept(
        self,
        listener: TcpListener,
        connections: CancellationToken,
        ready: Ready,
        cancel: CancellationToken,
    ) {
        let handshake = Arc::new(Handshake {
            places: Places::new(self.limits),
            transport: self.transport,
            admission: self.admission,
            limits: self.limits,
            connections,
            ready,
        });
        let mut running = JoinSet::new();
        // Those that run, the oldest first.
        let mut ages: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                Some(_) = running.join_next() => {}
                accepted = listener.accept() => {
                    match accepted {
                        Ok((stream, remote)) => {
                            ages.retain(|handshake| !handshake.is_finished());
                            if ages.len() >= self.limits.handshakes
                                && let Some(oldest) = ages.pop_front()
                            {
                                debug!("too many handshakes at a time: the oldest is given up");
                                oldest.abort();
                            }
                            let task = Arc::clone(&handshake).run(stream, remote);
                            ages.push_back(running.spawn(task.in_current_span()));
                        }
                        Err(error) => {
                            // Out of file descriptors, mostly. Going on at
                            // once would only burn the processor.
                            warn!(%error, "cannot accept connections; trying again");
                            tokio::time::sleep(Duration::from_millis(100)).await;
                        }
                    }
                }
            }
        }
    }
}

/// Turns sockets into connections.
struct Handshake {
    transport: Transport,
    limits: Limits,
    admission: Option<Arc<dyn Admission>>,
    places: Places,
    connections: CancellationToken,
    ready: Ready,
}

/// Where connections go that can be served.
struct Ready {
    /// Of nodes and users of the cluster.
    identified: mpsc::Sender<io::Result<Connection>>,
    /// Of everyone else.
    anonymous: mpsc::Sender<io::Result<Connection>>,
}

impl Ready {
    async fn send(&self, connection: Connection) {
        let to = match connection.is_strangers() {
            true => &self.anonymous,
            false => &self.identified,
        };
        // An error means that the server is gone; so is its interest.
        let _ = to.send(Ok(connection)).await;
    }
}

/// Why a socket does not become a connection.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("socket")]
    Socket(#[source] io::Error),
    #[error("no complete handshake in {0:?}")]
    Slow(Duration),
    #[error("handshake")]
    Handshake(#[source] io::Error),
    #[error("certificate")]
    Certificate(#[from] CertificateError),
    #[error("all {0} places for connections of its kind are taken")]
    Full(usize),
    #[error("{0} has {1} connections already")]
    Greedy(NodeId, usize),
}

impl Handshake {
    async fn run(self: Arc<Self>, stream: TcpStream, remote: SocketAddr) {
        match self.connection(stream, remote).await {
            Ok(connection) => self.ready.send(connection).await,
            Err(refused) => {
                let why = crate::chain(&refused);
                match refused {
                    Refused::Certificate(_) | Refused::Full(_) | Refused::Greedy(..) => {
                        info!(%remote, %why, "connection refused");
                    }
                    _ => debug!(%remote, %why, "no connection"),
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
                let end = End::with(self.connections.clone(), "the server ends");
                (Stream::Plain(stream), PeerCertificate::None, end)
            }
            Transport::Tls {
                config,
                trust,
                clock,
            } => {
                let (stream, peer) = self.tls(stream, config, trust, clock).await?;
                let end = End::with(self.connections.clone(), "the server ends");
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
        let end = end.or_with(place.given_up.clone(), "its place is needed for another");
        let end = match &self.admission {
            Some(admission) => {
                let revoked = Arc::clone(admission).revoked(peer.clone());
                end.or_when(farewell(revoked, self.limits.farewell))
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

/// The end of a connection whose peer is no longer admitted.
async fn farewell(revoked: BoxFuture<'static, ()>, grace: Duration) -> &'static str {
    revoked.await;
    // At once would be too soon: a peer whose streams just break, again and
    // again, would never hear why.
    tokio::time::sleep(grace).await;
    "its peer is no longer admitted"
}

#[cfg(test)]
mod tests;
