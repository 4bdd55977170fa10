//! Connections that end, and callers that do not read, against a real etcd.

use nix::sys::signal::Signal;
use tokio::time::timeout;
use tonic::Code;

use super::super::super::client::CONNECT_BOUND;
use super::super::super::wire::watch_client::WatchClient;
use super::super::super::wire::watch_request::RequestUnion;
use super::super::super::wire::{WatchCreateRequest, WatchRequest};
use super::super::LARGEST_MESSAGE;
use super::super::tests::{Passed, passed};
use super::*;
use hearth_base::testing::soon;

/// A stream that watches everything, once its watch is made.
async fn watch(passed: &Passed) -> tonic::Streaming<WatchResponse> {
    let create = WatchRequest {
        request_union: Some(RequestUnion::CreateRequest(WatchCreateRequest {
            range_end: vec![0],
            ..Default::default()
        })),
    };
    let requests = tokio_stream::once(create).chain(tokio_stream::pending());
    let mut client =
        WatchClient::new(passed.channel.clone()).max_decoding_message_size(LARGEST_MESSAGE);
    let mut answers = client.watch(requests).await.unwrap().into_inner();
    assert!(answers.message().await.unwrap().unwrap().created);
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_ends_is_seen_and_the_next_one_reached() {
    let passed = passed().await;
    passed.put("/a", "1").await;
    let mut watch = watch(&passed).await;
    passed.site.signal_etcd(Signal::SIGKILL);
    let broken = soon("the watch ends", watch.message()).await;
    assert!(broken.is_err(), "{broken:?}");
    // What was asked meanwhile has failed, in whatever words.
    let again = async {
        while passed.try_put("/a", "2").await.is_err() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon("etcd is there again", again).await;
    assert_eq!(passed.all().await["/a"], "2");
    passed.stop().await;
}

/// Who waits for an etcd that is away does not hold up the end.
#[tokio::test(flavor = "multi_thread")]
async fn it_is_over_while_etcd_is_away() {
    let mut passed = passed().await;
    passed.etcd.take().unwrap().stop().await;
    let stream = UnixStream::connect(&passed.socket).await.unwrap();
    // It is taken, and waits for etcd.
    let (client, _connection) = client::handshake(stream).await.unwrap();
    passed.over.cancel();
    let ended = timeout(CONNECT_BOUND / 2, &mut passed.server).await;
    ended.expect("its end waits for nobody").unwrap();
    drop(client);
}

/// etcd's answers that nobody fetches wait, and nobody waits for them.
#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_read_holds_up_nobody_else() {
    const VALUES: usize = 96;
    let passed = passed().await;
    let mut silent = watch(&passed).await;
    let value = "x".repeat(256 << 10);
    let mut heard = watch(&passed).await;
    let written = async {
        for number in 0..VALUES {
            passed.put(&format!("/{number:03}"), &value).await;
        }
    };
    let read = async {
        let mut events = 0;
        while events < VALUES {
            events += heard.message().await.unwrap().unwrap().events.len();
        }
    };
    soon("all is written and read", async {
        tokio::join!(written, read)
    })
    .await;
    assert_eq!(passed.all().await.len(), VALUES);
    let mut events = 0;
    while events < VALUES {
        let answer = soon("an answer", silent.message()).await.unwrap().unwrap();
        events += answer.events.len();
    }
    passed.stop().await;
}

/// A caller that gives up does not end its connection, and its watch is over.
#[tokio::test(flavor = "multi_thread")]
async fn who_breaks_off_breaks_off_one_call_alone() {
    let passed = passed().await;
    let mut heard = watch(&passed).await;
    drop(watch(&passed).await);
    // One that is broken off before it is answered, or after.
    for _ in 0..20 {
        let put = passed.try_put("/a", "1");
        tokio::time::timeout(Duration::from_micros(300), put)
            .await
            .ok();
    }
    passed.put("/b", "2").await;
    let told = async {
        loop {
            let answer = heard.message().await.unwrap().unwrap();
            let mut keys = answer.events.iter().filter_map(|event| event.kv.as_ref());
            if keys.any(|record| record.key == b"/b") {
                break;
            }
        }
    };
    soon("the other watch is told", told).await;
    passed.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_message_is_refused_and_harms_nobody() {
    let passed = passed().await;
    let stream = UnixStream::connect(&passed.socket).await.unwrap();
    let (mut client, connection) = client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    for content in [
        &[][..],
        &[1, 0, 0, 0, 0],
        &[0, 0, 0, 0, 9, 1],
        &[0, 0xff, 0xff, 0xff, 0xff],
    ] {
        let request = Request::post(format!("http://x{}", TxnRequest::PATH));
        let (answer, mut stream) = client
            .send_request(request.body(()).unwrap(), false)
            .unwrap();
        stream
            .send_data(Bytes::copy_from_slice(content), true)
            .unwrap();
        let answer = soon("an answer", answer).await.unwrap();
        let status = Status::from_header_map(answer.headers()).unwrap();
        assert_ne!(status.code(), Code::Ok, "{content:?}");
    }
    passed.put("/a", "1").await;
    drop(client);
    soon("the connection ends", connection)
        .await
        .unwrap()
        .unwrap();
    passed.stop().await;
}
