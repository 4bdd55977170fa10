//! etcd's own interface, confined to the prefix of one user: what a program
//! that speaks to an etcd is given in place of etcd.
//!
//! It passes calls on ([`connection`]). Every key that goes up gets the user's
//! prefix, every key that comes down loses it, and the end of a range that
//! means "to the end of everything" means the end of the prefix. A range lies
//! between two keys that begin with the prefix, so everything in it does, and
//! nothing else of the store can be read, written, watched or compared. An
//! answer with any other key in it is not passed on.
//!
//! What belongs to the whole store and to nobody's prefix:
//! - *Leases.* A lease that was granted here bears a mark in its number, chosen
//!   here; others can neither be used, renewed, looked at nor revoked. Nothing
//!   has to be remembered for it, so it holds over restarts and on all nodes.
//! - *Revisions* are the store's. They grow by what others write, too, which
//!   etcd promises nobody not to happen.
//! - *Compaction* would forget others' history. etcd compacts itself every
//!   hour; a call for it is answered as one that is not there.
//! - *Status and alarms* can be read and not changed. Members, users, snapshots
//!   and the rest are not there.
//! - *Space.* Where there is no capacity ([`quota`]) any more for this user,
//!   nothing is passed on that would write.
//!
//! Streams are passed on message by message, as fast as the slower side takes
//! them: nothing is queued here beyond the windows of HTTP/2.
//!
//! What is not named in [`connection`] is not there, and a request with an
//! operation that is not known here is refused: what cannot be confined is not
//! passed on.
//!
//! Why in front of etcd and not a prefix by the program's own setting: that
//! would confine a program that is right, and nothing else. Why not an etcd of
//! its own: two stores have two quorums, two sets of members and twice the
//! memory, on each controller.

mod connection;
mod key_prefix;
mod leases;
mod messages;
pub mod quota;

use std::time::Duration;

use hearth_base::event::Value;
use tokio::net::UnixListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::client::{NO_SPACE, NamespacedClient};
use super::wire::alarm_request::AlarmAction;
use super::wire::maintenance_client::MaintenanceClient;
use super::wire::{AlarmRequest, AlarmResponse, StatusRequest, StatusResponse};

use key_prefix::KeyPrefix;
use quota::Capacity;

/// A call that etcd has not answered for so long is given up. etcd itself gives
/// up after seven seconds; a caller that has a bound of its own is shorter.
const CALL_BOUND: Duration = Duration::from_secs(60);
/// An API server asks for ten thousand objects at once, of which one may have a
/// megabyte; memory, not this, is what such a list meets first.
const LARGEST_MESSAGE: usize = 512 << 20;

/// Serves the one program that a client's part of the store is for, by the
/// connections that the listener takes. Nothing is written while `capacity` says
/// that there is none. When it is `over`, streams end; returns when what was
/// under way has ended, too.
pub async fn serve(
    listener: UnixListener,
    client: &NamespacedClient,
    capacity: Value<Capacity>,
    over: CancellationToken,
) {
    let proxy = EtcdProxy {
        client: client.clone(),
        prefix: KeyPrefix::new(client.prefix().as_bytes()),
        capacity,
        over,
    };
    connection::serve(listener, proxy).await;
}

/// See the module.
#[derive(Clone)]
struct EtcdProxy {
    client: NamespacedClient,
    prefix: KeyPrefix,
    capacity: Value<Capacity>,
    over: CancellationToken,
}

impl EtcdProxy {
    /// For what would write.
    fn has_capacity(&self) -> Result<(), Status> {
        match self.capacity.get() {
            Some(Capacity::Full { .. }) => Err(Status::resource_exhausted(NO_SPACE)),
            Some(Capacity::Enough) | None => Ok(()),
        }
    }

    fn maintenance(&self) -> MaintenanceClient<Channel> {
        MaintenanceClient::new(self.client.channel())
    }

    /// Tells of alarms.
    async fn alarm(&self, request: AlarmRequest) -> Result<AlarmResponse, Status> {
        if request.action() != AlarmAction::Get {
            return Err(Status::permission_denied(
                "the store is shared: its alarms can be read here, and not changed",
            ));
        }
        bounded(self.maintenance().alarm(request)).await
    }

    /// Tells how etcd is.
    async fn status(&self, request: StatusRequest) -> Result<StatusResponse, Status> {
        bounded(self.maintenance().status(request)).await
    }
}

/// Why a call cannot be made.
fn not_here(path: &str) -> Status {
    Status::unimplemented(match path {
        "/etcdserverpb.KV/Compact" => "the store is shared: it compacts itself, every hour",
        "/etcdserverpb.Maintenance/Defragment" => {
            "the store is shared: its members make room for themselves"
        }
        _ => "the store is shared: this is not for one of its users",
    })
}

/// One call by tonic's client, and etcd's answer.
async fn bounded<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Status> {
    let answer = async { call.await.map_err(|status| messages::told(&status)) };
    answered(answer).await.map(Response::into_inner)
}

/// Waits for etcd's answer.
async fn answered<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let silent = |_| Err(Status::unavailable("etcd does not answer"));
    timeout(CALL_BOUND, call).await.unwrap_or_else(silent)
}

#[cfg(test)]
mod tests;
