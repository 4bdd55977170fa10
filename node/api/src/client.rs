//! The client of the curators: one channel over all that are known.
//!
//! Every curator serves every call, so a client needs one connection that
//! works, and another one soon when it does not. Endpoints are tried in the
//! given order, a little apart, without waiting for the ones before: the first
//! whose handshake completes is used, and dead addresses cost a moment, not a
//! time-out. Whoever wants to spread load shuffles the list; whoever has a
//! curator on its own node puts that first.
//!
//! Keep-alive runs all the time, so that a peer that vanished without a word
//! is noticed within fifteen seconds, and the next call takes another one.
//! Calls are not repeated here: only the caller knows which may be.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;
use tower::Service;

use crate::certificates::{self, CertificateError};
use crate::lifetime::End;
use crate::names::PORT_CURATOR;
use crate::tls::{self, Clock};

/// The next endpoint is tried after this, if the ones before have not
/// answered.
const STAGGER: Duration = Duration::from_millis(250);

/// Where a curator listens: an IP address or a host name, and a port.
///
/// Nodes use addresses only, for their binary cannot resolve names.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Not an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {found:?}: wanted HOST or HOST:PORT, IPv6 addresses in [brackets]")]
pub struct EndpointError {
    found: String,
}

impl Endpoint {
    /// From an address, as directories have it; port 0 is the default port.
    pub fn new(host: std::net::IpAddr, port: u16) -> Self {
        Self {
            host: host.to_string(),
            port: if port == 0 { PORT_CURATOR } else { port },
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl From<std::net::SocketAddr> for Endpoint {
    fn from(address: std::net::SocketAddr) -> Self {
        Self::new(address.ip(), address.port())
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = || EndpointError {
            found: text.to_owned(),
        };
        if let Ok(address) = text.parse::<std::net::SocketAddr>() {
            return Ok(address.into());
        }
        let literal = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .unwrap_or(text);
        if let Ok(address) = literal.parse::<std::net::IpAddr>() {
            return Ok(Self::new(address, 0));
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, port.parse().map_err(|_| wrong())?),
            None => (text, PORT_CURATOR),
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        if host.is_empty() || host.len() > 253 || port == 0 || !host.bytes().all(is_name) {
            return Err(wrong());
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

/// One endpoint does not work.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// No TCP connection.
    #[error("no connection")]
    Tcp(#[source] io::Error),
    /// A connection, and no TLS on it.
    #[error("no TLS session")]
    Tls(#[source] io::Error),
    /// A server that is not the one we want.
    #[error("the server's certificate is refused")]
    Certificate(#[source] CertificateError),
    /// TLS, and no HTTP/2 on it.
    #[error("no HTTP/2 session")]
    Http2(#[source] tonic::transport::Error),
    /// Nothing in time.
    #[error("no answer within {0:?}")]
    Slow(Duration),
}

/// No endpoint works.
#[derive(Debug)]
pub struct ConnectError {
    /// Which failed, and how, in the order in which they did.
    pub attempts: Vec<(Endpoint, AttemptError)>,
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.attempts.is_empty() {
            return f.write_str("no curator is known");
        }
        f.write_str("no curator can be reached (")?;
        for (index, (endpoint, error)) in self.attempts.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{endpoint}: {}", crate::chain(error))?;
        }
        f.write_str(")")
    }
}

impl std::error::Error for ConnectError {}

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// For one endpoint: TCP and TLS together.
    pub connect_timeout: Duration,
    /// Until the answer to a call begins, connecting included. For a unary
    /// call that is the whole answer; streams go on as long as they like.
    pub call_timeout: Duration,
    /// By which the server's certificate expires.
    pub clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(10),
            clock: tls::wall_clock(),
        }
    }
}

/// One channel over all known curators. Cheap to clone; the clones share the
/// connection and the list.
#[derive(Clone)]
pub struct Curators {
    channel: Channel,
    shared: Arc<Shared>,
}

impl Curators {
    /// Connects when it is first used. Whom it trusts and who it is follows
    /// from the TLS configuration.
    ///
    /// Must be called within a Tokio runtime.
    pub fn new(endpoints: Vec<Endpoint>, tls: Arc<ClientConfig>, options: Options) -> Self {
        let call_timeout = options.call_timeout;
        let shared = Arc::new(Shared {
            tls,
            options,
            list: Mutex::new(List {
                endpoints,
                current: None,
            }),
        });
        let channel = transport()
            .timeout(call_timeout)
            .connect_with_connector_lazy(Connector(Arc::clone(&shared)));
        Self { channel, shared }
    }

    /// For the generated clients.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// From now on these, in this order. A connection to one that is no longer
    /// among them ends; the next call connects to another.
    pub fn set_endpoints(&self, endpoints: Vec<Endpoint>) {
        let mut list = self.shared.list();
        if let Some((current, connection)) = &list.current
            && !endpoints.contains(current)
        {
            connection.cancel();
            list.current = None;
        }
        list.endpoints = endpoints;
    }

    /// Those that are tried now.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        self.shared.list().endpoints.clone()
    }

    /// The one that was connected last, if it is still wanted.
    pub fn current(&self) -> Option<Endpoint> {
        self.shared
            .list()
            .current
            .as_ref()
            .map(|(endpoint, _)| endpoint.clone())
    }
}

struct Shared {
    tls: Arc<ClientConfig>,
    options: Options,
    list: Mutex<List>,
}

struct List {
    endpoints: Vec<Endpoint>,
    /// The connection that stands, as far as known.
    current: Option<(Endpoint, CancellationToken)>,
}

impl Shared {
    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first endpoint that answers.
    async fn connect(&self) -> Result<Connection, ConnectError> {
        let endpoints = self.list().endpoints.clone();
        let bound = self.options.connect_timeout;
        let mut waiting = endpoints.into_iter();
        let mut running = JoinSet::new();
        let mut attempts = Vec::new();
        loop {
            match waiting.next() {
                Some(endpoint) => {
                    let tls = Arc::clone(&self.tls);
                    running.spawn(async move {
                        let result = open(&endpoint, tls, bound).await;
                        (endpoint, result)
                    });
                }
                None if running.is_empty() => return Err(ConnectError { attempts }),
                None => {}
            }
            // One that fails makes way for the next at once.
            let more = waiting.len() > 0;
            let finished = tokio::select! {
                finished = running.join_next() => finished,
                () = tokio::time::sleep(STAGGER), if more => None,
            };
            match finished {
                Some(Ok((endpoint, Ok(stream)))) => return Ok(self.adopt(endpoint, stream)),
                Some(Ok((endpoint, Err(error)))) => attempts.push((endpoint, error)),
                // Only a panic ends an attempt without a result, and rustls
                // would have to have one. The others may still succeed.
                Some(Err(error)) => tracing::error!(%error, "a connection attempt broke down"),
                None => {}
            }
        }
    }

    fn adopt(&self, endpoint: Endpoint, stream: TlsStream<TcpStream>) -> Connection {
        let token = CancellationToken::new();
        let connection = Connection::new(stream, token.clone(), &self.options.clock);
        let mut list = self.list();
        if list.endpoints.contains(&endpoint) {
            list.current = Some((endpoint, token));
        } else {
            // Taken off the list while it was connected to. The next call
            // connects to another.
            token.cancel();
        }
        connection
    }
}

/// TCP and TLS to one endpoint.
async fn open(
    endpoint: &Endpoint,
    tls: Arc<ClientConfig>,
    bound: Duration,
) -> Result<TlsStream<TcpStream>, AttemptError> {
    let attempt = async {
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .and_then(|stream| stream.set_nodelay(true).map(|()| stream))
            .map_err(AttemptError::Tcp)?;
        TlsConnector::from(tls)
            .connect(any_name(), stream)
            .await
            .map_err(|error| match tls::refused_certificate(&error) {
                Some(reason) => AttemptError::Certificate(reason),
                None => AttemptError::Tls(error),
            })
    };
    tokio::time::timeout(bound, attempt)
        .await
        .unwrap_or(Err(AttemptError::Slow(bound)))
}

/// rustls wants a name; it is neither sent nor looked at.
fn any_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([127, 0, 0, 1]).into())
}

fn transport() -> tonic::transport::Endpoint {
    // The name goes into the requests' authority and nowhere else.
    tonic::transport::Endpoint::from_static("http://curator.hearth")
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true)
}

