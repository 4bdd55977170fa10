//! The API server's access to etcd: the cluster's etcd, confined to the prefix of Kubernetes
//! ([`etcd_proxy`]), on a unix socket.
//!
//! A process that can open the socket can write all data of Kubernetes, so the socket is in a
//! directory with mode 0700, which is the working directory of the API server: etcd's clients treat
//! `unix://NAME:PORT` as a path relative to the working directory.
//!
//! The curators use the same database, and Kubernetes is what grows: its writes fail above three
//! quarters of etcd's quota ([`etcd_proxy::quota`]), so that there is always space for the cluster
//! itself.
//!
//! The etcd of another node is never used: on a node whose etcd does not serve, the API server is
//! not ready, and clients use other API servers.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_base::event::Writer;
use hearth_base::in_use::ReadLock;
use hearth_base::supervisor::{Context, Outcome};
use hearth_consensus::etcd_proxy::quota::{self, Capacity};
use hearth_consensus::{NamespacedClient, QUOTA, etcd_proxy};
use hearth_sys::files::{self, FileError};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use super::program::USERS_WITHIN;

/// The socket's name, which must look like a host with a port.
const SOCKET: &str = "client:0";
/// Up to this size of the data in use, Kubernetes may write. The rest is large enough that it is
/// not filled between two measurements.
const MAX_IN_USE_BYTES: u64 = QUOTA / 4 * 3;

/// Shutdown timeout: first the API server ends, then its connections.
const END_WITHIN: Duration = USERS_WITHIN.saturating_add(Duration::from_secs(2));

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    /// The directory cannot be created.
    #[error("cannot create the directory of the API server's etcd socket")]
    Directory(#[from] FileError),
    /// The socket cannot be bound.
    #[error("cannot listen on {socket}")]
    Listen {
        /// Path of the socket.
        socket: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The URL of etcd for the API server, relative to its working directory.
pub(crate) fn url() -> String {
    format!("unix://{SOCKET}")
}

/// Serves the client's namespace of etcd on the socket in `directory`. After it is cancelled, it
/// waits until the API server has ended: that removes its own endpoint from etcd when it stops,
/// otherwise clients would be sent to it for a while.
pub(crate) async fn run(
    ctx: Context,
    directory: &Path,
    user: Option<u32>,
    client: &NamespacedClient,
    in_use: &ReadLock,
    capacity: &Writer<Capacity>,
) -> Outcome {
    ctx.ends_within(END_WITHIN);
    files::create_dir_durably(directory, 0o700).map_err(SocketError::from)?;
    let listener = listen(&directory.join(SOCKET), user)?;
    let over = CancellationToken::new();
    let end = async {
        ctx.cancelled().await;
        in_use.is_over("the API server", USERS_WITHIN).await;
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

/// Listens on a unix socket that only this user can open, besides root; `None`: the user of this process.
pub(crate) fn listen(socket: &Path, user: Option<u32>) -> Result<UnixListener, SocketError> {
    let failed = |source| SocketError::Listen {
        socket: socket.to_owned(),
        source,
    };
    // A process that was killed leaves its socket behind.
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(socket).map_err(failed)?;
    std::os::unix::fs::chown(socket, user, user).map_err(failed)?;
    Ok(listener)
}
