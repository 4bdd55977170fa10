use std::net::IpAddr;
use std::sync::Arc;

use hearth_api::testing::{Script, TestCurator};
use hearth_api::v1;
use hearth_api::v1::NodeStatus;
use hearth_base::event::{self, Writer};

use crate::cluster_state::{self, State};
use crate::roles::statuspush::{Worker, boot_id, run};
use crate::roles::testing::{Alone, Fake, never, soon};
use crate::roles::{ControlPlane, CuratorConnection};

struct Pushing {
    fake: Fake,
    worker: Alone,
    connection: Writer<CuratorConnection>,
    address: Writer<IpAddr>,
    control_plane: Writer<ControlPlane>,
    state: cluster_state::Writer,
    directory_saved: Writer<()>,
}

/// The worker of a node that is HOME at 192.0.2.1, runs a curator, and has not
/// saved its directory.
async fn pushing() -> Pushing {
    let fake = Fake::new(Script::default()).await;
    let (connection_writer, connection) = event::value();
    let (address_writer, address) = event::value();
    let (control_plane_writer, control_plane) = event::value();
    let (directory_writer, directory_saved) = event::value();
    let (state_writer, cluster_state) = cluster_state::new();
    connection_writer.set(fake.connection());
    address_writer.set("192.0.2.1".parse().unwrap());
    control_plane_writer.set(ControlPlane {
        curator_port: Some(7835),
        ..ControlPlane::default()
    });
    state_writer.set(State::Home).unwrap();
    let worker = Arc::new(Worker {
        version: "1.2.3".into(),
        connection,
        address,
        control_plane,
        cluster_state,
        directory_saved,
    });
    Pushing {
        fake,
        worker: Alone::run(move |ctx| run(ctx, worker.clone())),
        connection: connection_writer,
        address: address_writer,
        control_plane: control_plane_writer,
        state: state_writer,
        directory_saved: directory_writer,
    }
}

/// Waits for the report of this number, counted from 1; there are no others.
async fn report(curator: &TestCurator, number: usize) -> NodeStatus {
    let seen = soon("a report", curator.until(|s| s.statuses.len() >= number)).await;
    assert_eq!(seen.statuses.len(), number, "{:?}", seen.statuses);
    seen.statuses[number - 1].clone()
}

async fn no_more_than(curator: &TestCurator, number: usize) {
    let more = curator.until(|seen| seen.statuses.len() > number);
    never("another report", more).await;
}

#[tokio::test]
async fn nothing_is_reported_before_the_directory_is_saved() {
    let test = pushing().await;
    no_more_than(&test.fake.curator, 0).await;
    test.directory_saved.set(());
    let status = report(&test.fake.curator, 1).await;
    assert!(status.sent_at > 0);
    let wanted = NodeStatus {
        external_address: "192.0.2.1".into(),
        curator_port: 7835,
        version: "1.2.3".into(),
        boot_id: boot_id().unwrap(),
        sent_at: status.sent_at,
        cluster_state: v1::ClusterState::Home.into(),
        consensus: None,
        address_counter: 0,
    };
    assert_eq!(status, wanted);
    test.worker.is_healthy().await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn what_changes_is_reported_once() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    test.directory_saved.set(());
    report(curator, 1).await;

    test.address.set("192.0.2.1".parse().unwrap());
    test.control_plane.set(ControlPlane {
        curator_port: Some(7835),
        ..ControlPlane::default()
    });
    no_more_than(curator, 1).await;

    test.address.set("192.0.2.2".parse().unwrap());
    let status = report(curator, 2).await;
    assert_eq!(status.external_address, "192.0.2.2");

    test.control_plane.set(ControlPlane::default());
    assert_eq!(report(curator, 3).await.curator_port, 0);

    // Who is asked now may never have heard of it.
    let second = test.fake.another(Script::default()).await;
    test.connection.set(test.fake.connection_to(&second));
    let status = report(&second, 1).await;
    assert_eq!(status.external_address, "192.0.2.2");
    no_more_than(curator, 3).await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn in_split_nothing_is_reported() {
    let test = pushing().await;
    let curator = &test.fake.curator;
    test.directory_saved.set(());
    report(curator, 1).await;
    test.state.set(State::Split).unwrap();
    test.address.set("192.0.2.3".parse().unwrap());
    no_more_than(curator, 1).await;
    test.state.set(State::Home).unwrap();
    let status = report(curator, 2).await;
    assert_eq!(status.external_address, "192.0.2.3");
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn a_report_that_failed_is_made_again() {
    let test = pushing().await;
    // A curator that does not know the cluster.
    let stranger = Fake::new(Script::default()).await;
    test.connection
        .set(test.fake.connection_to(&stranger.curator));
    test.directory_saved.set(());
    test.worker.fails("certificate").await;
    test.connection.set(test.fake.connection());
    report(&test.fake.curator, 1).await;
    test.worker.stop().await;
}
