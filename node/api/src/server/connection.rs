//! An accepted connection: a stream with its peer and the reasons to close it.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::places::{Activity, Place};
use crate::lifetime::End;
use crate::tls::PeerCertificate;

/// Information for handlers about the connection of a call.
#[derive(Clone, Debug)]
pub struct ConnectionInfo {
    /// What the handshake has proven about the peer.
    pub peer: PeerCertificate,
    /// The peer's address.
    pub remote: SocketAddr,
    /// The local address.
    pub local: SocketAddr,
    /// The calls on the connection: an idle one is replaced first.
    pub(super) activity: Arc<Activity>,
}

/// The underlying byte stream.
pub(super) enum Stream {
    Tls(Box<TlsStream<TcpStream>>),
    Plain(TcpStream),
    /// Of a program of this machine.
    Local(UnixStream),
}

/// How often a socket that waits for its handshake is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Waits until the peer has closed the connection. Reads nothing: what has arrived belongs to the handshake,
/// and while it lies there, the socket is readable all the time.
pub(super) async fn closed(socket: &TcpStream) {
    while let Ok(ready) = socket.ready(Interest::READABLE).await {
        if ready.is_read_closed() {
            return;
        }
        sleep(LOOK_EVERY).await;
    }
}

/// An accepted connection.
pub(super) struct Connection {
    stream: Stream,
    /// None for a program of this machine.
    info: Option<ConnectionInfo>,
    end: End,
    /// Its slot, until it is dropped; none for a program of this machine.
    _place: Option<Place>,
}

impl Connection {
    pub(super) fn new(stream: Stream, info: ConnectionInfo, end: End, place: Place) -> Self {
        Self {
            stream,
            info: Some(info),
            end,
            _place: Some(place),
        }
    }

    /// Of a program of this machine.
    pub(super) fn local(stream: UnixStream, end: End) -> Self {
        Self {
            stream: Stream::Local(stream),
            info: None,
            end,
            _place: None,
        }
    }

    /// Whether this is a TLS connection of a peer without a certificate of the cluster. A plain
    /// connection could not present one.
    pub(super) fn is_unauthenticated(&self) -> bool {
        let peer = self.info.as_ref().map(|info| &info.peer);
        let named = matches!(peer, Some(PeerCertificate::Identified { .. }));
        matches!(self.stream, Stream::Tls(_)) && !named
    }
}

impl Connected for Connection {
    type ConnectInfo = Option<ConnectionInfo>;

    fn connect_info(&self) -> Option<ConnectionInfo> {
        self.info.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.end.poll(cx)?;
        match &mut self.stream {
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Stream::Local(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.end.poll(cx)?;
        match &mut self.stream {
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Local(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end.poll(cx)?;
        match &mut self.stream {
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Local(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A connection that has to be closed does not wait for its peer.
        self.end.poll(cx)?;
        match &mut self.stream {
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Local(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
