//! The etcd client: one connection over the unix socket, and the namespaced clients on top of it.
//!
//! The calls are those of the crate `etcd-client`, over a channel of ours. What it leaves to its users stands above it,
//! here: where a user's keys are, how long a call may take, and what may be written at all.
//!
//! A user of the store gets a [`NamespacedClient`], which adds its prefix to every key in a request
//! and strips it from every key in a response. A key is always relative, so a client cannot leave
//! its namespace. The client reads, watches and holds leases; writing is in [`super::fenced`]
//! alone.
//!
//! Every call has a timeout. The connection is made on first use and again whenever it is lost, so
//! a client survives a restart of etcd.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, CompactionOptions, Error, EventType, GetOptions, KeyValue, KvClient, LeaseClient, Txn,
    TxnOp, TxnOpResponse, WatchOptions, WatchStream,
};
use futures::FutureExt as _;
use futures::future::try_join_all;
use hearth_api::transport::Connector;
use tokio::net::UnixStream;
use tokio::time;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// Default timeout of a call: long enough for an election.
const CALL_BOUND: Duration = Duration::from_secs(10);
/// Timeout of a compaction, which scans all keys.
const COMPACT_BOUND: Duration = Duration::from_secs(60);
/// How often to retry connecting to a socket on which etcd does not listen yet.
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);
/// Timeout of one connection attempt; calls that wait for it longer fail.
pub(super) const CONNECT_BOUND: Duration = Duration::from_secs(10);
/// Maximum length of a sub-namespace's name in bytes.
const LONGEST_NAME: usize = 64;
/// Records per page of a range. The largest record, a node with the maximum of labels, is 25 KiB;
/// the maximum size of a message is 4 MiB.
const RECORDS_PER_PAGE: i64 = 64;
/// A watch response contains up to a thousand revisions.
const LARGEST_WATCH_MESSAGE: usize = 64 << 20;

/// The message of etcd's error for a store that is full.
pub(super) const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";

/// A user with a namespace of its own in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConsensusUser {
    /// The control plane's records.
    Curator,
    /// The certificate authorities of Kubernetes.
    KubernetesPki,
    /// The objects of Kubernetes' API servers, which do not use a [`NamespacedClient`] but the
    /// proxy: see [`etcd_proxy`](super::etcd_proxy).
    Kubernetes,
    /// What the Kubernetes controllers agree on: which of them has the virtual address.
    KubernetesControllers,
    /// The keys with which Secrets of Kubernetes are encrypted, wrapped.
    KubernetesSecrets,
}

impl ConsensusUser {
    /// All users.
    pub const ALL: [Self; 5] = [
        Self::Curator,
        Self::KubernetesPki,
        Self::Kubernetes,
        Self::KubernetesControllers,
        Self::KubernetesSecrets,
    ];

    /// The name, as it appears in the key prefix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Curator => "curator",
            Self::KubernetesPki => "kubernetes-pki",
            Self::Kubernetes => "kubernetes",
            Self::KubernetesControllers => "kubernetes-controllers",
            Self::KubernetesSecrets => "kubernetes-secrets",
        }
    }
}

/// Why a call to etcd failed. `what` is the operation, as a verb phrase.
#[derive(Debug, thiserror::Error)]
pub enum ConsensusError {
    /// No response. The operation may have been done all the same.
    #[error("cannot {what}: etcd did not answer within {bound:?}")]
    TimedOut {
        /// The operation.
        what: &'static str,
        /// The timeout.
        bound: Duration,
    },
    /// etcd, or the connection to it, returned an error.
    #[error("cannot {what}")]
    Failed {
        /// The operation.
        what: &'static str,
        /// etcd's error.
        source: Status,
    },
    /// A response that etcd never sends.
    #[error("cannot {what}: etcd's response has no {missing}")]
    Malformed {
        /// The operation.
        what: &'static str,
        /// The missing field.
        missing: &'static str,
    },
}

