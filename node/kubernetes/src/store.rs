//! The API server's way to etcd: the consensus of the cluster, confined to the
//! prefix of Kubernetes ([`etcd_proxy`](hearth_consensus::etcd_proxy)), on a unix
//! socket of its own.
//!
//! Who can open the socket can write all that Kubernetes keeps, so it lies in a
//! directory for root alone, and is given to the API server by working there:
//! etcd's clients take `unix://NAME:PORT` for a path below the working
//! directory.
//!
//! The store is the curators', too, and Kubernetes is what grows: what it may
//! write ends at three quarters of etcd's quota ([`etcd_proxy::quota`]), so that
//! the cluster itself always has room.
//!
//! It never goes to another node's etcd: a node whose consensus does not serve
//! has an API server that is not ready, and others are asked instead.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_base::event::Writer;
use hearth_base::supervisor::{Context, Outcome};
use hearth_consensus::etcd_proxy::quota::{self, Capacity};
use hearth_consensus::{NamespacedClient, QUOTA, etcd_proxy};
use hearth_sys::files::{self, FileError};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use super::program::InUse;

/// The socket's name, which must look like a host with a port.
const SOCKET: &str = "client:0";
/// So much of the store may be in use while Kubernetes writes. Between two looks
/// at it nobody writes the rest.
const MAX_IN_USE_BYTES: u64 = QUOTA / 4 * 3;

/// For the API server to end first, and then for its connections, which go with
/// it.
const END_WITHIN: Duration = InUse::USERS.saturating_add(Duration::from_secs(2));

/// Why there is no way to etcd.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// The directory.
    #[error("make the directory of the API server's way to etcd")]
    Directory(#[from] FileError),
    /// The socket.
    #[error("listen on {socket}")]
    Socket {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// What the API server is told, whose working directory is the socket's.
pub(crate) fn url() -> String {
    format!("unix://{SOCKET}")
}

/// Serves the client's part of the store in the directory, until it is told to
/// end and the API server has ended: that one signs off in the store, or others
/// would be sent to it for a while.
pub(crate) async fn run(
    ctx: Context,
    directory: &Path,
    client: &NamespacedClient,
    in_use: &InUse,
    capacity: &Writer<Capacity>,
) -> Outcome {
    ctx.ends_within(END_WITHIN);
    let listener = listen(directory)?;
    let over = CancellationToken::new();
    let end = async {
        ctx.cancelled().await;
        in_use.is_over("the API server").await;
        over.cancel();
        std::future::pending::<Infallible>().await
    };
    ctx.healthy();
    tokio::select! {
        () = etcd_proxy::serve(listener, client, capacity.value(), over.clone()) => Ok(()),
        never = end => match never {},
        never = quota::watch(client, MAX_IN_USE_BYTES, quota::Timing::default(), capacity) => {
            match never {}
        }
    }
}

fn listen(directory: &Path) -> Result<UnixListener, StoreError> {
    files::create_dir_durably(directory, 0o700)?;
    let socket = directory.join(SOCKET);
    let failed = |source| StoreError::Socket {
        socket: socket.clone(),
        source,
    };
    // One that was not ended in order leaves its socket.
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    UnixListener::bind(&socket).map_err(failed)
}
