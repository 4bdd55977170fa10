//! The way to etcd: one connection over the unix socket, and the namespaced
//! clients that are handed out on top of it.
//!
//! A user of the store gets a [`NamespacedClient`], which adds its prefix to
//! every key that goes out and takes it from every key that comes back. A key
//! is always a relative name, so there is no way up. The client reads,
//! watches and holds leases; writing is in [`super::fenced`] alone.
//!
//! Every call has a bound. The connection is made when it is first used and
//! again whenever it was lost, so a client outlives a restart of etcd.

use std::{
    future::Future,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hearth_api::transport::Connector;
use tokio::{net::UnixStream, time};
use tokio_stream::StreamExt as _;
use tonic::{
    Code, Response, Status, Streaming,
    transport::{Channel, Endpoint},
};

use super::wire::{
    CompactionRequest, KeyValue, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest,
    RangeRequest, WatchCreateRequest, WatchRequest, WatchResponse, event::EventType,
    kv_client::KvClient, lease_client::LeaseClient, watch_client::WatchClient,
    watch_request::RequestUnion,
};

/// For calls whose caller names no other bound: long enough for an election.
const CALL_BOUND: Duration = Duration::from_secs(10);
/// To compact the store, for which all keys are looked through.
const COMPACT_BOUND: Duration = Duration::from_secs(60);
/// How often a socket that nobody serves yet is tried again.
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);
/// How long one attempt to connect goes on: what waits longer gets an error.
pub(super) const CONNECT_BOUND: Duration = Duration::from_secs(10);
/// Bytes of the name of a part of the store.
const LONGEST_NAME: usize = 64;
/// Records per answer. The largest, a node with all the labels it may have, is
/// 25 KiB; one message may have 4 MiB.
const RECORDS_PER_PAGE: i64 = 64;
/// A watch sends up to a thousand revisions at once.
const LARGEST_WATCH_MESSAGE: usize = 64 << 20;

/// etcd's words for a store that is full.
pub(super) const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";

/// Who has a part of the store of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConsensusUser {
    /// The control plane's records.
    Curator,
    /// The certificate authorities of Kubernetes.
    KubernetesPki,
    /// What API servers keep, by the one way in that is not a
    /// [`NamespacedClient`]: see [`etcd_proxy`](super::etcd_proxy).
    Kubernetes,
}

impl ConsensusUser {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Curator, Self::KubernetesPki, Self::Kubernetes];

    /// The name in its prefix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Curator => "curator",
            Self::KubernetesPki => "kubernetes-pki",
            Self::Kubernetes => "kubernetes",
        }
    }
}

/// Why etcd did not do what it was asked. `what` is the step.
#[derive(Debug, thiserror::Error)]
pub enum ConsensusError {
    /// Nothing came back. The step may have been done all the same.
    #[error("{what}: etcd did not answer within {bound:?}")]
    TimedOut {
        /// The step.
        what: &'static str,
        /// How long it was waited for.
        bound: Duration,
    },
    /// etcd, or the way to it, answered with an error.
    #[error("{what}")]
    Failed {
        /// The step.
        what: &'static str,
        /// As etcd said it.
        source: Status,
    },
    /// An answer that etcd never gives.
    #[error("{what}: etcd's answer has no {missing}")]
    Malformed {
        /// The step.
        what: &'static str,
        /// What was looked for.
        missing: &'static str,
    },
}

impl ConsensusError {
    /// Whether the lease that was named does not exist (any more).
    pub fn lease_is_gone(&self) -> bool {
        matches!(self, Self::Failed { source, .. } if source.code() == Code::NotFound)
    }

    /// Whether it was refused because the store is full (see `defrag`).
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Failed { source, .. } if source.message() == NO_SPACE)
    }
}

/// Runs one step under a bound.
pub(super) async fn within<T>(
    bound: Duration,
    what: &'static str,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, ConsensusError> {
    match time::timeout(bound, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(source)) => Err(ConsensusError::Failed { what, source }),
        Err(_) => Err(ConsensusError::TimedOut { what, bound }),
    }
}

/// What cannot be the name of a part of the store: with a separator in it, it
/// would lead into another part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names no part of the store: wanted 1 to {LONGEST_NAME} lower-case letters, digits, \
     \"-\" and \"_\""
)]
pub struct MalformedName(pub String);

/// One key and what it holds.
#[derive(Clone, PartialEq, Eq)]
pub struct Record {
    /// Relative to the client's prefix.
    pub key: String,
    /// May hold secrets, so a record is not printed.
    pub value: Vec<u8>,
    /// When the key came into being.
    pub create_revision: i64,
    /// When it was last written.
    pub mod_revision: i64,
    /// The lease on which it depends; 0 for none.
    pub lease: i64,
}

