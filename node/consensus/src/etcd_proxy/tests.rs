//! The proxy: with arbitrary messages, and against a real etcd.

use std::collections::BTreeMap;
use std::path::PathBuf;

use futures::StreamExt as _;
use hearth_base::event::{self, Writer};
use hearth_base::testing::within_timeout;
use proptest::prelude::*;
use tokio::net::UnixStream;
use tonic::Code;
use tonic::transport::Endpoint;

use super::super::ConsensusUser;
use super::super::fenced::{Condition, Write};
use super::super::testing::{Running, Site};
use super::super::wire::compare::{CompareTarget, TargetUnion};
use super::super::wire::event::EventType;
use super::super::wire::kv_client::KvClient;
use super::super::wire::lease_client::LeaseClient;
use super::super::wire::request_op::Request as Asked;
use super::super::wire::response_op::Response as Answered;
use super::super::wire::watch_client::WatchClient;
use super::super::wire::watch_request::RequestUnion;
use super::super::wire::{
    CompactionRequest, Compare, DeleteRangeRequest, KeyValue, LeaseGrantRequest,
    LeaseKeepAliveRequest, LeaseLeasesRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest,
    PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCancelRequest, WatchCreateRequest,
    WatchProgressRequest, WatchRequest,
};
use super::key_prefix::EMPTY_KEY;
use super::leases::{NO_SUCH_LEASE, is_ours};
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
    pub channel: Channel,
    pub over: CancellationToken,
    pub server: tokio::task::JoinHandle<()>,
    pub site: Site,
}

