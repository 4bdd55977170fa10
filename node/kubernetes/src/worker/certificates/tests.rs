//! The worker's certificates, with a real curator.

use std::net::Ipv4Addr;
use std::time::UNIX_EPOCH;

use hearth_api::client::{Curators, Options};
use hearth_api::testing;
use hearth_api::testing::TestClock;
use hearth_api::tls::wall_clock;
use hearth_api::v1::{NodeRoles, NodeState, node_roles};
use hearth_base::testing::{TestSupervisor, within_timeout};
use hearth_curator::testing::{World, id_of, quick};
use hearth_host::layout::Root;
use rustls::SignatureScheme::ED25519;

use super::*;

/// In seconds.
const DAY: u64 = 24 * 3600;

/// All are renewed after two thirds of their lifetime, and when the node's address changes.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_due_is_asked_for_again() {
    let world = World::new(quick()).await;
    let node = world.add_node(NodeState::Up).await;
    let roles = NodeRoles {
        kubernetes_worker: Some(node_roles::KubernetesWorker {}),
        ..NodeRoles::default()
    };
    world.set_roles(&node, roles).await;
    let first = Ipv4Addr::new(192, 0, 2, 9);
    world.report(&node, &first.to_string()).await;

    let trust = testing::node_client_config(&node, wall_clock());
    let curators = Curators::new(vec![world.endpoint()], trust, Options::default());
    let (connection_writer, connection) = event::value();
    connection_writer.set(CuratorConnection::new(id_of(&node), curators));
    let (address_writer, address) = event::value();
    address_writer.set(first.into());
    let (tls_writer, tls) = event::value::<Arc<ClientConfig>>();
    let (client_writer, client) = event::value();
    let (waits_writer, waits) = event::value::<String>();
    let clock = TestClock::new();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    clock.set(now.as_secs());
    let directory = tempfile::tempdir().unwrap();
    let root = Root::under(&directory.path().join("node"));
    std::fs::create_dir_all(root.ephemeral.path()).unwrap();
    let files = root.ephemeral.kubernetes().worker();
    let server = files.keys(KUBELET_SERVER).certificate();
    let worker = Arc::new(Worker {
        files,
        calendar: CertificateClock::by(clock.clone(), Duration::from_millis(20)),
        connection,
        address,
        tls: tls_writer,
        client: client_writer,
        waits: waits_writer,
    });
    let alone = TestSupervisor::run(move |ctx| run(ctx, worker.clone()));

    let mut given = client.watch();
    let mut next = async |what: &str| {
        within_timeout(what, given.next()).await.unwrap();
        let tls = tls.get().unwrap();
        let own = tls.client_auth_cert_resolver.resolve(&[], &[ED25519]);
        (
            own.unwrap().cert[0].to_vec(),
            std::fs::read(&server).unwrap(),
        )
    };
    let (own, shown) = next("the first ones").await;
    clock.set(now.as_secs() + 21 * DAY);
    let (new_own, new_shown) = next("the next ones").await;
    assert_ne!(new_own, own);
    assert_ne!(new_shown, shown);

    clock.set(now.as_secs());
    let second = Ipv4Addr::new(192, 0, 2, 10);
    world.report(&node, &second.to_string()).await;
    address_writer.set(second.into());
    loop {
        let (_, shown) = next("those for the new address").await;
        let (_, pem) = x509_parser::pem::parse_x509_pem(&shown).unwrap();
        if proves(&pem.contents, second.into()) {
            break;
        }
    }

    // The address changes again before the curators know it.
    let (missed, third) = (Ipv4Addr::new(192, 0, 2, 11), Ipv4Addr::new(192, 0, 2, 12));
    address_writer.set(missed.into());
    let mut waits = waits.watch();
    let waiting = waits.wait_for(|why| why.contains(&missed.to_string()));
    within_timeout("it waits for the curators", waiting)
        .await
        .unwrap();
    world.report(&node, &third.to_string()).await;
    address_writer.set(third.into());
    let (_, shown) = next("those for the third address").await;
    let (_, pem) = x509_parser::pem::parse_x509_pem(&shown).unwrap();
    assert!(proves(&pem.contents, third.into()));
    alone.stop().await;
    world.stop().await;
}
