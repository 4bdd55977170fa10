//! One accepted connection: a stream that knows its peer and its end.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::places::{Activity, Place};
use crate::lifetime::End;
use crate::tls::PeerCertificate;

/// What handlers can know of the connection that a call came by.
#[derive(Clone, Debug)]
pub struct ConnectionInfo {
    /// What the handshake has proven.
    pub peer: PeerCertificate,
    /// The other end.
    pub remote: SocketAddr,
    /// This end.
    pub local: SocketAddr,
    /// Who has nothing to do gives way first.
    pub(super) activity: Arc<Activity>,
}

/// What carries the bytes.
pub(super) enum Stream {
    Tls(Box<TlsStream<TcpStream>>),
    Plain(TcpStream),
}

/// An accepted connection.
pub(super) struct Connection {
    stream: Stream,
    info: ConnectionInfo,
    end: End,
    /// Its place among those that there may be.
    _place: Place,
}

impl Connection {
    pub(super) fn new(stream: Stream, info: ConnectionInfo, end: End, place: Place) -> Self {
        Self {
            stream,
            info,
            end,
            _place: place,
        }
    }

    /// Whether the peer could have shown that the cluster has named it, and has
    /// not. On a plain connection nobody could.
    pub(super) fn is_strangers(&self) -> bool {
        let named = matches!(self.info.peer, PeerCertificate::Identified { .. });
        matches!(self.stream, Stream::Tls(_)) && !named
    }
}

impl Connected for Connection {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
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
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end.poll(cx)?;
        match &mut self.stream {
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A connection that has to end does not wait for its peer.
        self.end.poll(cx)?;
        match &mut self.stream {
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