/// What a range held at one revision.
pub struct Listing {
    /// By key.
    pub records: Vec<Record>,
    /// Of the whole store.
    pub revision: i64,
}

/// One thing that happened to a key.
pub enum Change {
    /// It has this content now.
    Put(Record),
    /// It is gone.
    Deleted {
        /// Relative to the client's prefix.
        key: String,
        /// When it went.
        revision: i64,
    },
}

impl Change {
    /// When it happened.
    pub fn revision(&self) -> i64 {
        match self {
            Self::Put(record) => record.mod_revision,
            Self::Deleted { revision, .. } => *revision,
        }
    }
}

/// Why a watch ended.
#[derive(Debug, thiserror::Error)]
pub enum WatchEnd {
    /// What it would have to tell has been compacted away: read everything
    /// again.
    #[error("the history before revision {0} has been compacted")]
    Compacted(i64),
    /// The stream ended without a reason.
    #[error("etcd closed the watch: {0}")]
    Closed(String),
    /// The stream broke.
    #[error("watch")]
    Broken(#[from] Status),
}

/// A lease of etcd: keys that depend on it go when it lapses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease(pub(super) i64);

impl Lease {
    /// As it stands in [`Record::lease`].
    pub const fn id(self) -> i64 {
        self.0
    }

    /// The lease of a record that names one.
    pub const fn from_id(id: i64) -> Self {
        Self(id)
    }
}

/// The whole of etcd. Stays within the control plane.
#[derive(Clone)]
pub struct RootClient {
    pub(super) channel: Channel,
    /// Where other connections go.
    socket: Arc<Path>,
}

impl RootClient {
    /// A client of the etcd that serves, or is going to serve, this socket.
    /// Does not wait for it. Must be called within a tokio runtime.
    pub fn new(socket: PathBuf) -> Self {
        let socket: Arc<Path> = socket.into();
        Self {
            channel: channel(socket.clone()),
            socket,
        }
    }

    /// A client of an etcd that is reached some other way. It has no other
    /// connections.
    #[cfg(any(test, feature = "testing"))]
    pub fn over(channel: Channel) -> Self {
        Self {
            channel,
            socket: PathBuf::new().into(),
        }
    }

    /// The part of one user, by a connection of its own: what this user is
    /// told and does not read holds up nobody else's answers.
    pub fn apart(&self, user: ConsensusUser) -> NamespacedClient {
        let store = Self {
            channel: channel(self.socket.clone()),
            socket: self.socket.clone(),
        };
        store.namespaced(user)
    }

    /// The part of one user.
    pub fn namespaced(&self, user: ConsensusUser) -> NamespacedClient {
        let root: Arc<str> = format!("namespaced:{}/", user.name()).into();
        NamespacedClient {
            store: self.clone(),
            prefix: root.clone(),
            root,
            bound: CALL_BOUND,
        }
    }

    /// Has etcd forget the history of the whole store up to this revision,
    /// unless it has already.
    pub(super) async fn compact(&self, revision: i64) -> Result<(), ConsensusError> {
        let mut kv = KvClient::new(self.channel.clone());
        let call = kv.compact(CompactionRequest {
            revision,
            physical: true,
        });
        match within(COMPACT_BOUND, "forget history", call).await {
            Err(ConsensusError::Failed { source, .. }) if source.code() == Code::OutOfRange => {
                Ok(())
            }
            answer => answer.map(drop),
        }
    }
}

/// The lazily made connection. It tries for a while, because etcd's socket
/// appears some time after its process does, and the first caller should be
/// served at that very moment and not after a pause.
fn channel(socket: Arc<Path>) -> Channel {
    let connector = Connector::new(move || {
        let socket = socket.clone();
        async move { connect(&socket).await }
    });
    // The authority is only a name in the requests: the socket decides.
    connector.channel(&Endpoint::from_static("http://etcd.invalid"))
}

async fn connect(socket: &Path) -> io::Result<UnixStream> {
    let connected = async {
        loop {
            match UnixStream::connect(socket).await {
                Ok(stream) => return stream,
                Err(_) => time::sleep(CONNECT_INTERVAL).await,
            }
        }
    };
    time::timeout(CONNECT_BOUND, connected)
        .await
        .map_err(|_| io::ErrorKind::TimedOut.into())
}

/// One user's part of etcd, or a part of that.
#[derive(Clone)]
pub struct NamespacedClient {
    /// What it is a part of.
    store: RootClient,
    /// The user's own prefix, where its epoch is.
    pub(super) root: Arc<str>,
    /// Before every key.
    prefix: Arc<str>,
    pub(super) bound: Duration,
}

impl NamespacedClient {
    /// The part below `name/`. It has the epoch of the whole.
    pub fn sub(&self, name: &str) -> Result<Self, MalformedName> {
        let good = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_');
        if name.is_empty() || name.len() > LONGEST_NAME || !name.bytes().all(good) {
            return Err(MalformedName(name.to_owned()));
        }
        Ok(Self {
            prefix: format!("{}{name}/", self.prefix).into(),
            ..self.clone()
        })
    }

