//! One connection to one endpoint.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ClientConfig;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::list::Servers;
use super::{AttemptError, Endpoint, Options};
use crate::certificates;
use crate::identity::Identity;
use crate::lifetime::End;
use crate::tls::{self, Clock};
use crate::transport::Connector;

/// A connection that calls can go by, until it is closed.
pub(super) struct Line {
    pub(super) endpoint: Endpoint,
    /// Who is there, by its certificate.
    pub(super) server: Option<Identity>,
    pub(super) channel: Channel,
    /// Whether the server said, when asked at the beginning, that it serves.
    pub(super) serves: bool,
    /// To be cancelled when the connection has to end.
    unwanted: CancellationToken,
    /// Cancelled when the connection has ended.
    closed: CancellationToken,
}

impl Line {
    /// TCP, TLS and HTTP/2 to one endpoint, and its word on how it is. Whoever
    /// is none of these servers is asked nothing.
    pub(super) async fn open(
        endpoint: Endpoint,
        servers: &Servers,
        tls: Arc<ClientConfig>,
        options: &Options,
    ) -> Result<Self, AttemptError> {
        let bound = options.connect_timeout;
        let attempt = async {
            let stream = handshake(&endpoint, tls).await?;
            let server = leaf(&stream).and_then(|leaf| certificates::identity(leaf).ok());
            servers
                .check(server.as_ref())
                .map_err(AttemptError::Certificate)?;
            let (unwanted, closed) = (CancellationToken::new(), CancellationToken::new());
            let connection = Connection::new(
                stream,
                unwanted.clone(),
                closed.clone().drop_guard(),
                &options.clock,
            );
            let channel = over(connection, options.keep_alive).await?;
            let serves = serves(channel.clone()).await?;
            Ok(Self {
                endpoint,
                server,
                channel,
                serves,
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

    /// Ends it, with everything that runs on it.
    pub(super) fn cut(&self) {
        self.unwanted.cancel();
    }
}

/// TCP and TLS.
async fn handshake(
    endpoint: &Endpoint,
    tls: Arc<ClientConfig>,
) -> Result<TlsStream<TcpStream>, AttemptError> {
    let target = target(endpoint).map_err(AttemptError::Tcp)?;
    let stream = TcpStream::connect(target)
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
}

/// Where an endpoint is. Names are for whoever has somebody to resolve them.
#[cfg(feature = "names")]
fn target(endpoint: &Endpoint) -> io::Result<(&str, u16)> {
    Ok((&endpoint.host, endpoint.port))
}

/// Where an endpoint is: at an address. In a static program the C library
/// resolves no names, and what it tries weighs a quarter of a megabyte.
#[cfg(not(feature = "names"))]
fn target(endpoint: &Endpoint) -> io::Result<std::net::SocketAddr> {
    let Ok(ip) = endpoint.host.parse::<std::net::IpAddr>() else {
        let words = format!(
            "{:?}: an address is wanted, no names are resolved",
            endpoint.host
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, words));
    };
    Ok((ip, endpoint.port).into())
}

/// What the server has shown, and the handshake has judged.
fn leaf(stream: &TlsStream<TcpStream>) -> Option<&CertificateDer<'static>> {
    stream.get_ref().1.peer_certificates()?.first()
}

/// rustls wants a name; it is neither sent nor looked at.
fn any_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([127, 0, 0, 1]).into())
}

/// HTTP/2 over this one connection. When it ends there is no other.
async fn over(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    keep_alive: Duration,
) -> Result<Channel, AttemptError> {
    let mut stream = Some(stream);
    let once = Connector::new(move || {
        let stream = stream.take();
        async move { stream.ok_or_else(|| io::Error::other("the connection has ended")) }
    });
    // The name goes into the requests' authority and nowhere else.
    let endpoint = tonic::transport::Endpoint::from_static("http://curator.hearth")
        .http2_keep_alive_interval(keep_alive)
        .keep_alive_timeout(keep_alive / 2)
        .keep_alive_while_idle(true);
    once.connect(&endpoint).await.map_err(AttemptError::Http2)
}

/// Whether the server says that it serves. One that does not know the question
/// is no worse for that.
async fn serves(channel: Channel) -> Result<bool, AttemptError> {
    let answer = HealthClient::new(channel)
        .check(HealthCheckRequest::default())
        .await;
    match answer {
        Ok(answer) => Ok(answer.get_ref().status() != ServingStatus::NotServing),
        // A server that refuses our certificate does so after the handshake,
        // for that is how TLS 1.3 goes.
        Err(status) if std::error::Error::source(&status).is_some() => {
            Err(AttemptError::Ended(Box::new(status)))
        }
        Err(_) => Ok(true),
    }
}

/// A channel over one connection to one endpoint, made now. It does not
/// reconnect: for first contact, where the certificate of this very
/// connection matters.
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

/// A connection that ends with the server's certificate, or when it is no
/// longer wanted.
struct Connection {
    stream: TlsStream<TcpStream>,
    end: End,
    /// Whoever speaks HTTP/2 on it drops it when it has ended.
    _closed: DropGuard,
}

impl Connection {
    fn new(
        stream: TlsStream<TcpStream>,
        unwanted: CancellationToken,
        closed: DropGuard,
        clock: &Clock,
    ) -> Self {
        let not_after = leaf(&stream).and_then(|leaf| certificates::not_after(leaf).ok());
        let end = End::with(unwanted, "the endpoint is no longer wanted");
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
