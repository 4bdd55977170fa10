//! etcd's own interface, confined to the prefix of one user: what a program
//! that speaks to an etcd is given in place of etcd.
//!
//! It is a server that passes calls on. Every key that goes up gets the user's
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
//! - *Space.* Where there is no [`room`] any more for this user, nothing is
//!   passed on that would write.
//!
//! Streams are passed on message by message, as fast as the slower side takes
//! them: nothing is queued here beyond the windows of HTTP/2.
//!
//! Why in front of etcd and not a prefix by the program's own setting: that
//! would confine a program that is right, and nothing else. Why not an etcd of
//! its own: two stores have two quorums, two sets of members and twice the
//! memory, on each controller.

pub mod room;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use hearth_api::identity::random_bytes;
use hearth_api::server::Services;
use hearth_base::event::Value;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status, Streaming};

use super::client::{NamespacedClient, successor};
use super::space::NO_SPACE;
use super::wire::kv_client::KvClient;
use super::wire::kv_server::{Kv, KvServer};
use super::wire::lease_client::LeaseClient;
use super::wire::lease_server::{Lease, LeaseServer};
use super::wire::maintenance_client::MaintenanceClient;
use super::wire::maintenance_server::{Maintenance, MaintenanceServer};
use super::wire::request_op::Request as Asked;
use super::wire::response_op::Response as Answered;
use super::wire::watch_client::WatchClient;
use super::wire::watch_request::RequestUnion;
use super::wire::watch_server::{Watch, WatchServer};
use super::wire::{
    AlarmRequest, AlarmResponse, CompactionRequest, CompactionResponse, Compare, DefragmentRequest,
    DefragmentResponse, DeleteRangeRequest, DeleteRangeResponse, KeyValue, LeaseGrantRequest,
    LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseLeasesRequest,
    LeaseLeasesResponse, LeaseRevokeRequest, LeaseRevokeResponse, LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse, PutRequest, PutResponse, RangeRequest, RangeResponse, RequestOp,
    ResponseOp, StatusRequest, StatusResponse, TxnRequest, TxnResponse, WatchRequest,
    WatchResponse, alarm_request::AlarmAction,
};
use room::Room;

/// A call that etcd has not answered for so long is given up. etcd itself gives
/// up after seven seconds; a caller that has a bound of its own is shorter.
const CALL_BOUND: Duration = Duration::from_secs(60);
/// An API server asks for ten thousand objects at once, of which one may have a
/// megabyte; memory, not this, is what such a list meets first.
const LARGEST_MESSAGE: usize = 512 << 20;
/// Transactions in transactions; etcd's callers have none.
const DEEPEST: usize = 4;
/// How often a lease's number is drawn again that is taken.
const LEASE_DRAWS: usize = 4;
/// The upper half of the number of every lease that is granted here. A number
/// is positive, and etcd draws its own at random.
const LEASE_MARK: i64 = 0x4b75_6265;
/// etcd's callers may want to hear at once that there is no leader.
const REQUIRE_LEADER: &str = "hasleader";

/// etcd's words, by which its callers know what is meant.
const EMPTY_KEY: &str = "etcdserver: key is not provided";
const NO_SUCH_LEASE: &str = "etcdserver: requested lease not found";

/// The services, for whoever serves them to the one program that they are for.
/// Nothing is written while `room` says that there is none. Streams end when
/// `over` is cancelled.
pub fn services(client: &NamespacedClient, room: Value<Room>, over: CancellationToken) -> Services {
    let confined = Confined {
        channel: client.channel.clone(),
        names: Names::new(client.prefix().as_bytes()),
        room,
        over,
    };
    Services::new()
        .with(
            KvServer::new(confined.clone())
                .max_decoding_message_size(LARGEST_MESSAGE)
                .max_encoding_message_size(LARGEST_MESSAGE),
        )
        .with(WatchServer::new(confined.clone()).max_encoding_message_size(LARGEST_MESSAGE))
        .with(LeaseServer::new(confined.clone()))
        .with(MaintenanceServer::new(confined))
}

/// One user's prefix.
#[derive(Clone)]
struct Names {
    prefix: Arc<[u8]>,
    /// The first key behind it.
    end: Arc<[u8]>,
}

impl Names {
    fn new(prefix: &[u8]) -> Self {
        Self {
            prefix: prefix.into(),
            end: successor(prefix).into(),
        }
    }

    /// A key, as the store has it.
    fn up(&self, key: &mut Vec<u8>) -> Result<(), Status> {
        if key.is_empty() {
            return Err(Status::invalid_argument(EMPTY_KEY));
        }
        key.splice(..0, self.prefix.iter().copied());
        Ok(())
    }

