//! Clients that do not complete their handshakes.

use super::*;

#[tokio::test]
async fn the_silent_keep_nobody_out() {
    let f = Fixture::with_limits(Limits {
        handshakes: 2,
        handshake_timeout: 10 * LONG,
        ..Limits::default()
    })
    .await;
    let mut silent = Vec::new();
    for _ in 0..5 {
        silent.push(TcpStream::connect(f.curator.address).await.expect("TCP"));
    }
    tokio::time::timeout(LONG, info(f.as_owner()))
        .await
        .expect("at once")
        .expect("served");
    // The oldest one was closed.
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(LONG, silent[0].read_to_end(&mut rest))
        .await
        .expect("it is hung up on");
}

#[tokio::test]
async fn an_address_with_many_handshakes_takes_the_place_of_no_other() {
    let f = Fixture::with_limits(Limits {
        handshakes: 4,
        handshake_timeout: 10 * LONG,
        ..Limits::default()
    })
    .await;
    let slow = TcpStream::connect(f.curator.address).await.expect("TCP");
    let mut many = Vec::new();
    for _ in 0..12 {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        let from = "127.0.0.2:0".parse().expect("an address");
        socket.bind(from).expect("bound");
        many.push(socket.connect(f.curator.address).await.expect("TCP"));
    }
    for flooder in &mut many[..8] {
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(LONG, flooder.read_to_end(&mut rest))
            .await
            .expect("it is hung up on");
    }
    let open = slow.try_read(&mut [0]).expect_err("nothing was sent");
    assert_eq!(open.kind(), std::io::ErrorKind::WouldBlock);
    tokio::time::timeout(LONG, info(f.as_owner()))
        .await
        .expect("at once")
        .expect("served");
}

#[tokio::test]
async fn silent_handshakes_are_given_up() {
    let f = Fixture::with_limits(Limits {
        handshakes: 2,
        handshake_timeout: Duration::from_millis(300),
        ..Limits::default()
    })
    .await;
    let mut silent = Vec::new();
    for _ in 0..2 {
        silent.push(TcpStream::connect(f.curator.address).await.expect("TCP"));
    }
    for mut silent in silent {
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(LONG, silent.read_to_end(&mut rest))
            .await
            .expect("it is hung up on");
    }
}
