//! gRPC channels over any byte stream: a Unix socket, TLS, an existing connection.
//!
//! tonic's client is generic over the connector, and all of it down to HTTP/2 is compiled again for
//! each connector type. [`Connector`] is one type for all of them, so the node contains that code
//! once.

use std::future::Future;
use std::io;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::transport::{Channel, Endpoint, Error};
use tower::Service;

/// A byte stream in both directions.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Io for S {}

type Connected = io::Result<TokioIo<Box<dyn Io>>>;

/// Makes connections. The closure knows the address; the URI of the endpoint is only a name in
/// requests.
pub struct Connector(Box<dyn FnMut() -> BoxFuture<'static, Connected> + Send>);

impl Connector {
    /// Each call of `connect` makes one connection.
    pub fn new<F, S>(mut connect: impl FnMut() -> F + Send + 'static) -> Self
    where
        F: Future<Output = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        Self(Box::new(move || {
            let connecting = connect();
            Box::pin(async { Ok(TokioIo::new(Box::new(connecting.await?) as Box<dyn Io>)) })
        }))
    }

    /// A channel that connects at the first call, and again whenever the connection was lost.
    pub fn channel(self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_with_connector_lazy(self)
    }

    /// A channel that is connected already.
    pub(crate) async fn connect(self, endpoint: &Endpoint) -> Result<Channel, Error> {
        endpoint.connect_with_connector(self).await
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Io>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, Connected>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        (self.0)()
    }
}
