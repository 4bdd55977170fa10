//! One connection to one endpoint.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ClientConfig;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::list::Servers;
use super::{AttemptError, Endpoint, Options, below_a_thousand};
use crate::certificates;
use crate::identity::Identity;
use crate::lifetime::End;
use crate::tls::{self, Clock};
use crate::transport::Connector;

/// A connection that carries calls until it is closed.
pub(super) struct Line {
    pub(super) endpoint: Endpoint,
    /// The server's identity according to its certificate.
    pub(super) server: Option<Identity>,
    pub(super) channel: Channel,
    /// Whether the server answered the initial health check with "serving".
    pub(super) serves: bool,
    /// Whether the client's certificate had expired when this began: the server knows only its key.
    pub(super) began_expired: bool,
    /// When new calls should use another connection, because a certificate on this one will expire.
    renew_at: Mutex<Instant>,
    /// Cancelled to close the connection.
    unwanted: CancellationToken,
    /// Cancelled when the connection has been closed.
    closed: CancellationToken,
}

impl Line {
    /// Connects to one endpoint (TCP, TLS, HTTP/2) and checks its health. A server that is not one
    /// of `servers` is sent no request.
    pub(super) async fn open(
        endpoint: Endpoint,
        servers: &Servers,
        tls: Arc<ClientConfig>,
        options: &Options,
    ) -> Result<Self, AttemptError> {
        let bound = options.connect_timeout;
        let attempt = async {
            // Before the handshake, which may already present the next one.
            let own = options.presents.as_ref().map(|own| own.not_after());
            let stream = handshake(&endpoint, tls).await?;
            let server = leaf(&stream).and_then(|leaf| certificates::identity(leaf).ok());
            servers
                .check(server.as_ref())
                .map_err(AttemptError::Certificate)?;
            let (unwanted, closed) = (CancellationToken::new(), CancellationToken::new());
            let not_after = leaf(&stream).and_then(|leaf| certificates::not_after(leaf).ok());
            let now = tls::now(&options.clock);
            let began_expired = own.is_some_and(|end| end < now);
            let first = own
                .filter(|_| !began_expired)
                .into_iter()
                .chain(not_after)
                .min();
            let renew_at = renewal(first, now, Instant::now());
            let connection = Connection::new(
                stream,
                unwanted.clone(),
                closed.clone().drop_guard(),
                not_after,
                &options.clock,
            );
            let channel = over(connection, options.keep_alive).await?;
            let serves = serves(channel.clone()).await?;
            Ok(Self {
                endpoint,
                server,
                channel,
                serves,
                began_expired,
                renew_at: Mutex::new(renew_at),
                unwanted,
                closed,
            })
        };
        timeout(bound, attempt)
            .await
            .unwrap_or(Err(AttemptError::Slow(bound)))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// When new calls should use another connection.
    pub(super) fn renew_at(&self) -> Instant {
        *self.renew_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets when they should.
    pub(super) fn set_renew_at(&self, at: Instant) {
        *self.renew_at.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// Closes the connection, with all calls on it.
    pub(super) fn cut(&self) {
        self.unwanted.cancel();
    }
}

/// When a connection whose first certificate expires then should be replaced: when between a half and
/// three quarters of the time until then have passed. Random, so that the clients of a server whose
/// certificate they all saw at the same time do not come back at the same time.
fn renewal(not_after: Option<UnixTime>, now: UnixTime, instant: Instant) -> Instant {
    /// Instants have an end, too.
    const LONGEST: u64 = 366 * 24 * 3600;
    let left = not_after.map_or(LONGEST, |end| end.as_secs().saturating_sub(now.as_secs()));
    let left = Duration::from_secs(left.min(LONGEST));
    instant + left / 4000 * (2000 + below_a_thousand())
}

/// TCP and TLS handshake.
async fn handshake(
    endpoint: &Endpoint,
    tls: Arc<ClientConfig>,
) -> Result<TlsStream<TcpStream>, AttemptError> {
    TlsConnector::from(tls)
        .connect(any_name(), tcp(endpoint).await?)
        .await
        .map_err(|error| match tls::refused_certificate(&error) {
            Some(reason) => AttemptError::Certificate(reason),
            None => AttemptError::Tls(error),
        })
}

async fn tcp(endpoint: &Endpoint) -> Result<TcpStream, AttemptError> {
    let target = target(endpoint).map_err(AttemptError::Tcp)?;
    TcpStream::connect(target)
        .await
        .and_then(|stream| stream.set_nodelay(true).map(|()| stream))
        .map_err(AttemptError::Tcp)
}

/// The address of an endpoint. Host names only for programs that can resolve them.
#[cfg(feature = "names")]
fn target(endpoint: &Endpoint) -> io::Result<(&str, u16)> {
    Ok((&endpoint.host, endpoint.port))
}

/// The address of an endpoint, an IP address only: in a static program the C library resolves no
/// names, and its attempt to do so adds a quarter of a megabyte.
#[cfg(not(feature = "names"))]
fn target(endpoint: &Endpoint) -> io::Result<std::net::SocketAddr> {
    let Ok(ip) = endpoint.host.parse::<std::net::IpAddr>() else {
        let words = format!(
            "expected an IP address, got {:?}: host names are not resolved",
            endpoint.host
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, words));
    };
    Ok((ip, endpoint.port).into())
}

/// The certificate that the server presented and the handshake has verified.
fn leaf(stream: &TlsStream<TcpStream>) -> Option<&CertificateDer<'static>> {
    stream.get_ref().1.peer_certificates()?.first()
}

/// rustls requires a name; it is neither sent nor checked.
fn any_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([127, 0, 0, 1]).into())
}

