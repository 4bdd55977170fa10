use std::sync::atomic::{AtomicBool, Ordering};

use hearth_api::identity::NodeKey;
use hearth_base::testing::within_timeout;
use hearth_host::pki;
use tokio::net::UnixListener;

use super::*;
use crate::testing::{Peer, Site};

/// A certificate for a node of this site's cluster that is no member.
fn outsider(site: &Site) -> (NodeId, Peer) {
    let key = NodeKey::generate();
    let node = NodeId::from_public_key(&key.public());
    let authorities = pki::load(&site.root.data.etcd(), site.cluster_id).unwrap();
    let certificate = authorities.etcd.issue_peer(node, key.public()).unwrap();
    let key = rustls_pki_types::PrivatePkcs8KeyDer::from(key.expose_pkcs8_der().to_vec());
    let ca = authorities.etcd.certificate().clone();
    (node, Peer::new(ca, Some((certificate, key.into()))))
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_hears_members_only() {
    let site = Site::new();
    let (node, outsider) = outsider(&site);
    let said = Arc::new(AtomicBool::new(false));
    let mut config = site.config(true);
    let address = config.peer_listen;
    let curators = Arc::clone(&said);
    config.member_of_curators = Arc::new(move |id| *id == node && curators.load(Ordering::SeqCst));
    let running = site.start_with(config).await;
    let etcd = site.node_id;

    let member = Peer::with(&site.root.data.etcd().peer());
    let answer = member.members(etcd, address).await.unwrap();
    assert!(answer.contains(&etcd.to_string()), "{answer}");

    // A certificate of the same CA is not enough.
    outsider.members(etcd, address).await.unwrap_err();
    // The curators have made it a member, of which this etcd does not know yet.
    said.store(true, Ordering::SeqCst);
    let mut open = outsider.connect(etcd, address).await.unwrap();
    open.members().await.unwrap();
    // It is a member no more: what is open ends.
    said.store(false, Ordering::SeqCst);
    within_timeout("the connection is closed", open.closed()).await;
    outsider.members(etcd, address).await.unwrap_err();

    // Another cluster's certificates, and none.
    let other = Site::new();
    let (_, stranger) = self::outsider(&other);
    stranger.members(etcd, address).await.unwrap_err();
    let authorities = pki::load(&site.root.data.etcd(), site.cluster_id).unwrap();
    let nobody = Peer::new(authorities.etcd.certificate().clone(), None);
    nobody.members(etcd, address).await.unwrap_err();
    member.members(etcd, address).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_peer_that_reads_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("etcd");
    let listener = UnixListener::bind(&socket).unwrap();
    let (mut peer, port) = tokio::io::duplex(1024);
    peer.write_all(b"GET /raft/stream").await.unwrap();
    let etcd = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        // Ends when nobody takes what it writes any more.
        while stream.write_all(&[0; 4096]).await.is_ok() {}
    };
    tokio::time::pause();
    let (carried, ()) = tokio::join!(carry(port, &socket), etcd);
    assert_eq!(carried.unwrap_err().kind(), io::ErrorKind::TimedOut);
    drop(peer);
}

#[tokio::test]
async fn both_ends_can_end_a_connection() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("etcd");
    let listener = UnixListener::bind(&socket).unwrap();
    for peer_ends in [true, false] {
        let (mut peer, port) = tokio::io::duplex(1024);
        let all = async {
            peer.write_all(b"question").await.unwrap();
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut question = [0; 8];
            stream.read_exact(&mut question).await.unwrap();
            assert_eq!(&question, b"question");
            stream.write_all(b"answer").await.unwrap();
            let mut answer = [0; 6];
            peer.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"answer");
            if peer_ends {
                peer.shutdown().await.unwrap();
                assert_eq!(stream.read(&mut question).await.unwrap(), 0);
            }
            drop(stream);
            assert_eq!(peer.read(&mut answer).await.unwrap(), 0);
        };
        let (carried, ()) = tokio::join!(carry(port, &socket), all);
        carried.unwrap();
    }
}
