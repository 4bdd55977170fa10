//! HTTP/2 limits of each kind of peer.

use super::*;

/// Concurrent streams, and bytes that a stream may send unread, from the server's settings.
async fn settings(
    stream: &mut tokio_rustls::client::TlsStream<TcpStream>,
) -> (Option<u32>, Option<u32>) {
    let mut rest = [0; 8];
    stream.read_exact(&mut rest).await.expect("a frame's head");
    let [high, low, kind, ..] = rest;
    assert_eq!(kind, 4, "settings");
    let mut content = vec![0; usize::from(high) << 8 | usize::from(low)];
    stream.read_exact(&mut content).await.expect("settings");
    let get = |wanted: u16| {
        let mut all = content.chunks_exact(6);
        let found = all.find(|setting| setting[..2] == wanted.to_be_bytes())?;
        Some(u32::from_be_bytes(found[2..].try_into().expect("four")))
    };
    (get(3), get(4))
}

#[tokio::test]
async fn strangers_get_less_of_http2_than_members() {
    let limits = Limits::default();
    let f = Fixture::with_limits(limits).await;
    let mut stranger = f.silent_stranger().await;
    let (streams, window) = settings(&mut stranger).await;
    assert_eq!(streams, Some(limits.anonymous_streams));
    // HTTP/2's initial values need not be sent.
    let window = window.unwrap_or(65_535);
    assert_eq!(window, limits.anonymous_window);

    let node = f.cluster.node();
    let node = testing::node_client_config(&node, f.clock.clone());
    let mut member = silent(f.curator.address, node).await;
    let (streams, of_member) = settings(&mut member).await;
    assert_eq!(streams, Some(limits.streams));
    assert!(limits.streams > limits.anonymous_streams);
    assert!(of_member.expect("more than it begins with") > window);
}

/// More calls than may run at a time: they are queued.
#[tokio::test]
async fn a_stranger_may_still_make_many_calls() {
    let f = Fixture::new().await;
    let channel = f.as_stranger();
    let calls = (0..100).map(|_| leader(channel.clone()));
    for answer in futures::future::join_all(calls).await {
        answer.expect("answered");
    }
}

/// A frame: length, type, flags, stream.
fn frame(kind: u8, flags: u8, stream: u32, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).expect("short").to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(content);
    frame
}

/// The headers of a call in HPACK, by index in its static table where there is one.
fn headers(path: &str) -> Vec<u8> {
    let text = |text: &str| {
        let length = u8::try_from(text.len()).expect("short");
        [&[length], text.as_bytes()].concat()
    };
    // POST, https; then :path, :authority, content-type, te.
    let mut block = vec![0x83, 0x87, 0x04];
    block.extend(text(path));
    block.push(0x01);
    block.extend(text("x"));
    block.extend([0x0f, 0x10]);
    block.extend(text("application/grpc"));
    block.push(0x00);
    block.extend(text("te"));
    block.extend(text("trailers"));
    block
}

/// Calls that are reset as soon as they are made cost the caller nothing, but each would cost the
/// server a handler.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_are_taken_back_at_once_harm_nobody() {
    const CALLS: u32 = 20_000;
    let f = Fixture::new().await;
    let node = f.cluster.node();
    let config = testing::node_client_config(&node, f.clock.clone());
    let attacker = silent(f.curator.address, config).await;
    let (mut from_server, mut to_server) = tokio::io::split(attacker);
    let call = headers("/hearth.v1.Management/GetClusterInfo");
    let flood = async move {
        to_server
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await?;
        to_server.write_all(&frame(4, 0, 0, &[])).await?;
        for number in 0..CALLS {
            let stream = 2 * number + 1;
            // Complete headers of a stream that stays open; its reset.
            let mut both = frame(1, 4, stream, &call);
            both.extend(frame(3, 0, stream, &8_u32.to_be_bytes()));
            to_server.write_all(&both).await?;
        }
        to_server.shutdown().await
    };
    // The server may close the connection; that is fine.
    let flood = tokio::spawn(flood);
    let answers = tokio::spawn(async move {
        let mut rest = Vec::new();
        let _ = from_server.read_to_end(&mut rest).await;
    });
    let member = f.as_owner();
    let mut calls = 0;
    while !flood.is_finished() || calls < 10 {
        let answer = tokio::time::timeout(LONG, info(member.clone())).await;
        answer.expect("soon").expect("served meanwhile");
        calls += 1;
    }
    let _ = flood.await.expect("no panic");
    let end = tokio::time::timeout(LONG, answers).await;
    end.expect("the server lets go of it").expect("no panic");
    // Those of its calls that reached a handler are over; it may connect again.
    let config = testing::node_client_config(&node, f.clock.clone());
    let again = f.channel(config);
    info(again).await.expect("a new connection");
}