/// A channel over one connection to one endpoint, made now. It does not
/// reconnect: for first contact, where the certificate of this very
/// connection matters.
pub(crate) async fn connect_one(
    endpoint: &Endpoint,
    tls: Arc<ClientConfig>,
    timeout: Duration,
) -> Result<Channel, AttemptError> {
    let stream = open(endpoint, tls, timeout).await?;
    let mut stream = Some(TokioIo::new(stream));
    let once = tower::service_fn(move |_: Uri| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| io::Error::other("the one connection has ended")) }
    });
    transport()
        .timeout(timeout)
        .connect_with_connector(once)
        .await
        .map_err(AttemptError::Http2)
}

/// Bounds a whole call: `DeadlineExceeded` when it takes longer.
pub async fn within<T>(
    bound: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    tokio::time::timeout(bound, call).await.unwrap_or_else(|_| {
        Err(Status::deadline_exceeded(format!(
            "no answer within {bound:?}"
        )))
    })
}

/// What tonic calls when it needs a connection.
#[derive(Clone)]
struct Connector(Arc<Shared>);

impl Service<Uri> for Connector {
    type Response = TokioIo<Connection>;
    type Error = ConnectError;
    type Future = BoxFuture<'static, Result<TokioIo<Connection>, ConnectError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move { shared.connect().await.map(TokioIo::new) })
    }
}

/// A connection that ends with the server's certificate, or when it is no
/// longer wanted.
struct Connection {
    stream: TlsStream<TcpStream>,
    end: End,
}

impl Connection {
    fn new(stream: TlsStream<TcpStream>, wanted: CancellationToken, clock: &Clock) -> Self {
        let not_after = stream
            .get_ref()
            .1
            .peer_certificates()
            .and_then(|certificates| certificates.first())
            .and_then(|leaf| certificates::not_after(leaf).ok());
        let end = End::with(wanted, "the endpoint is no longer wanted");
        let end = match not_after {
            Some(not_after) => end.or_past(not_after, Arc::clone(clock)),
            None => end,
        };
        Self { stream, end }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.end.poll(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.end.poll(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end.poll(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end.poll(cx)?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