    /// The end of a range, as the store has it. Empty is no range, and one zero
    /// byte the end of everything.
    fn end_up(&self, end: &mut Vec<u8>) {
        match &end[..] {
            [] => {}
            [0] => *end = self.end.to_vec(),
            _ => drop(end.splice(..0, self.prefix.iter().copied())),
        }
    }

    /// A key, as the program has it.
    fn down(&self, key: &mut Vec<u8>) -> Result<(), Status> {
        if !key.starts_with(&self.prefix) {
            return Err(Status::internal("etcd answered with somebody else's key"));
        }
        key.drain(..self.prefix.len());
        Ok(())
    }

    fn all_down<'a>(
        &self,
        records: impl IntoIterator<Item = &'a mut KeyValue>,
    ) -> Result<(), Status> {
        let mut records = records.into_iter();
        records.try_for_each(|record| self.down(&mut record.key))
    }

    fn range_up(&self, request: &mut RangeRequest) -> Result<(), Status> {
        self.up(&mut request.key)?;
        self.end_up(&mut request.range_end);
        Ok(())
    }

    fn put_up(&self, request: &mut PutRequest) -> Result<(), Status> {
        if request.lease != 0 && !is_ours(request.lease) {
            return Err(Status::not_found(NO_SUCH_LEASE));
        }
        self.up(&mut request.key)
    }

    fn delete_up(&self, request: &mut DeleteRangeRequest) -> Result<(), Status> {
        self.up(&mut request.key)?;
        self.end_up(&mut request.range_end);
        Ok(())
    }

    fn compare_up(&self, compare: &mut Compare) -> Result<(), Status> {
        self.up(&mut compare.key)?;
        self.end_up(&mut compare.range_end);
        Ok(())
    }

    fn txn_up(&self, request: &mut TxnRequest, depth: usize) -> Result<(), Status> {
        if depth > DEEPEST {
            return Err(Status::invalid_argument("too many transactions in another"));
        }
        for compare in &mut request.compare {
            self.compare_up(compare)?;
        }
        for operation in request.success.iter_mut().chain(&mut request.failure) {
            self.operation_up(operation, depth)?;
        }
        Ok(())
    }

    fn operation_up(&self, operation: &mut RequestOp, depth: usize) -> Result<(), Status> {
        match &mut operation.request {
            Some(Asked::RequestRange(range)) => self.range_up(range),
            Some(Asked::RequestPut(put)) => self.put_up(put),
            Some(Asked::RequestDeleteRange(delete)) => self.delete_up(delete),
            Some(Asked::RequestTxn(txn)) => self.txn_up(txn, depth + 1),
            // One that is not known here would pass by what is above.
            None => Err(Status::invalid_argument("an operation of an unknown kind")),
        }
    }

    fn txn_down(&self, answer: &mut TxnResponse) -> Result<(), Status> {
        let mut answers = answer.responses.iter_mut();
        answers.try_for_each(|answer| self.operation_down(answer))
    }

    fn operation_down(&self, answer: &mut ResponseOp) -> Result<(), Status> {
        match &mut answer.response {
            Some(Answered::ResponseRange(range)) => self.all_down(&mut range.kvs),
            Some(Answered::ResponsePut(put)) => self.all_down(&mut put.prev_kv),
            Some(Answered::ResponseDeleteRange(delete)) => self.all_down(&mut delete.prev_kvs),
            Some(Answered::ResponseTxn(txn)) => self.txn_down(txn),
            None => Ok(()),
        }
    }

    /// A watch without a key is one from the first key on.
    fn watch_up(&self, request: &mut WatchRequest) {
        if let Some(RequestUnion::CreateRequest(create)) = &mut request.request_union {
            create.key.splice(..0, self.prefix.iter().copied());
            self.end_up(&mut create.range_end);
        }
    }

    fn watch_down(&self, answer: &mut WatchResponse) -> Result<(), Status> {
        for event in &mut answer.events {
            self.all_down(&mut event.kv)?;
            self.all_down(&mut event.prev_kv)?;
        }
        Ok(())
    }
}

/// Whether a lease was granted here.
const fn is_ours(lease: i64) -> bool {
    lease >> 32 == LEASE_MARK
}

/// Whether it may write, by how its comparisons end.
fn may_put(txn: &TxnRequest) -> bool {
    let mut operations = txn.success.iter().chain(&txn.failure);
    operations.any(|operation| match &operation.request {
        Some(Asked::RequestPut(_)) => true,
        Some(Asked::RequestTxn(inner)) => may_put(inner),
        _ => false,
    })
}

/// What was said, without what belongs to the way it came.
fn told(status: Status) -> Status {
    Status::new(status.code(), status.message())
}