/// HTTP/2 over this one connection. It does not reconnect.
async fn over(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    keep_alive: Duration,
) -> Result<Channel, AttemptError> {
    let mut stream = Some(stream);
    let once = Connector::new(move || {
        let stream = stream.take();
        async move { stream.ok_or_else(|| io::Error::other("the connection has ended")) }
    });
    // The name is used in the requests' authority and nowhere else.
    let endpoint = tonic::transport::Endpoint::from_static("http://curator.hearth")
        .http2_keep_alive_interval(keep_alive)
        .keep_alive_timeout(keep_alive / 2)
        .keep_alive_while_idle(true);
    once.connect(&endpoint).await.map_err(AttemptError::Http2)
}

/// Whether the server reports that it is serving. A server without the health service counts as
/// serving.
async fn serves(channel: Channel) -> Result<bool, AttemptError> {
    let answer = HealthClient::new(channel)
        .check(HealthCheckRequest::default())
        .await;
    match answer {
        Ok(answer) => Ok(answer.get_ref().status() != ServingStatus::NotServing),
        // A server that rejects our certificate closes the connection after the handshake: in TLS
        // 1.3 the client's handshake is complete before the server has seen its certificate.
        Err(status) if std::error::Error::source(&status).is_some() => {
            Err(AttemptError::Ended(Box::new(status)))
        }
        Err(_) => Ok(true),
    }
}

/// A channel over one new connection to one endpoint. It does not reconnect: for first contact,
/// where the certificate of this particular connection matters.
pub(crate) async fn connect_one(
    endpoint: &Endpoint,
    tls: Arc<ClientConfig>,
    bound: Duration,
) -> Result<Channel, AttemptError> {
    let stream = timeout(bound, handshake(endpoint, tls))
        .await
        .unwrap_or(Err(AttemptError::Slow(bound)))?;
    over(stream, super::KEEP_ALIVE).await
}

/// The same without TLS: for a node that has no certificate yet.
pub async fn connect_plain(endpoint: &Endpoint, bound: Duration) -> Result<Channel, AttemptError> {
    let connecting = async { over(tcp(endpoint).await?, super::KEEP_ALIVE).await };
    timeout(bound, connecting)
        .await
        .unwrap_or(Err(AttemptError::Slow(bound)))
}

/// A connection that is closed when the server's certificate expires, or when it is no longer
/// wanted. The server closes it when the client's expires.
struct Connection {
    stream: TlsStream<TcpStream>,
    end: End,
    /// Dropped by the owner of the HTTP/2 connection when it has been closed.
    _closed: DropGuard,
}

impl Connection {
    fn new(
        stream: TlsStream<TcpStream>,
        unwanted: CancellationToken,
        closed: DropGuard,
        not_after: Option<UnixTime>,
        clock: &Clock,
    ) -> Self {
        let end = End::with(unwanted, "endpoint no longer in use");
        let end = match not_after {
            Some(not_after) => end.or_past(not_after, Arc::clone(clock)),
            None => end,
        };
        Self {
            stream,
            end,
            _closed: closed,
        }
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
