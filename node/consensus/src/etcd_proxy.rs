//! The etcd proxy: etcd's own gRPC API, confined to the prefix of one user, for a program that
//! expects an etcd.
//!
//! It forwards calls ([`connection`]). Every key in a request gets the user's prefix, every key in
//! a response loses it, and a range end that means "to the end of the store" becomes the end of the
//! prefix. Both ends of a range begin with the prefix, so everything in it does, and nothing else
//! in the store can be read, written, watched or compared. A response with any other key in it is
//! not forwarded.
//!
//! What belongs to the whole store and not to a prefix:
//! - *Leases.* The ID of a lease that is granted here contains a mark; other leases can neither be
//!   used, renewed, inspected nor revoked. This needs no state, so it holds after a restart and on
//!   all nodes.
//! - *Revisions* are the store's. They also grow by the writes of others, which etcd allows anyway.
//! - *Compaction* would discard the history of others. etcd compacts itself every hour; the call is
//!   answered with `UNIMPLEMENTED`.
//! - *Status and alarms* are read-only. Members, users, snapshots and the rest are not available.
//! - *Space.* When the user has used up its [`quota`], calls that would write are refused.
//!
//! Streams are forwarded message by message, at the speed of the slower side: nothing is queued
//! here beyond the windows of HTTP/2. A message is in memory while it is forwarded, and the lists of
//! a user who asks for everything at once are large, so all answers together are limited
//! ([`AnswerMemory`]): one that exceeds the limit fails, and the user's watches are made again. It
//! does not wait for the others, because its unread bytes would fill the window that they need.
//!
//! The messages are generated from a proto file of Hearth's own (`proto/etcd.proto`). Hearth itself calls etcd with the
//! crate `etcd-client`, whose request types are not public and whose responses can only be read.
//!
//! Calls that are not listed in [`connection`] are not available, and a request with an unknown
//! operation is refused: what cannot be confined is not forwarded.
//!
//! Why a proxy and not a prefix in the program's own configuration: that would only confine a
//! program that is correct. Why not an etcd of its own: two stores have two quorums, two sets of
//! members and twice the memory, on each controller.

mod connection;
mod key_prefix;
mod leases;
mod messages;
pub mod quota;

/// Messages of etcd's API, generated from `proto/etcd.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, rust_2018_idioms)]
mod wire {
    tonic::include_proto!("etcdserverpb");
}

use std::time::Duration;

use hearth_base::event::Value;
use hearth_sys::memory;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::client::{NO_SPACE, NamespacedClient};
use key_prefix::KeyPrefix;
use messages::{AnswerMemory, Call, Upward};
use quota::Capacity;
use wire::alarm_request::AlarmAction;
use wire::{AlarmRequest, AlarmResponse, StatusRequest, StatusResponse};

/// Timeout of a call to etcd. etcd's own is seven seconds, and callers have shorter ones.
const CALL_BOUND: Duration = Duration::from_secs(60);
/// Maximum size of a request. etcd itself refuses those that are longer than 1.5 MiB, with an error
/// that its users know.
const LARGEST_REQUEST: usize = 4 << 20;
/// Limits of the size of all answers of etcd that are being forwarded, and of each of them: a
/// sixteenth of the machine's memory between these. An API server lists ten thousand objects at
/// once. While it is forwarded, an answer takes up to three times its size.
const ANSWERS: (u64, u64) = (64 << 20, 512 << 20);

/// Serves one program, confined to the client's namespace, on the connections that the listener
/// accepts. Writes are refused while `capacity` says that the store is full. When `over` is
/// cancelled, streams end; returns once the pending calls have ended, too.
pub async fn serve(
    listener: UnixListener,
    client: &NamespacedClient,
    capacity: Value<Capacity>,
    over: CancellationToken,
) {
    let answers = (memory::total() / 16).clamp(ANSWERS.0, ANSWERS.1);
    let proxy = EtcdProxy::new(client, capacity, answers, over);
    connection::serve(listener, proxy).await;
}

#[derive(Clone)]
struct EtcdProxy {
    client: NamespacedClient,
    prefix: KeyPrefix,
    capacity: Value<Capacity>,
    answers: AnswerMemory,
    over: CancellationToken,
}

impl EtcdProxy {
    /// `answers` is how many bytes answers may take together.
    fn new(
        client: &NamespacedClient,
        capacity: Value<Capacity>,
        answers: u64,
        over: CancellationToken,
    ) -> Self {
        Self {
            client: client.clone(),
            prefix: KeyPrefix::new(client.prefix().as_bytes()),
            capacity,
            answers: AnswerMemory::of(answers),
            over,
        }
    }

    /// Checked before calls that would write.
    fn has_capacity(&self) -> Result<(), Status> {
        match self.capacity.get() {
            Some(Capacity::Full { .. }) => Err(Status::resource_exhausted(NO_SPACE)),
            Some(Capacity::Enough) | None => Ok(()),
        }
    }

    /// Lists alarms.
    async fn alarm(&self, up: &Upward<'_>, request: AlarmRequest) -> Result<AlarmResponse, Status> {
        if request.action() != AlarmAction::Get {
            return Err(Status::permission_denied(
                "the store is shared: alarms are read-only here",
            ));
        }
        up.ask(&request).await
    }
}

impl Call for AlarmRequest {
    const PATH: &'static str = "/etcdserverpb.Maintenance/Alarm";
    type Answer = AlarmResponse;
}

impl Call for StatusRequest {
    const PATH: &'static str = "/etcdserverpb.Maintenance/Status";
    type Answer = StatusResponse;
}

/// The error for a call that is not available.
fn not_here(path: &str) -> Status {
    Status::unimplemented(match path {
        "/etcdserverpb.KV/Compact" => "the store is shared: etcd compacts itself every hour",
        "/etcdserverpb.Maintenance/Defragment" => {
            "the store is shared: its members defragment themselves"
        }
        _ => "the store is shared: this call is not available",
    })
}

#[cfg(test)]
mod tests;