/// The same call, upwards.
fn onward<T>(metadata: &MetadataMap, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(value) = metadata.get(REQUIRE_LEADER) {
        request.metadata_mut().insert(REQUIRE_LEADER, value.clone());
    }
    request
}

/// Waits for etcd's answer.
async fn bounded<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Status> {
    match tokio::time::timeout(CALL_BOUND, call).await {
        Ok(answer) => answer.map(Response::into_inner).map_err(told),
        Err(_) => Err(Status::unavailable("etcd does not answer")),
    }
}

/// See the module.
#[derive(Clone)]
struct Confined {
    channel: Channel,
    names: Names,
    room: Value<Room>,
    over: CancellationToken,
}

impl Confined {
    /// For what would write.
    fn has_room(&self) -> Result<(), Status> {
        match self.room.get() {
            Some(Room::Full { .. }) => Err(Status::resource_exhausted(NO_SPACE)),
            Some(Room::Enough) | None => Ok(()),
        }
    }

    fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.channel.clone())
            .max_decoding_message_size(LARGEST_MESSAGE)
            .max_encoding_message_size(LARGEST_MESSAGE)
    }

    fn lease(&self) -> LeaseClient<Channel> {
        LeaseClient::new(self.channel.clone())
    }

    fn maintenance(&self) -> MaintenanceClient<Channel> {
        MaintenanceClient::new(self.channel.clone())
    }
}

