//! Services for programs of this machine, through a unix socket.
//!
//! The socket's owner and mode say who may connect, so there are no calls to authorize, and no limits: who may call may
//! do more than that. Connections have the type of all others, because the code of HTTP/2, some 50 KB, is compiled for
//! each type of them.

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::connection::Connection;
use super::{ACCEPT_AGAIN, ServeError, Services};
use crate::lifetime::End;

/// Serves until `cancel`, which closes all connections.
///
/// # Errors
/// If tonic's server fails.
pub fn serve_local(
    listener: UnixListener,
    services: Services,
    cancel: CancellationToken,
) -> BoxFuture<'static, Result<(), ServeError>> {
    let connections = cancel.clone();
    let incoming = stream::unfold(listener, |listener| async {
        Some((accept(&listener).await, listener))
    })
    .map(move |stream| {
        let end = End::with(connections.clone(), "the server is shutting down");
        Ok::<_, std::io::Error>(Connection::local(stream, end))
    });
    let serving = tonic::transport::Server::builder().serve_with_incoming_shutdown(
        services,
        incoming,
        cancel.cancelled_owned(),
    );
    Box::pin(async { serving.await.map_err(ServeError::Local) })
}

async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                warn!(%error, "cannot accept connections of this machine; retrying");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}
