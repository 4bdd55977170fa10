//! The proxy: with arbitrary messages, and against a real etcd, by a client that knows nothing of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use etcd_client::{
    AlarmType, Client, CompareOp, DeleteOptions, Error, EventType, GetOptions, KvClient,
    LeaseTimeToLiveOptions, PutOptions, Txn, TxnOp, TxnOpResponse, WatchOptions,
};
use hearth_api::transport::Connector;
use hearth_base::event::{self, Writer};
use hearth_base::testing::within_timeout;
use proptest::prelude::*;
use tokio::net::UnixStream;
use tonic::Code;
use tonic::transport::Endpoint;

use super::super::ConsensusUser;
use super::super::client::{client_over, status_of};
use super::super::fenced::{Condition, Write};
use super::super::testing::{Running, Site};
use super::key_prefix::EMPTY_KEY;
use super::leases::{NO_SUCH_LEASE, is_ours};
use super::wire::request_op::Request as Asked;
use super::wire::watch_request::RequestUnion;
use super::wire::{
    Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest,
    WatchCreateRequest, WatchRequest,
};
use super::*;

const PREFIX: &[u8] = b"namespaced:kubernetes/";

/// The range that etcd understands, as its first key and the first key after it; `None` is the end
/// of the store.
fn meant(key: &[u8], end: &[u8]) -> (Vec<u8>, Option<Vec<u8>>) {
    match end {
        [] => (key.to_vec(), Some([key, &[0]].concat())),
        [0] => (key.to_vec(), None),
        end => (key.to_vec(), Some(end.to_vec())),
    }
}

/// Whether a key can be in the range.
fn has(range: &(Vec<u8>, Option<Vec<u8>>), key: &[u8]) -> bool {
    let (first, behind) = range;
    first[..] <= *key && behind.as_ref().is_none_or(|behind| *key < behind[..])
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    let byte = || prop_oneof![Just(0_u8), Just(0xff), Just(b'/'), Just(b'0'), any::<u8>()];
    prop::collection::vec(byte(), 0..6)
}

/// Keys of other users that are as close as possible.
fn neighbours() -> Vec<Vec<u8>> {
    let bare = &PREFIX[..PREFIX.len() - 1];
    vec![
        vec![0],
        bare.to_vec(),
        [bare, b"."].concat(),
        [bare, b".zzz"].concat(),
        [bare, b"0"].concat(),
        [bare, b"-pki/authorities"].concat(),
        b"namespaced:curator/nodes".to_vec(),
        vec![0xff; 40],
    ]
}

/// Every range and key of a transaction.
fn ranges_of(txn: &TxnRequest, into: &mut Vec<(Vec<u8>, Option<Vec<u8>>)>) {
    let compared = txn.compare.iter();
    into.extend(compared.map(|compare| meant(&compare.key, &compare.range_end)));
    for operation in txn.success.iter().chain(&txn.failure) {
        match operation.request.as_ref().unwrap() {
            Asked::RequestRange(range) => into.push(meant(&range.key, &range.range_end)),
            Asked::RequestPut(put) => into.push(meant(&put.key, &[])),
            Asked::RequestDeleteRange(delete) => into.push(meant(&delete.key, &delete.range_end)),
            Asked::RequestTxn(txn) => ranges_of(txn, into),
        }
    }
}

