use std::sync::Arc;
use std::time::Duration;

use hearth_api::testing::Script;
use hearth_api::v1::ClusterDirectory;
use hearth_api::v1::cluster_directory::{Address, Node};
use hearth_base::event::{self, Value, Writer};
use tokio::time::Instant;

use crate::cluster_state::{self, ClusterState, Desk, State};
use crate::handover::MemberData;
use crate::roles::membership::{SPLIT_AFTER, Worker, run};
use crate::roles::testing::{Alone, Fake, fixed, never, next, soon, until_ok};
use crate::roles::{ControlPlane, CuratorConnection};

struct Member {
    fake: Fake,
    worker: Alone,
    control_plane: Writer<ControlPlane>,
    acknowledged: Writer<Instant>,
    desk: Desk,
    state: ClusterState,
    connection: Value<CuratorConnection>,
}

/// The worker of a node whose cluster state has gone this way.
async fn member(before: &[State], last: Option<Instant>) -> Member {
    let fake = Fake::new(Script::default()).await;
    member_of(fake, ClusterDirectory::default(), before, last)
}

fn member_of(
    fake: Fake,
    directory: ClusterDirectory,
    before: &[State],
    last: Option<Instant>,
) -> Member {
    let member = MemberData {
        directory,
        ..fake.member()
    };
    let (state_writer, state) = cluster_state::new();
    for step in before {
        state_writer.set(*step).unwrap();
    }
    let (control_plane_writer, control_plane) = event::value();
    let (acknowledged_writer, acknowledged) = event::value();
    let (connection_writer, connection) = event::value();
    control_plane_writer.set(ControlPlane::default());
    if let Some(last) = last {
        acknowledged_writer.set(last);
    }
    let desk = Desk::with(state_writer);
    let worker = Arc::new(Worker {
        member: fixed(member),
        control_plane,
        acknowledged,
        desk: desk.clone(),
        connection: connection_writer,
    });
    Member {
        fake,
        worker: Alone::run(move |ctx| run(ctx, worker.clone())),
        control_plane: control_plane_writer,
        acknowledged: acknowledged_writer,
        desk,
        state,
        connection,
    }
}

impl Member {
    /// The control plane serves at this port, or not at all.
    fn serves_at(&self, curator_port: Option<u16>) {
        self.control_plane.set(ControlPlane {
            curator_port,
            ..ControlPlane::default()
        });
    }

    async fn becomes(&self, state: State) {
        let mut states = self.state.watch();
        let reached = states.wait_for(|now| *now == state);
        soon("the state", reached).await.unwrap();
    }
}

#[tokio::test]
async fn there_is_a_connection_once_there_is_a_curator() {
    let test = member(&[], None).await;
    let mut connection = test.connection.watch();
    test.worker.is_healthy().await;
    never("a connection to nobody", connection.next()).await;

    test.serves_at(Some(test.fake.curator.address.port()));
    let ours = next("a connection", &mut connection).await;
    assert_eq!(ours.node_id, test.fake.node_id);
    soon("an answer", ours.cluster_domain()).await.unwrap();

    // It stays what it is while nothing better is known, and while what is
    // known is the same.
    test.serves_at(None);
    test.serves_at(Some(test.fake.curator.address.port()));
    never("a connection for no reason", connection.next()).await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn other_curators_do_while_there_is_none_on_this_machine() {
    let fake = Fake::new(Script::default()).await;
    let other = fake.another(Script::default()).await;
    let directory = ClusterDirectory {
        nodes: vec![Node {
            id: format!("hearth-{}", "0".repeat(32)),
            addresses: vec![Address {
                host: "127.0.0.1".into(),
                port: other.address.port().into(),
            }],
            roles: None,
        }],
    };
    let test = member_of(fake, directory, &[], None);
    let mut connection = test.connection.watch();
    let to_other = next("a connection", &mut connection).await;
    soon("an answer", to_other.cluster_domain()).await.unwrap();
    assert_eq!(other.calls(), ["GetClusterInfo"]);

    test.serves_at(Some(test.fake.curator.address.port()));
    let with_own = next("a connection", &mut connection).await;
    soon("the end", other.stop()).await.unwrap();
    // A call may still meet the connection that is ending.
    until_ok("an answer of our own", || with_own.cluster_domain()).await;
    assert!(test.fake.curator.calls().contains(&"GetClusterInfo"));
    test.worker.stop().await;
}

#[tokio::test]
async fn an_acknowledgement_is_home() {
    let test = member(&[], None).await;
    test.worker.is_healthy().await;
    assert_eq!(test.state.get(), State::Unknown);
    test.acknowledged.set(Instant::now());
    test.becomes(State::Home).await;
    test.worker.stop().await;
}

#[tokio::test]
async fn an_old_acknowledgement_is_not_home() {
    let old = Instant::now().checked_sub(SPLIT_AFTER + Duration::from_secs(1));
    let test = member(&[State::Split], Some(old.expect("an older machine"))).await;
    let home = || {
        let mut states = test.state.watch();
        async move { states.wait_for(|state| *state == State::Home).await }
    };
    test.worker.is_healthy().await;
    never("home by old news", home()).await;
    test.acknowledged.set(Instant::now());
    soon("home", home()).await.unwrap();
    test.worker.stop().await;
}

#[tokio::test]
async fn the_writer_of_the_state_lies_on_the_desk_between_runs() {
    let test = member(&[State::Home], None).await;
    test.worker.is_healthy().await;
    assert!(test.desk.try_take().is_none());
    // Without it the worker cannot go on. It could not even fail again, had it
    // not found the writer where it left it.
    drop(test.acknowledged);
    test.worker.fails("the writer of this value is gone").await;
    test.worker.restarted(3).await;
    test.worker.stop().await;
    let held = test.desk.try_take().expect("on the desk");
    assert_eq!(held.get(), State::Home);
    assert_eq!(test.state.get(), State::Home);
}

#[tokio::test]
async fn disowning_is_for_ever() {
    let test = member(&[State::Home, State::Disowning], None).await;
    let mut states = test.state.watch();
    assert_eq!(next("the state", &mut states).await, State::Disowning);
    test.worker.is_healthy().await;
    test.acknowledged.set(Instant::now());
    never("a life after", states.next()).await;
    test.worker.is_fine();
    test.worker.stop().await;
}