pub(super) async fn passed() -> Passed {
    let site = Site::new();
    let etcd = site.start(true).await;
    let socket = site.root.ephemeral.path().join("confined");
    let over = CancellationToken::new();
    let client = etcd.handle().root().namespaced(ConsensusUser::Kubernetes);
    let listener = UnixListener::bind(&socket).unwrap();
    let (writer, capacity) = event::value();
    let ended = over.clone();
    let server = tokio::spawn(async move { serve(listener, &client, capacity, ended).await });
    let way = socket.clone();
    let connector = tower::service_fn(move |_| {
        let socket = way.clone();
        async move {
            let stream = UnixStream::connect(&socket).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    let channel = Endpoint::from_static("http://confined.invalid");
    Passed {
        etcd: Some(etcd),
        capacity: writer,
        socket,
        channel: channel.connect_with_connector_lazy(connector),
        over,
        server,
        site,
    }
}

impl Passed {
    fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.channel.clone()).max_decoding_message_size(LARGEST_MESSAGE)
    }

    fn etcd(&self) -> &Running {
        self.etcd.as_ref().unwrap()
    }

    pub(super) async fn put(&self, key: &str, value: &str) {
        self.try_put(key, value).await.unwrap();
    }

    pub(super) async fn try_put(&self, key: &str, value: &str) -> Result<(), Status> {
        let request = PutRequest {
            key: key.into(),
            value: value.into(),
            ..Default::default()
        };
        self.kv().put(request).await.map(drop)
    }

    /// Everything that this user can read.
    pub(super) async fn all(&self) -> BTreeMap<String, String> {
        let request = RangeRequest {
            key: vec![0],
            range_end: vec![0],
            ..Default::default()
        };
        let answer = self.kv().range(request).await.unwrap().into_inner();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let kvs = answer.kvs.into_iter();
        kvs.map(|kv| (text(kv.key), text(kv.value))).collect()
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
    let request = DeleteRangeRequest {
        key: vec![0],
        range_end: vec![0],
        prev_kv: true,
    };
    let deleted = passed
        .kv()
        .delete_range(request)
        .await
        .unwrap()
        .into_inner();
    let keys: Vec<_> = deleted.prev_kvs.into_iter().map(|kv| kv.key).collect();
    assert_eq!(keys, [b"/registry/a", b"/registry/b"]);
    assert!(others.get("authorities").await.unwrap().is_some());
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_compares_and_answers_as_etcd_does() {
    let passed = passed().await;
    let txn = |revision| TxnRequest {
        compare: vec![Compare {
            key: "/registry/a".into(),
            target: CompareTarget::Mod.into(),
            target_union: Some(TargetUnion::ModRevision(revision)),
            ..Default::default()
        }],
        success: vec![RequestOp {
            request: Some(Asked::RequestPut(PutRequest {
                key: "/registry/a".into(),
                value: "new".into(),
                ..Default::default()
            })),
        }],
        failure: vec![RequestOp {
            request: Some(Asked::RequestRange(RangeRequest {
                key: "/registry/a".into(),
                ..Default::default()
            })),
        }],
    };
    let done = passed.kv().txn(txn(0)).await.unwrap().into_inner();
    assert!(done.succeeded);
    let not_done = passed.kv().txn(txn(0)).await.unwrap().into_inner();
    assert!(!not_done.succeeded);
    let Some(Answered::ResponseRange(range)) = &not_done.responses[0].response else {
        panic!("{:?}", not_done.responses);
    };
    assert_eq!(range.kvs[0].key, b"/registry/a");
    assert_eq!((range.kvs[0].version, range.count), (1, 1));
    assert_eq!(range.kvs[0].mod_revision, done.header.unwrap().revision);

    let empty = passed.kv().put(PutRequest::default()).await.unwrap_err();
    assert_eq!(
        (empty.code(), empty.message()),
        (Code::InvalidArgument, EMPTY_KEY)
    );
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_watches_share_a_stream_and_see_their_own() {
    let passed = passed().await;
    let (requests, stream) = tokio::sync::mpsc::channel(8);
    let stream = tokio_stream::wrappers::ReceiverStream::new(stream);
    let create = |key: &str, end: &str, watch_id| WatchRequest {
        request_union: Some(RequestUnion::CreateRequest(WatchCreateRequest {
            key: key.into(),
            range_end: end.into(),
            watch_id,
            prev_kv: true,
            ..Default::default()
        })),
    };
    requests.send(create("/a/", "/a0", 7)).await.unwrap();
    let mut client = WatchClient::new(passed.channel.clone());
    let mut answers = client.watch(stream).await.unwrap().into_inner();
    let made = answers.message().await.unwrap().unwrap();
    assert!(made.created && made.watch_id == 7);
    requests.send(create("/", "\0", 8)).await.unwrap();
    let made = answers.message().await.unwrap().unwrap();
    assert!(made.created && made.watch_id == 8);

    // Nothing of other users is reported.
    let write = Write::when(Condition::Absent("x".into())).put("x", Vec::new());
    others(passed.etcd()).write(write).await.unwrap();
    passed.put("/a/1", "old").await;
    let mut told = BTreeMap::new();
    while told.len() < 2 {
        let answer = answers.message().await.unwrap().unwrap();
        for event in answer.events {
            told.insert(answer.watch_id, event.kv.unwrap().key);
        }
    }
    assert!(told.values().all(|key| key == b"/a/1"), "{told:?}");

    let cancel = WatchRequest {
        request_union: Some(RequestUnion::CancelRequest(WatchCancelRequest {
            watch_id: 8,
        })),
    };
    requests.send(cancel).await.unwrap();
    let answer = answers.message().await.unwrap().unwrap();
    assert!(answer.canceled && answer.watch_id == 8);
    let request = DeleteRangeRequest {
        key: "/a/1".into(),
        ..Default::default()
    };
    passed.kv().delete_range(request).await.unwrap();
    let answer = answers.message().await.unwrap().unwrap();
    let event = &answer.events[0];
    assert_eq!((answer.watch_id, event.r#type()), (7, EventType::Delete));
    assert_eq!(event.kv.as_ref().unwrap().key, b"/a/1");
    let before = event.prev_kv.as_ref().unwrap();
    assert_eq!(
        (&before.key[..], &before.value[..]),
        (&b"/a/1"[..], &b"old"[..])
    );

    let progress = WatchRequest {
        request_union: Some(RequestUnion::ProgressRequest(WatchProgressRequest {})),
    };
    requests.send(progress).await.unwrap();
    let answer = within_timeout("progress", answers.message())
        .await
        .unwrap()
        .unwrap();
    assert!(answer.header.unwrap().revision > 1);
    // A server that is shut down does not wait for watches.
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_of_others_cannot_be_touched() {
    let passed = passed().await;
    let mut leases = LeaseClient::new(passed.channel.clone());
    let granted = leases.lease_grant(LeaseGrantRequest { ttl: 60, id: 0 });
    let own = granted.await.unwrap().into_inner().id;
    assert!(own > 0 && is_ours(own));
    let foreign = others(passed.etcd())
        .grant(Duration::from_secs(60))
        .await
        .unwrap()
        .id();

    let put = |lease| PutRequest {
        key: "/registry/leased".into(),
        lease,
        ..Default::default()
    };
    let refused = passed.kv().put(put(foreign)).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    passed.kv().put(put(own)).await.unwrap();
    let id = foreign;
    let refused = leases.lease_revoke(LeaseRevokeRequest { id }).await;
    assert_eq!(refused.unwrap_err().message(), NO_SUCH_LEASE);
    let listed = leases.lease_leases(LeaseLeasesRequest {}).await.unwrap();
    let listed: Vec<_> = listed.into_inner().leases.iter().map(|l| l.id).collect();
    assert_eq!(listed, [own]);
    let request = LeaseTimeToLiveRequest {
        id: own,
        keys: true,
    };
    let told = leases
        .lease_time_to_live(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(told.keys, [b"/registry/leased"]);

    let requests = [own, foreign].map(|id| LeaseKeepAliveRequest { id });
    let answers = leases.lease_keep_alive(tokio_stream::iter(requests)).await;
    let answers: Vec<_> = answers.unwrap().into_inner().collect().await;
    let answers: Vec<_> = answers.into_iter().map(|a| a.unwrap().ttl).collect();
    assert_eq!(answers, [60, 0]);

    leases
        .lease_revoke(LeaseRevokeRequest { id: own })
        .await
        .unwrap();
    assert!(passed.all().await.is_empty());
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_for_the_whole_store_is_not_for_one_user() {
    let passed = passed().await;
    let compacted = passed.kv().compact(CompactionRequest::default()).await;
    assert_eq!(compacted.unwrap_err().code(), Code::Unimplemented);
    let mut maintenance = MaintenanceClient::new(passed.channel.clone());
    let status = maintenance
        .status(StatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert!(status.db_size > 0 && status.version.starts_with("3."));
    let request = AlarmRequest {
        action: AlarmAction::Activate.into(),
        ..Default::default()
    };
    let refused = maintenance.alarm(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut cluster =
        super::super::wire::cluster_client::ClusterClient::new(passed.channel.clone());
    let members = cluster.member_list(super::super::wire::MemberListRequest {});
    assert_eq!(members.await.unwrap_err().code(), Code::Unimplemented);
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
        let txn = |operation| TxnRequest {
            success: vec![RequestOp {
                request: Some(operation),
            }],
            ..Default::default()
        };
        let put = Asked::RequestPut(PutRequest {
            key: "/registry/more".into(),
            ..Default::default()
        });
        for wrapped in [put.clone(), Asked::RequestTxn(txn(put))] {
            let refused = passed.kv().txn(txn(wrapped)).await.unwrap_err();
            assert_eq!(refused.message(), NO_SPACE);
        }
        let lease = LeaseGrantRequest { ttl: 60, id: 0 };
        let mut leases = LeaseClient::new(passed.channel.clone());
        let refused = leases.lease_grant(lease).await.unwrap_err();
        assert_eq!(refused.message(), NO_SPACE);

        // It can still read, and others can write.
        let count = RangeRequest {
            key: vec![0],
            range_end: vec![0],
            count_only: true,
            ..Default::default()
        };
        let counted = passed.kv().range(count).await.unwrap().into_inner();
        assert_eq!(usize::try_from(counted.count).unwrap(), written);
        let write = Write::when(Condition::Absent("authorities".into()));
        let write = write.put("authorities", b"secret".to_vec());
        others(passed.etcd()).write(write).await.unwrap();
        // Deleted data are in use until their history is compacted.
        let delete = Asked::RequestDeleteRange(DeleteRangeRequest {
            key: vec![0],
            range_end: vec![0],
            prev_kv: false,
        });
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
