//! How much of HTTP/2 each kind of peer gets.

use super::*;

/// Streams at a time, and bytes that a stream may send unread, by what the
/// server says first.
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
    // What HTTP/2 begins with need not be said.
    let window = window.unwrap_or(65_535);
    assert_eq!(window, limits.anonymous_window);

    let node = f.cluster.node();
    let node = tls::node_client_config(&node, ExpectedServer::AnyNode, f.clock.clone());
    let mut member = silent(f.curator.address, node.expect("proper")).await;
    let (streams, of_member) = settings(&mut member).await;
    assert_eq!(streams, Some(limits.streams));
    assert!(limits.streams > limits.anonymous_streams);
    assert!(of_member.expect("more than it begins with") > window);
}

/// More than fit at a time: they wait for each other.
#[tokio::test]
async fn a_stranger_may_still_make_many_calls() {
    let f = Fixture::new().await;
    let channel = f.as_stranger();
    let calls = (0..100).map(|_| leader(channel.clone()));
    for answer in futures::future::join_all(calls).await {
        answer.expect("answered");
    }
}