impl ConsensusError {
    /// Whether the lease does not exist, or has expired.
    pub fn lease_is_gone(&self) -> bool {
        matches!(self, Self::Failed { source, .. } if source.code() == Code::NotFound)
    }

    /// Whether the write was refused because the store is full (see `defrag`).
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Failed { source, .. } if source.message() == NO_SPACE)
    }
}

/// Runs one call with a timeout.
pub(super) async fn within<T>(
    bound: Duration,
    what: &'static str,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, ConsensusError> {
    match time::timeout(bound, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => {
            let source = status_of(error);
            Err(ConsensusError::Failed { what, source })
        }
        Err(_) => Err(ConsensusError::TimedOut { what, bound }),
    }
}

/// The status that etcd, or the connection to it, ended a call with. The other errors of the crate are of features that
/// Hearth does not use.
pub(super) fn status_of(error: Error) -> Status {
    match error {
        Error::GRpcStatus(status) => status,
        other => Status::internal(other.to_string()),
    }
}

/// A string that cannot be the name of a sub-namespace: a separator in it would lead into another
/// namespace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a valid namespace: expected 1 to {LONGEST_NAME} lower-case letters, digits, \
     \"-\" and \"_\""
)]
pub struct MalformedName(pub String);

/// One key and its value.
#[derive(Clone, PartialEq, Eq)]
pub struct Record {
    /// The key, relative to the client's prefix.
    pub key: String,
    /// The value. It may be secret, so a record has no `Debug`.
    pub value: Vec<u8>,
    /// Revision at which the key was created.
    pub create_revision: i64,
    /// Revision of the last write to the key.
    pub mod_revision: i64,
    /// ID of the lease that the key is attached to; 0 for none.
    pub lease: i64,
}

/// The content of a range at one revision.
pub struct Listing {
    /// The records, sorted by key.
    pub records: Vec<Record>,
    /// Revision of the store at which they were read.
    pub revision: i64,
}

/// One watch event.
pub enum Change {
    /// The key was written and now has this content.
    Put(Record),
    /// The key was deleted.
    Deleted {
        /// The key, relative to the client's prefix.
        key: String,
        /// Revision of the deletion.
        revision: i64,
    },
}

impl Change {
    /// Revision of the event.
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
    /// The requested revisions have been compacted: list everything again.
    #[error("the history before revision {0} has been compacted")]
    Compacted(i64),
    /// etcd cancelled the watch or ended the stream; with the reason, if it gave one.
    #[error("etcd closed the watch: {0}")]
    Closed(String),
    /// The stream failed.
    #[error("watch failed")]
    Broken(#[from] Status),
}

/// An etcd lease: the keys attached to it are deleted when it expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease(pub(super) i64);

impl Lease {
    /// The ID, as in [`Record::lease`].
    pub const fn id(self) -> i64 {
        self.0
    }

    /// The lease with the ID in [`Record::lease`].
    pub const fn from_id(id: i64) -> Self {
        Self(id)
    }
}

/// Client of the whole store. Used within the control plane only.
#[derive(Clone)]
pub struct RootClient {
    pub(super) etcd: Arc<Client>,
    /// For further connections.
    socket: Arc<Path>,
}

impl RootClient {
    /// A client of the etcd that listens, or will listen, on this socket. Does not wait for it.
    /// Must be called within a tokio runtime.
    pub fn new(socket: PathBuf) -> Self {
        Self::of(socket.into())
    }

    fn of(socket: Arc<Path>) -> Self {
        Self {
            etcd: Arc::new(client_over(channel(socket.clone()))),
            socket,
        }
    }

    /// A client over an existing channel. It cannot make further connections.
    #[cfg(any(test, feature = "testing"))]
    pub fn over(channel: Channel) -> Self {
        Self {
            etcd: Arc::new(client_over(channel)),
            socket: PathBuf::new().into(),
        }
    }