    /// The same with another bound on every call.
    pub fn bounded(&self, bound: Duration) -> Self {
        Self {
            bound,
            ..self.clone()
        }
    }

    /// A connection to etcd of its own. It is not confined to anything.
    pub(super) async fn connect(&self) -> io::Result<UnixStream> {
        connect(&self.store.socket).await
    }

    /// The connection. It is not confined to anything, either.
    pub(super) fn channel(&self) -> Channel {
        self.store.channel.clone()
    }

    /// All of what this is a part of, for what etcd has of the whole store only:
    /// its members and its history. Stays within this crate.
    pub(super) fn store(&self) -> &RootClient {
        &self.store
    }

    /// What stands before every key.
    pub(super) fn prefix(&self) -> &Arc<str> {
        &self.prefix
    }

    pub(super) fn absolute(&self, key: &str) -> Vec<u8> {
        [self.prefix.as_bytes(), key.as_bytes()].concat()
    }

    pub(super) fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.channel())
    }

    fn lease(&self) -> LeaseClient<Channel> {
        LeaseClient::new(self.channel())
    }

    /// Runs one step under the client's bound.
    pub(super) async fn step<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ConsensusError> {
        within(self.bound, what, call).await
    }

    /// Reads one key, linearizable: what this returns was true at some moment
    /// of the call.
    pub async fn get(&self, key: &str) -> Result<Option<Record>, ConsensusError> {
        let mut kv = self.kv();
        let request = RangeRequest {
            key: self.absolute(key),
            ..Default::default()
        };
        let answer = self.step("read", kv.range(request)).await?;
        Ok(answer.kvs.into_iter().next().map(|kv| self.record(kv)))
    }

    /// Reads every key that begins with `prefix`, all at one revision,
    /// linearizable.
    pub async fn list(&self, prefix: &str) -> Result<Listing, ConsensusError> {
        self.list_all(&[prefix]).await
    }

    /// The same for several prefixes, all at one revision.
    pub async fn list_all(&self, prefixes: &[&str]) -> Result<Listing, ConsensusError> {
        let mut listing = Listing {
            records: Vec::new(),
            revision: 0,
        };
        for prefix in prefixes {
            self.list_into(&mut listing, prefix).await?;
        }
        Ok(listing)
    }

    /// Adds what is below the prefix, at the listing's revision; the first
    /// page decides which one that is.
    async fn list_into(&self, listing: &mut Listing, prefix: &str) -> Result<(), ConsensusError> {
        const WHAT: &str = "list";
        let mut kv = self.kv();
        let mut key = self.absolute(prefix);
        let range_end = successor(&key);
        loop {
            let request = RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: RECORDS_PER_PAGE,
                revision: listing.revision,
                ..Default::default()
            };
            let page = self.step(WHAT, kv.range(request)).await?;
            if listing.revision == 0 {
                listing.revision = page
                    .header
                    .ok_or(ConsensusError::Malformed {
                        what: WHAT,
                        missing: "header",
                    })?
                    .revision;
            }
            let next = page.kvs.last().map(|last| [&last.key[..], &[0]].concat());
            listing
                .records
                .extend(page.kvs.into_iter().map(|kv| self.record(kv)));
            match next.filter(|_| page.more) {
                Some(next) => key = next,
                None => return Ok(()),
            }
        }
    }

    /// Follows everything below the client's prefix, from the given revision
    /// on.
    pub async fn watch(&self, from_revision: i64) -> Result<Changes, ConsensusError> {
        let key = self.absolute("");
        let create = WatchRequest {
            request_union: Some(RequestUnion::CreateRequest(WatchCreateRequest {
                range_end: successor(&key),
                key,
                start_revision: from_revision,
                ..Default::default()
            })),
        };
        let mut client =
            WatchClient::new(self.channel()).max_decoding_message_size(LARGEST_WATCH_MESSAGE);
        // A watch lasts as long as its requests' stream does.
        let requests = tokio_stream::once(create).chain(tokio_stream::pending());
        let answers = self.step("watch", client.watch(requests)).await?;
        Ok(Changes {
            answers,
            client: self.clone(),
        })
    }

    /// Makes a lease that lapses `ttl` (whole seconds) after its last renewal.
    pub async fn grant(&self, ttl: Duration) -> Result<Lease, ConsensusError> {
        let request = LeaseGrantRequest {
            ttl: i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX),
            id: 0,
        };
        let mut client = self.lease();
        let answer = self
            .step("grant a lease", client.lease_grant(request))
            .await?;
        Ok(Lease(answer.id))
    }

    /// Renews a lease and tells whether it still existed.
    pub async fn renew(&self, lease: Lease) -> Result<bool, ConsensusError> {
        let mut client = self.lease();
        let request = tokio_stream::once(LeaseKeepAliveRequest { id: lease.0 });
        let renewal = async {
            let mut answers = client.lease_keep_alive(request).await?.into_inner();
            Ok(Response::new(answers.message().await?))
        };
        let answer = self.step("renew the lease", renewal).await?;
        Ok(answer.is_some_and(|answer| answer.ttl > 0))
    }

    /// Ends a lease, and with it every key that depends on it.
    pub async fn revoke(&self, lease: Lease) -> Result<(), ConsensusError> {
        let mut client = self.lease();
        let request = LeaseRevokeRequest { id: lease.0 };
        self.step("revoke a lease", client.lease_revoke(request))
            .await
            .map(drop)
    }

    fn record(&self, kv: KeyValue) -> Record {
        Record {
            key: self.relative(&kv.key),
            value: kv.value,
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            lease: kv.lease,
        }
    }

    /// etcd answers with the keys it was asked for, so the prefix is there; a
    /// key that is no text is shown as far as it is.
    fn relative(&self, key: &[u8]) -> String {
        let bare = key.strip_prefix(self.prefix.as_bytes()).unwrap_or(key);
        String::from_utf8_lossy(bare).into_owned()
    }
}

