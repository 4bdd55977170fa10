//! Closed connections and callers that do not read, against a real etcd.

use etcd_client::{Event, WatchOptions, WatchStream};
use hearth_base::testing::within_timeout;
use nix::sys::signal::Signal;
use tokio::time::timeout;
use tonic::Code;

use super::super::super::client::CONNECT_BOUND;
use super::super::tests::{Passed, passed, passed_with};
use super::*;

/// A watch stream on everything, once the watch is created.
async fn watch(passed: &Passed) -> WatchStream {
    let client = passed.client.watch_client();
    let mut client = client.max_decoding_message_size(usize::MAX);
    let everything = WatchOptions::new().with_range([0]);
    let mut stream = client.watch("", Some(everything)).await.unwrap();
    assert!(stream.message().await.unwrap().unwrap().created());
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_ends_is_seen_and_the_next_one_reached() {
    let passed = passed().await;
    passed.put("/a", "1").await;
    let mut watch = watch(&passed).await;
    passed.site.signal_etcd(Signal::SIGKILL);
    let broken = within_timeout("end of the watch", watch.message()).await;
    assert!(broken.is_err(), "{broken:?}");
    // Calls made meanwhile have failed, with whatever error.
    let again = async {
        while passed.try_put("/a", "2").await.is_err() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    within_timeout("etcd after the restart", again).await;
    assert_eq!(passed.all().await["/a"], "2");
    passed.stop().await;
}

/// A connection that waits for an unavailable etcd does not delay the shutdown.
#[tokio::test(flavor = "multi_thread")]
async fn it_is_over_while_etcd_is_away() {
    let mut passed = passed().await;
    passed.etcd.take().unwrap().stop().await;
    let stream = UnixStream::connect(&passed.socket).await.unwrap();
    // The connection is accepted, and waits for etcd.
    let (client, _connection) = client::handshake(stream).await.unwrap();
    passed.over.cancel();
    let ended = timeout(CONNECT_BOUND / 2, &mut passed.server).await;
    ended.expect("the shutdown must not wait").unwrap();
    drop(client);
}

/// Responses that a caller does not read do not block other callers.
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
            events += heard.message().await.unwrap().unwrap().events().len();
        }
    };
    within_timeout("all writes and reads", async {
        tokio::join!(written, read)
    })
    .await;
    assert_eq!(passed.all().await.len(), VALUES);
    let mut events = 0;
    while events < VALUES {
        let answer = within_timeout("an answer", silent.message())
            .await
            .unwrap()
            .unwrap();
        events += answer.events().len();
    }
    passed.stop().await;
}

/// The caller learns why, and everything else on its connection continues.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_large_fails_alone() {
    let passed = passed_with(1 << 20).await;
    let mut heard = watch(&passed).await;
    let value = "x".repeat(400 << 10);
    for key in ["/a", "/b", "/c"] {
        passed.put(key, &value).await;
        let answer = within_timeout("an event", heard.message()).await;
        assert_eq!(answer.unwrap().unwrap().events().len(), 1);
    }
    let refused = passed.try_all().await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    let message = refused.message();
    assert!(message.contains("the limit is 1048576"), "{message}");
    passed.delete("/c").await;
    let answer = within_timeout("an event", heard.message()).await;
    assert_eq!(answer.unwrap().unwrap().events().len(), 1);
    assert_eq!(passed.all().await.len(), 2);
    passed.stop().await;
}

/// A cancelled call does not end its connection, and a cancelled watch ends in etcd.
#[tokio::test(flavor = "multi_thread")]
async fn who_breaks_off_breaks_off_one_call_alone() {
    let passed = passed().await;
    let mut heard = watch(&passed).await;
    drop(watch(&passed).await);
    // A call that is cancelled before or after its response.
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
            let mut records = answer.events().iter().filter_map(Event::kv);
            if records.any(|record| record.key() == b"/b") {
                break;
            }
        }
    };
    within_timeout("event on the other watch", told).await;
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
        let answer = within_timeout("an answer", answer).await.unwrap();
        let status = Status::from_header_map(answer.headers()).unwrap();
        assert_ne!(status.code(), Code::Ok, "{content:?}");
    }
    passed.put("/a", "1").await;
    drop(client);
    within_timeout("end of the connection", connection)
        .await
        .unwrap()
        .unwrap();
    passed.stop().await;
}