    /// A client for one user's namespace with a connection of its own, so that responses which this
    /// user does not read do not block other users.
    pub fn apart(&self, user: ConsensusUser) -> NamespacedClient {
        Self::of(self.socket.clone()).namespaced(user)
    }

    /// A client for one user's namespace, over the shared connection.
    pub fn namespaced(&self, user: ConsensusUser) -> NamespacedClient {
        let root: Arc<str> = format!("namespaced:{}/", user.name()).into();
        NamespacedClient {
            store: self.clone(),
            prefix: root.clone(),
            root,
            bound: CALL_BOUND,
        }
    }

    /// Compacts the history of the whole store up to this revision, unless that is done already.
    pub(super) async fn compact(&self, revision: i64) -> Result<(), ConsensusError> {
        let mut kv = self.etcd.kv_client();
        // The answer comes once the history is removed from the disk, too.
        let options = CompactionOptions::new().with_physical();
        let call = kv.compact(revision, Some(options));
        match within(COMPACT_BOUND, "compact the history", call).await {
            Err(ConsensusError::Failed { source, .. }) if source.code() == Code::OutOfRange => {
                Ok(())
            }
            answer => answer.map(drop),
        }
    }
}

/// The lazily made connection. It retries for a while, because etcd's socket appears some time
/// after its process starts and the first call should succeed as soon as it does.
fn channel(socket: Arc<Path>) -> Channel {
    let connector = Connector::new(move || {
        let socket = socket.clone();
        async move { connect(&socket).await }
    });
    // The authority is only a name in the requests: the socket decides.
    connector.channel(&Endpoint::from_static("http://etcd.invalid"))
}

/// etcd's client over a channel.
pub(super) fn client_over(channel: Channel) -> Client {
    let made = Client::from_channel(etcd_client::Channel::Tonic(channel), None);
    match made.now_or_never() {
        Some(Ok(client)) => client,
        // It would sign in as the user of its options, and waits for nothing else.
        _ => unreachable!("the client has no user to sign in as"),
    }
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

/// A client confined to one user's namespace, or to a sub-namespace of it.
#[derive(Clone)]
pub struct NamespacedClient {
    /// The store that the namespace is part of.
    store: RootClient,
    /// The user's own prefix, where its epoch is.
    pub(super) root: Arc<str>,
    /// The prefix added to every key.
    prefix: Arc<str>,
    pub(super) bound: Duration,
}

impl NamespacedClient {
    /// The client of the sub-namespace `name/`. Its writes still move the user's epoch.
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

    /// The same client with another timeout for every call.
    pub fn bounded(&self, bound: Duration) -> Self {
        Self {
            bound,
            ..self.clone()
        }
    }

    /// A new connection to etcd, not confined to the namespace.
    pub(super) async fn connect(&self) -> io::Result<UnixStream> {
        connect(&self.store.socket).await
    }

    /// The client of the whole store, for what is not namespaced: etcd's members and history. Used
    /// within this crate only.
    pub(super) fn store(&self) -> &RootClient {
        &self.store
    }

    /// The prefix added to every key.
    pub(super) fn prefix(&self) -> &Arc<str> {
        &self.prefix
    }

    pub(super) fn absolute(&self, key: &str) -> Vec<u8> {
        [self.prefix.as_bytes(), key.as_bytes()].concat()
    }

    pub(super) fn kv(&self) -> KvClient {
        self.store.etcd.kv_client()
    }

    fn lease(&self) -> LeaseClient {
        self.store.etcd.lease_client()
    }

    /// Runs one call with the client's timeout.
    pub(super) async fn step<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, ConsensusError> {
        within(self.bound, what, call).await
    }

    /// Reads one key, linearizable: the result was current at some moment during the call.
    pub async fn get(&self, key: &str) -> Result<Option<Record>, ConsensusError> {
        let mut kv = self.kv();
        let call = kv.get(self.absolute(key), None);
        let mut answer = self.step("read a key", call).await?;
        Ok(answer.take_kvs().pop().map(|kv| self.record(kv)))
    }

    /// Reads several keys at one revision, linearizable.
    pub async fn get_all<const N: usize>(
        &self,
        keys: [&str; N],
    ) -> Result<[Option<Record>; N], ConsensusError> {
        const WHAT: &str = "read keys";
        let reads = keys.map(|key| TxnOp::get(self.absolute(key), None));
        let mut kv = self.kv();
        let call = kv.txn(Txn::new().and_then(reads));
        let answer = self.step(WHAT, call).await?;
        let mut records = answer
            .op_responses()
            .into_iter()
            .map(|response| match response {
                TxnOpResponse::Get(mut found) => {
                    Some(found.take_kvs().pop().map(|kv| self.record(kv)))
                }
                _ => None,
            });
        let missing = "response to each read";
        let all = keys.map(|_| records.next().flatten());
        match all.iter().all(Option::is_some) {
            true => Ok(all.map(Option::flatten)),
            false => Err(ConsensusError::Malformed {
                what: WHAT,
                missing,
            }),
        }
    }

    /// Lists every key that begins with `prefix`, all at one revision, linearizable.
    pub async fn list(&self, prefix: &str) -> Result<Listing, ConsensusError> {
        self.list_all(&[prefix]).await
    }

    /// Like [`Self::list`], for several prefixes, all at one revision. Only the first page of the first one is a linearizable
    /// read: it tells the revision, and at that this etcd reads all others without asking its peers, at the same time.
    pub async fn list_all<const N: usize>(
        &self,
        prefixes: &[&str; N],
    ) -> Result<Listing, ConsensusError> {
        const { assert!(N > 0, "without a prefix there is no revision") };
        let mut listing = self.list_at(prefixes[0], 0).await?;
        let others = prefixes[1..].iter();
        let others = others.map(|prefix| self.list_at(prefix, listing.revision));
        for other in try_join_all(others).await? {
            listing.records.extend(other.records);
        }
        Ok(listing)
    }

    /// The records below the prefix at a revision that this client has got from etcd; 0: linearizable.
    async fn list_at(&self, prefix: &str, revision: i64) -> Result<Listing, ConsensusError> {
        const WHAT: &str = "list keys";
        let mut listing = Listing {
            records: Vec::new(),
            revision,
        };
        let mut kv = self.kv();
        let mut key = self.absolute(prefix);
        let range_end = successor(&key);
        loop {
            let mut options = GetOptions::new()
                .with_range(range_end.clone())
                .with_limit(RECORDS_PER_PAGE)
                .with_revision(listing.revision);
            if listing.revision > 0 {
                // This etcd has that revision, so it need not ask its peers.
                options = options.with_serializable();
            }
            let mut page = self.step(WHAT, kv.get(key, Some(options))).await?;
            if listing.revision == 0 {
                listing.revision = page
                    .header()
                    .ok_or(ConsensusError::Malformed {
                        what: WHAT,
                        missing: "header",
                    })?
                    .revision();
            }
            let next = page.kvs().last().map(|last| [last.key(), &[0]].concat());
            let records = page.take_kvs().into_iter();
            listing.records.extend(records.map(|kv| self.record(kv)));
            match next.filter(|_| page.more()) {
                Some(next) => key = next,
                None => return Ok(listing),
            }
        }
    }

    /// Watches everything below the client's prefix, from the given revision on.
    pub async fn watch(&self, from_revision: i64) -> Result<Changes, ConsensusError> {
        let key = self.absolute("");
        let options = WatchOptions::new()
            .with_range(successor(&key))
            .with_start_revision(from_revision);
        let client = self.store.etcd.watch_client();
        let mut client = client.max_decoding_message_size(LARGEST_WATCH_MESSAGE);
        let call = client.watch(key, Some(options));
        Ok(Changes {
            stream: self.step("start a watch", call).await?,
            client: self.clone(),
        })
    }

    /// Grants a lease that expires `ttl` (whole seconds) after its last renewal.
    pub async fn grant(&self, ttl: Duration) -> Result<Lease, ConsensusError> {
        let seconds = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX);
        let mut client = self.lease();
        let call = client.grant(seconds, None);
        let answer = self.step("grant a lease", call).await?;
        Ok(Lease(answer.id()))
    }

    /// Renews a lease. Returns whether it still existed.
    pub async fn renew(&self, lease: Lease) -> Result<bool, ConsensusError> {
        let mut client = self.lease();
        // The call reads etcd's first response itself: an error of the crate, and not a status, is its way to say that
        // the lease is gone (`LeaseKeepAliveError`), or that etcd ended the call without a response (`WatchError`).
        let renewal = client.keep_alive(lease.0).map(|renewed| match renewed {
            Ok(_) => Ok(true),
            Err(Error::LeaseKeepAliveError(_) | Error::WatchError(_)) => Ok(false),
            Err(error) => Err(error),
        });
        self.step("renew a lease", renewal).await
    }

    /// Revokes a lease, which deletes every key attached to it.
    pub async fn revoke(&self, lease: Lease) -> Result<(), ConsensusError> {
        let mut client = self.lease();
        let call = client.revoke(lease.0);
        self.step("revoke a lease", call).await.map(drop)
    }

    fn record(&self, kv: KeyValue) -> Record {
        let (create_revision, mod_revision) = (kv.create_revision(), kv.mod_revision());
        let lease = kv.lease();
        let (key, value) = kv.into_key_value();
        Record {
            key: self.relative(&key),
            value,
            create_revision,
            mod_revision,
            lease,
        }
    }

    /// etcd answers with keys in the requested range, so the prefix is there. A key that is not
    /// UTF-8 is converted lossily.
    fn relative(&self, key: &[u8]) -> String {
        let bare = key.strip_prefix(self.prefix.as_bytes()).unwrap_or(key);
        String::from_utf8_lossy(bare).into_owned()
    }
}

/// The events of a watch, in the order of revisions.
pub struct Changes {
    /// The watch lasts as long as this exists.
    stream: WatchStream,
    client: NamespacedClient,
}

impl Changes {
    /// The next events: all events of one or more whole revisions. Cancellation safe.
    pub async fn next(&mut self) -> Result<Vec<Change>, WatchEnd> {
        loop {
            let answer = self.stream.message().await.map_err(status_of)?;
            let Some(answer) = answer else {
                return Err(WatchEnd::Closed("no reason given".into()));
            };
            if answer.compact_revision() != 0 {
                return Err(WatchEnd::Compacted(answer.compact_revision()));
            }
            if answer.canceled() {
                return Err(WatchEnd::Closed(answer.cancel_reason().to_owned()));
            }
            let changes = answer.events().iter().filter_map(|event| {
                let record = self.client.record(event.kv()?.clone());
                Some(match event.event_type() {
                    EventType::Put => Change::Put(record),
                    EventType::Delete => Change::Deleted {
                        key: record.key,
                        revision: record.mod_revision,
                    },
                })
            });
            let changes: Vec<_> = changes.collect();
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }
}

/// The first key after all keys that begin with `prefix`.
pub(super) fn successor(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0] // etcd's encoding of "to the end"
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

    /// The key prefixes in etcd, one per line, each with the epoch key.
    #[tokio::test]
    async fn the_stored_prefixes_stay() {
        let root = RootClient::new(PathBuf::new());
        let written = |users: &[ConsensusUser]| -> String {
            let epochs = users.iter().map(|user| {
                let epoch = root.namespaced(*user).absolute(super::super::fenced::EPOCH);
                format!("{}\n", String::from_utf8(epoch).unwrap())
            });
            epochs.collect()
        };
        let (first, later) = ConsensusUser::ALL.split_at(3);
        stored_form!("etcd-epochs.txt", written(first));
        let (controllers, secrets) = later.split_at(1);
        stored_form!("etcd-epochs-controllers.txt", written(controllers));
        stored_form!("etcd-epochs-secrets.txt", written(secrets));
    }
}