/// What happens below a prefix, in the order of revisions.
pub struct Changes {
    answers: Streaming<WatchResponse>,
    client: NamespacedClient,
}

impl Changes {
    /// What happened next: all changes of one or more whole revisions.
    /// Safe to cancel.
    pub async fn next(&mut self) -> Result<Vec<Change>, WatchEnd> {
        loop {
            let Some(answer) = self.answers.message().await? else {
                return Err(WatchEnd::Closed("without a reason".into()));
            };
            if answer.compact_revision != 0 {
                return Err(WatchEnd::Compacted(answer.compact_revision));
            }
            if answer.canceled {
                return Err(WatchEnd::Closed(answer.cancel_reason));
            }
            let changes: Vec<_> = answer
                .events
                .into_iter()
                .filter_map(|event| {
                    let deleted = event.r#type() == EventType::Delete;
                    let record = self.client.record(event.kv?);
                    Some(if deleted {
                        Change::Deleted {
                            key: record.key,
                            revision: record.mod_revision,
                        }
                    } else {
                        Change::Put(record)
                    })
                })
                .collect();
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }
}

/// The first key after all that begin with `prefix`.
pub(super) fn successor(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0] // etcd's name for "to the end"
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;

    use super::*;

    #[test]
    fn a_range_ends_behind_its_prefix() {
        assert_eq!(successor(b"a/"), b"a0");
        assert_eq!(successor(&[b'a', 0xff]), b"b");
        assert_eq!(successor(&[0xff]), [0]);
        assert_eq!(successor(b""), [0]);
    }

    #[tokio::test]
    async fn a_part_is_named_by_one_plain_word() {
        let client = RootClient::new(PathBuf::new()).namespaced(ConsensusUser::Curator);
        let part = client.sub("rack-7").unwrap().sub("a_b").unwrap();
        assert_eq!(part.absolute("key"), b"namespaced:curator/rack-7/a_b/key");
        let long = "x".repeat(LONGEST_NAME + 1);
        for name in ["", "a/b", "/", "..", "a:b", "A", "é", &long] {
            let error = client.sub(name).err();
            assert_eq!(error, Some(MalformedName(name.to_owned())), "{name}");
        }
    }

    /// What stands before every key in etcd, one in a line, and the key that
    /// every write moves.
    #[tokio::test]
    async fn the_stored_prefixes_stay() {
        let root = RootClient::new(PathBuf::new());
        let written: String = ConsensusUser::ALL
            .map(|user| {
                let epoch = root.namespaced(user).absolute(super::super::fenced::EPOCH);
                format!("{}\n", String::from_utf8(epoch).unwrap())
            })
            .concat();
        stored_form!("etcd-epochs.txt", written);
    }
}