fn operation() -> impl Strategy<Value = RequestOp> {
    let leaf = prop_oneof![
        (key(), key()).prop_map(|(key, range_end)| Asked::RequestRange(RangeRequest {
            key,
            range_end,
            ..Default::default()
        })),
        key().prop_map(|key| Asked::RequestPut(PutRequest {
            key,
            ..Default::default()
        })),
        (key(), key()).prop_map(
            |(key, range_end)| Asked::RequestDeleteRange(DeleteRangeRequest {
                key,
                range_end,
                prev_kv: true,
            })
        ),
    ];
    let leaf = leaf.prop_map(|request| RequestOp {
        request: Some(request),
    });
    leaf.prop_recursive(3, 24, 4, |inner| {
        let operations = || prop::collection::vec(inner.clone(), 0..4);
        let compare = prop::collection::vec((key(), key()), 0..3);
        (compare, operations(), operations()).prop_map(|(compare, success, failure)| {
            let compare = compare.into_iter();
            let compare = compare.map(|(key, range_end)| Compare {
                key,
                range_end,
                ..Default::default()
            });
            let txn = TxnRequest {
                compare: compare.collect(),
                success,
                failure,
            };
            RequestOp {
                request: Some(Asked::RequestTxn(txn)),
            }
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_request_reaches_a_key_of_others(key in key(), end in key(), own in key()) {
        let prefix = KeyPrefix::new(PREFIX);
        let mut request = RangeRequest {
            key: key.clone(),
            range_end: end.clone(),
            ..Default::default()
        };
        let passed = prefix.range_up(&mut request);
        prop_assert_eq!(passed.is_ok(), !key.is_empty());
        if passed.is_ok() {
            let above = meant(&request.key, &request.range_end);
            for other in neighbours() {
                prop_assert!(!has(&above, &other), "{:?} is in {:?}", other, above);
            }
            // It means the same keys as without the prefix.
            let absolute = [PREFIX, &own].concat();
            if !own.is_empty() {
                prop_assert_eq!(has(&above, &absolute), has(&meant(&key, &end), &own));
            }
        }
    }

    #[test]
    fn nor_does_a_watch(key in key(), end in key(), own in key()) {
        let prefix = KeyPrefix::new(PREFIX);
        let mut request = WatchRequest {
            request_union: Some(RequestUnion::CreateRequest(WatchCreateRequest {
                key: key.clone(),
                range_end: end.clone(),
                ..Default::default()
            })),
        };
        prefix.watch_up(&mut request);
        let Some(RequestUnion::CreateRequest(create)) = request.request_union else {
            panic!("expected a create request");
        };
        let above = meant(&create.key, &create.range_end);
        for other in neighbours() {
            prop_assert!(!has(&above, &other));
        }
        let absolute = [PREFIX, &own].concat();
        if !own.is_empty() && !key.is_empty() {
            prop_assert_eq!(has(&above, &absolute), has(&meant(&key, &end), &own));
        }
    }

    #[test]
    fn nor_does_any_part_of_a_transaction(operation in operation()) {
        let prefix = KeyPrefix::new(PREFIX);
        let mut txn = TxnRequest {
            success: vec![operation],
            ..Default::default()
        };
        if prefix.txn_up(&mut txn, 0).is_ok() {
            let mut ranges = Vec::new();
            ranges_of(&txn, &mut ranges);
            for range in ranges {
                for other in neighbours() {
                    prop_assert!(!has(&range, &other), "{:?} is in {:?}", other, range);
                }
            }
        }
    }

    #[test]
    fn no_answer_tells_a_key_of_others(mut key in key(), ours: bool) {
        let prefix = KeyPrefix::new(PREFIX);
        let bare = key.clone();
        if ours {
            key = [PREFIX, &key].concat();
        }
        let mut record = KeyValue { key, ..Default::default() };
        match prefix.all_down([&mut record]) {
            Ok(()) => prop_assert_eq!(record.key, bare),
            Err(status) => {
                prop_assert!(!ours);
                prop_assert_eq!(status.code(), Code::Internal);
            }
        }
    }
}

/// A real etcd, and the proxy as an API server uses it.
pub(super) struct Passed {
    /// Until it is stopped.
    pub etcd: Option<Running>,
    capacity: Writer<Capacity>,
    pub socket: PathBuf,
    pub client: Client,
    pub over: CancellationToken,
    pub server: tokio::task::JoinHandle<()>,
    pub site: Site,
}

pub(super) async fn passed() -> Passed {
    passed_with(ANSWERS.1).await
}

/// With this many bytes for answers.
pub(super) async fn passed_with(answers: u64) -> Passed {
    let site = Site::new();
    let etcd = site.start(true).await;
    let socket = site.root.ephemeral.path().join("confined");
    let over = CancellationToken::new();
    let client = etcd.handle().root().namespaced(ConsensusUser::Kubernetes);
    let listener = UnixListener::bind(&socket).unwrap();
    let (writer, capacity) = event::value();
    let ended = over.clone();
    let proxy = EtcdProxy::new(&client, capacity, answers, ended);
    let server = tokio::spawn(connection::serve(listener, proxy));
    let way = socket.clone();
    let connector = Connector::new(move || UnixStream::connect(way.clone()));
    let channel = connector.channel(&Endpoint::from_static("http://confined.invalid"));
    Passed {
        etcd: Some(etcd),
        capacity: writer,
        socket,
        client: client_over(channel),
        over,
        server,
        site,
    }
}

fn refusal<T>(answer: Result<T, Error>) -> Status {
    match answer {
        Ok(_) => panic!("the call was not refused"),
        Err(error) => status_of(error),
    }
}

impl Passed {
    fn kv(&self) -> KvClient {
        let kv = self.client.kv_client();
        kv.max_decoding_message_size(usize::MAX)
    }

    fn etcd(&self) -> &Running {
        self.etcd.as_ref().unwrap()
    }

    pub(super) async fn put(&self, key: &str, value: &str) {
        self.try_put(key, value).await.unwrap();
    }

    pub(super) async fn try_put(&self, key: &str, value: &str) -> Result<(), Status> {
        let put = self.kv().put(key, value, None).await;
        put.map(drop).map_err(status_of)
    }

    pub(super) async fn delete(&self, key: &str) {
        self.kv().delete(key, None).await.unwrap();
    }

    /// Everything that this user can read.
    pub(super) async fn all(&self) -> BTreeMap<String, String> {
        self.try_all().await.unwrap()
    }

    pub(super) async fn try_all(&self) -> Result<BTreeMap<String, String>, Status> {
        let everything = GetOptions::new().with_all_keys();
        let answer = self.kv().get("", Some(everything)).await;
        let mut answer = answer.map_err(status_of)?;
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let records = answer.take_kvs().into_iter();
        let records = records.map(|record| record.into_key_value());
        Ok(records.map(|(k, v)| (text(k), text(v))).collect())
    }

    pub(super) async fn stop(self) {
        self.over.cancel();
        within_timeout("end of the server", self.server)
            .await
            .unwrap();
        if let Some(etcd) = self.etcd {
            etcd.stop().await;
        }
        drop(self.site);
    }
}

fn others(etcd: &Running) -> super::super::NamespacedClient {
    etcd.handle()
        .root()
        .namespaced(ConsensusUser::KubernetesPki)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_here_stays_here() {
    let passed = passed().await;
    let others = others(passed.etcd());
    let write = Write::when(Condition::Absent("authorities".into()));
    let write = write.put("authorities", b"secret".to_vec());
    others.write(write).await.unwrap();
    passed.put("/registry/a", "1").await;
    passed.put("/registry/b", "2").await;
    let shown = passed.all().await;
    assert_eq!(
        shown.keys().collect::<Vec<_>>(),
        ["/registry/a", "/registry/b"]
    );
    let root = passed
        .etcd()
        .handle()
        .root()
        .namespaced(ConsensusUser::Kubernetes);
    assert_eq!(root.get("/registry/a").await.unwrap().unwrap().value, b"1");

    // Deleting everything deletes everything of this user only.
    let everything = DeleteOptions::new().with_all_keys().with_prev_key();
    let deleted = passed.kv().delete("", Some(everything)).await.unwrap();
    let keys: Vec<_> = deleted.prev_kvs().iter().map(|kv| kv.key()).collect();
    assert_eq!(keys, [b"/registry/a", b"/registry/b"]);
    assert!(others.get("authorities").await.unwrap().is_some());
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_compares_and_answers_as_etcd_does() {
    let passed = passed().await;
    let key = "/registry/a";
    let unchanged = etcd_client::Compare::mod_revision(key, CompareOp::Equal, 0);
    let txn = Txn::new()
        .when([unchanged])
        .and_then([TxnOp::put(key, "new", None)])
        .or_else([TxnOp::get(key, None)]);
    let done = passed.kv().txn(txn.clone()).await.unwrap();
    assert!(done.succeeded());
    let not_done = passed.kv().txn(txn).await.unwrap();
    assert!(!not_done.succeeded());
    let [TxnOpResponse::Get(range)] = &not_done.op_responses()[..] else {
        panic!("{not_done:?}");
    };
    let record = &range.kvs()[0];
    assert_eq!(record.key(), key.as_bytes());
    assert_eq!((record.version(), range.count()), (1, 1));
    assert_eq!(record.mod_revision(), done.header().unwrap().revision());

    let empty = refusal(passed.kv().put("", "", None).await);
    assert_eq!(
        (empty.code(), empty.message()),
        (Code::InvalidArgument, EMPTY_KEY)
    );
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_watches_share_a_stream_and_see_their_own() {
    let passed = passed().await;
    let range = |end: &str, id| {
        let options = WatchOptions::new().with_range(end).with_watch_id(id);
        Some(options.with_prev_key())
    };
    let mut client = passed.client.watch_client();
    let mut stream = client.watch("/a/", range("/a0", 7)).await.unwrap();
    let made = stream.message().await.unwrap().unwrap();
    assert!(made.created() && made.watch_id() == 7);
    stream.watch("/", range("\0", 8)).await.unwrap();
    let made = stream.message().await.unwrap().unwrap();
    assert!(made.created() && made.watch_id() == 8);

    // Nothing of other users is reported.
    let write = Write::when(Condition::Absent("x".into())).put("x", Vec::new());
    others(passed.etcd()).write(write).await.unwrap();
    passed.put("/a/1", "old").await;
    let mut told = BTreeMap::new();
    while told.len() < 2 {
        let answer = stream.message().await.unwrap().unwrap();
        for event in answer.events() {
            told.insert(answer.watch_id(), event.kv().unwrap().key().to_vec());
        }
    }
    assert!(told.values().all(|key| key == b"/a/1"), "{told:?}");

    stream.cancel(8).await.unwrap();
    let answer = stream.message().await.unwrap().unwrap();
    assert!(answer.canceled() && answer.watch_id() == 8);
    passed.kv().delete("/a/1", None).await.unwrap();
    let answer = stream.message().await.unwrap().unwrap();
    let event = &answer.events()[0];
    let told = (answer.watch_id(), event.event_type());
    assert_eq!(told, (7, EventType::Delete));
    assert_eq!(event.kv().unwrap().key(), b"/a/1");
    let before = event.prev_kv().unwrap();
    assert_eq!((before.key(), before.value()), (&b"/a/1"[..], &b"old"[..]));

    stream.request_progress().await.unwrap();
    let answer = within_timeout("progress", stream.message())
        .await
        .unwrap()
        .unwrap();
    assert!(answer.header().unwrap().revision() > 1);
    // A server that is shut down does not wait for watches.
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_of_others_cannot_be_touched() {
    let passed = passed().await;
    let mut leases = passed.client.lease_client();
    let own = leases.grant(60, None).await.unwrap().id();
    assert!(own > 0 && is_ours(own));
    let foreign = others(passed.etcd())
        .grant(Duration::from_secs(60))
        .await
        .unwrap()
        .id();

    let put = async |lease| {
        let options = PutOptions::new().with_lease(lease);
        passed.kv().put("/registry/leased", "", Some(options)).await
    };
    assert_eq!(refusal(put(foreign).await).code(), Code::NotFound);
    put(own).await.unwrap();
    let refused = refusal(leases.revoke(foreign).await);
    assert_eq!(refused.message(), NO_SUCH_LEASE);
    let listed = leases.leases().await.unwrap();
    let listed: Vec<_> = listed.leases().iter().map(|lease| lease.id()).collect();
    assert_eq!(listed, [own]);
    let with_keys = LeaseTimeToLiveOptions::new().with_keys();
    let told = leases.time_to_live(own, Some(with_keys)).await.unwrap();
    assert_eq!(told.keys(), [b"/registry/leased"]);

    let (mut keeper, mut renewals) = leases.keep_alive(own).await.unwrap();
    keeper.keep_alive().await.unwrap();
    let renewed = renewals.message().await.unwrap().unwrap();
    assert_eq!(renewed.ttl(), 60);
    let gone = leases.keep_alive(foreign).await.unwrap_err();
    assert!(matches!(gone, Error::LeaseKeepAliveError(_)), "{gone}");

    leases.revoke(own).await.unwrap();
    assert!(passed.all().await.is_empty());
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_for_the_whole_store_is_not_for_one_user() {
    let passed = passed().await;
    let compacted = refusal(passed.kv().compact(0, None).await);
    assert_eq!(compacted.code(), Code::Unimplemented);
    let mut maintenance = passed.client.maintenance_client();
    let status = maintenance.status().await.unwrap();
    assert!(status.db_size() > 0 && status.version().starts_with("3."));
    assert_eq!(
        status.db_size_quota().unsigned_abs(),
        passed.site.quota_bytes
    );
    let activate = etcd_client::AlarmAction::Activate;
    let raised = maintenance.alarm(activate, AlarmType::None, None).await;
    assert_eq!(refusal(raised).code(), Code::PermissionDenied);
    let members = passed.client.cluster_client().member_list().await;
    assert_eq!(refusal(members).code(), Code::Unimplemented);
    passed.stop().await;
}

/// A user that writes without end is refused while others can still write, and may write again once
/// it has deleted enough.
#[tokio::test(flavor = "multi_thread")]
async fn who_fills_the_store_is_refused_before_others_are() {
    let passed = passed().await;
    let handle = passed.etcd().handle();
    let client = handle.root().namespaced(ConsensusUser::Kubernetes);
    let timing = quota::Timing {
        look: Duration::from_millis(50),
        keep: Duration::from_millis(500),
    };
    let filled = async {
        let value = "x".repeat(256 << 10);
        let mut written = 0;
        loop {
            match passed
                .try_put(&format!("/registry/{written}"), &value)
                .await
            {
                Ok(()) => written += 1,
                Err(status) => break (written, status),
            }
            assert!(written < 1000, "the user is never refused");
        }
    };
    let story = async {
        let (written, refused) = within_timeout("the user's quota", filled).await;
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert_eq!(refused.message(), NO_SPACE);
        assert!(written > 8, "{written} of 32 parts of the limit");
        let txn = |operation| Txn::new().and_then([operation]);
        let put = || TxnOp::put("/registry/more", "", None);
        for wrapped in [put(), TxnOp::txn(txn(put()))] {
            let refused = refusal(passed.kv().txn(txn(wrapped)).await);
            assert_eq!(refused.message(), NO_SPACE);
        }
        let refused = refusal(passed.client.lease_client().grant(60, None).await);
        assert_eq!(refused.message(), NO_SPACE);

        // It can still read, and others can write.
        let count = GetOptions::new().with_all_keys().with_count_only();
        let counted = passed.kv().get("", Some(count)).await.unwrap();
        assert_eq!(usize::try_from(counted.count()).unwrap(), written);
        let write = Write::when(Condition::Absent("authorities".into()));
        let write = write.put("authorities", b"secret".to_vec());
        others(passed.etcd()).write(write).await.unwrap();
        // Deleted data are in use until their history is compacted.
        let everything = DeleteOptions::new().with_all_keys();
        let delete = TxnOp::delete("", Some(everything));
        passed.kv().txn(txn(delete)).await.unwrap();
        let mut capacities = passed.capacity.value().watch();
        let enough = capacities.wait_for(|now| *now == Capacity::Enough);
        within_timeout("capacity for writes", enough).await.unwrap();
        passed.put("/registry/again", "1").await;
    };
    tokio::select! {
        () = story => {}
        never = quota::watch(&client, 8 << 20, timing, &passed.capacity) => match never {},
    }
    passed.stop().await;
}