#[tonic::async_trait]
impl Kv for Confined {
    async fn range(
        &self,
        request: Request<RangeRequest>,
    ) -> Result<Response<RangeResponse>, Status> {
        let (metadata, _, mut message) = request.into_parts();
        self.names.range_up(&mut message)?;
        let mut answer = bounded(self.kv().range(onward(&metadata, message))).await?;
        self.names.all_down(&mut answer.kvs)?;
        Ok(Response::new(answer))
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutResponse>, Status> {
        let (metadata, _, mut message) = request.into_parts();
        self.names.put_up(&mut message)?;
        self.has_room()?;
        let mut answer = bounded(self.kv().put(onward(&metadata, message))).await?;
        self.names.all_down(&mut answer.prev_kv)?;
        Ok(Response::new(answer))
    }

    async fn delete_range(
        &self,
        request: Request<DeleteRangeRequest>,
    ) -> Result<Response<DeleteRangeResponse>, Status> {
        let (metadata, _, mut message) = request.into_parts();
        self.names.delete_up(&mut message)?;
        let mut answer = bounded(self.kv().delete_range(onward(&metadata, message))).await?;
        self.names.all_down(&mut answer.prev_kvs)?;
        Ok(Response::new(answer))
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Result<Response<TxnResponse>, Status> {
        let (metadata, _, mut message) = request.into_parts();
        self.names.txn_up(&mut message, 0)?;
        if may_put(&message) {
            self.has_room()?;
        }
        // A lease that stands in a comparison is compared as it is: it tells
        // nothing but whether the own key bears it.
        let mut answer = bounded(self.kv().txn(onward(&metadata, message))).await?;
        self.names.txn_down(&mut answer)?;
        Ok(Response::new(answer))
    }

    async fn compact(
        &self,
        _request: Request<CompactionRequest>,
    ) -> Result<Response<CompactionResponse>, Status> {
        Err(Status::unimplemented(
            "the store is shared: it compacts itself, every hour",
        ))
    }
}

#[tonic::async_trait]
impl Watch for Confined {
    type WatchStream = BoxStream<'static, Result<WatchResponse, Status>>;

    async fn watch(
        &self,
        request: Request<Streaming<WatchRequest>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (metadata, _, incoming) = request.into_parts();
        let names = self.names.clone();
        // A caller that breaks off ends the watches above, too.
        let requests = incoming
            .map(move |request| passed_on(request, &names))
            .take_while(|request| std::future::ready(request.is_some()))
            .filter_map(std::future::ready)
            .take_until(self.over.clone().cancelled_owned());
        let mut client =
            WatchClient::new(self.channel.clone()).max_decoding_message_size(LARGEST_MESSAGE);
        // etcd answers the call when the first watch is made.
        let answers = client.watch(onward(&metadata, requests));
        let answers = answers.await.map_err(told)?.into_inner();
        let names = self.names.clone();
        let answers = answers.map(move |answer| {
            let mut answer = answer.map_err(told)?;
            names.watch_down(&mut answer)?;
            Ok(answer)
        });
        let over = self.over.clone().cancelled_owned();
        Ok(Response::new(answers.take_until(over).boxed()))
    }
}

#[tonic::async_trait]
impl Lease for Confined {
    type LeaseKeepAliveStream = BoxStream<'static, Result<LeaseKeepAliveResponse, Status>>;

    async fn lease_grant(
        &self,
        request: Request<LeaseGrantRequest>,
    ) -> Result<Response<LeaseGrantResponse>, Status> {
        let LeaseGrantRequest { ttl, id } = request.into_inner();
        if id != 0 && !is_ours(id) {
            return Err(Status::invalid_argument(
                "a lease of this user has another kind of number: leave it to be chosen",
            ));
        }
        self.has_room()?;
        let mut draws = 0..LEASE_DRAWS;
        loop {
            let id = if id == 0 { draw() } else { id };
            let request = LeaseGrantRequest { ttl, id };
            match bounded(self.lease().lease_grant(request)).await {
                // It is taken.
                Err(status)
                    if status.code() == Code::FailedPrecondition && draws.next().is_some() => {}
                answer => return answer.map(Response::new),
            }
        }
    }

    async fn lease_revoke(
        &self,
        request: Request<LeaseRevokeRequest>,
    ) -> Result<Response<LeaseRevokeResponse>, Status> {
        let request = request.into_inner();
        if !is_ours(request.id) {
            return Err(Status::not_found(NO_SUCH_LEASE));
        }
        let answer = bounded(self.lease().lease_revoke(request)).await?;
        Ok(Response::new(answer))
    }

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let client = self.lease();
        // One call upwards for each: its users renew rarely, if at all.
        let answers = request.into_inner().then(move |request| {
            let client = client.clone();
            async move { renew(client, request?.id).await }
        });
        let over = self.over.clone().cancelled_owned();
        Ok(Response::new(answers.take_until(over).boxed()))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<LeaseTimeToLiveRequest>,
    ) -> Result<Response<LeaseTimeToLiveResponse>, Status> {
        let request = request.into_inner();
        if !is_ours(request.id) {
            return Ok(Response::new(LeaseTimeToLiveResponse {
                id: request.id,
                ttl: -1,
                ..Default::default()
            }));
        }
        let mut answer = bounded(self.lease().lease_time_to_live(request)).await?;
        for key in &mut answer.keys {
            self.names.down(key)?;
        }
        Ok(Response::new(answer))
    }

    async fn lease_leases(
        &self,
        request: Request<LeaseLeasesRequest>,
    ) -> Result<Response<LeaseLeasesResponse>, Status> {
        let mut answer = bounded(self.lease().lease_leases(request.into_inner())).await?;
        answer.leases.retain(|lease| is_ours(lease.id));
        Ok(Response::new(answer))
    }
}

/// A number for a lease that is granted here.
fn draw() -> i64 {
    (LEASE_MARK << 32) | i64::from(u32::from_ne_bytes(random_bytes()))
}

async fn renew(
    mut client: LeaseClient<Channel>,
    id: i64,
) -> Result<LeaseKeepAliveResponse, Status> {
    let gone = LeaseKeepAliveResponse {
        id,
        ttl: 0,
        ..Default::default()
    };
    if !is_ours(id) {
        return Ok(gone);
    }
    let request = tokio_stream::once(LeaseKeepAliveRequest { id });
    let renewal = async {
        let mut answers = client.lease_keep_alive(request).await?.into_inner();
        Ok(Response::new(answers.message().await?))
    };
    Ok(bounded(renewal).await?.unwrap_or(gone))
}

#[tonic::async_trait]
impl Maintenance for Confined {
    async fn alarm(
        &self,
        request: Request<AlarmRequest>,
    ) -> Result<Response<AlarmResponse>, Status> {
        let request = request.into_inner();
        if request.action() != AlarmAction::Get {
            return Err(Status::permission_denied(
                "the store is shared: its alarms can be read here, and not changed",
            ));
        }
        let answer = bounded(self.maintenance().alarm(request)).await?;
        Ok(Response::new(answer))
    }

    async fn status(
        &self,
        request: Request<StatusRequest>,
    ) -> Result<Response<StatusResponse>, Status> {
        let answer = bounded(self.maintenance().status(request.into_inner())).await?;
        Ok(Response::new(answer))
    }

    async fn defragment(
        &self,
        _request: Request<DefragmentRequest>,
    ) -> Result<Response<DefragmentResponse>, Status> {
        Err(Status::unimplemented(
            "the store is shared: its members make room for themselves",
        ))
    }
}

/// A request of a watch's caller, upwards; nothing once the caller broke off.
fn passed_on(request: Result<WatchRequest, Status>, names: &Names) -> Option<WatchRequest> {
    let mut request = request.ok()?;
    names.watch_up(&mut request);
    Some(request)
}

#[cfg(test)]
mod tests;
