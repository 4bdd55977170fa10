use std::net::SocketAddr;
use std::sync::Arc;

use hearth_api::client::{Channel, Curators, Endpoint, Options as ClientOptions};
use hearth_api::identity::{NodeCredentials, NodeId, UserCredentials};
use hearth_api::recovery::UnlockSettings;
use hearth_api::testing;
use hearth_api::testing::TestCluster;
use hearth_api::tls::{self, ExpectedServer, wall_clock};
use hearth_api::v1::node_local_client::NodeLocalClient;
use hearth_api::v1::node_management_client::NodeManagementClient;
use hearth_api::v1::{
    ColdStartPolicy, ExchangeAddressesRequest, GetLogsRequest, GetLogsResponse,
    GetPacketFilterRequest, GetTimeRequest, LogSeverity, NodeRoles, NodeState, PowerOffRequest,
    RebootRequest,
};
use hearth_base::event::{self, Writer};
use hearth_base::logtree::{LogTree, Options, Severity};
use hearth_base::testing::{TestSupervisor, assert_never, fixed, until_ok, within_timeout};
use hearth_host::cluster_state::{self, State};
use hearth_host::handover::{MemberData, PacketFilter};
use hearth_host::network_control;
use hearth_host::power::{Power, PowerRequest};
use hearth_sys::clock;
use hearth_sys::nftables::Nftables;
use tonic::{Code, Streaming};

use crate::addresses::AddressBook;
use crate::known::{Seen, View};
use crate::nodemgmt::{Worker, run};

struct Managed {
    cluster: TestCluster,
    worker: TestSupervisor,
    address: SocketAddr,
    log: LogTree,
    power: Power,
    view: Writer<Arc<View>>,
    recorded: Writer<UnlockSettings>,
    packet_filter: Writer<PacketFilter>,
    state: cluster_state::Writer,
}

/// The worker of a node that is HOME and has not seen its cluster's nodes.
async fn managed() -> Managed {
    let cluster = TestCluster::new();
    let node = Arc::new(cluster.node());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let log = LogTree::new(Options::default());
    let power = Power::default();
    let (view_writer, view) = event::value();
    let (recorded_writer, recorded) = event::value();
    recorded_writer.set(UnlockSettings {
        cold_start_policy: ColdStartPolicy::Owner,
        recovery_recipient: None,
        owner: None,
    });
    let (packet_filter_writer, packet_filter) = event::value();
    let (state_writer, cluster_state) = cluster_state::new();
    state_writer.set(State::Home).unwrap();
    let (book, _) = AddressBook::new(wall_clock());
    let own = testing::own(&node);
    book.open(&own);
    let worker = Arc::new(Worker {
        listen: address,
        log_tree: log.clone(),
        power: power.clone(),
        network_control: network_control::new().0,
        book,
        acknowledged: event::value().1,
        member: fixed(MemberData {
            own,
            directory: hearth_api::v1::ClusterDirectory::default(),
            uses_tpm: false,
        }),
        view,
        cluster_state,
        recorded,
        packet_filter,
    });
    let worker = TestSupervisor::run(move |ctx| run(ctx, worker.clone()));
    worker.is_healthy().await;
    Managed {
        cluster,
        worker,
        address,
        log,
        power,
        view: view_writer,
        recorded: recorded_writer,
        packet_filter: packet_filter_writer,
        state: state_writer,
    }
}

fn id(node: &NodeCredentials) -> NodeId {
    NodeId::from_public_key(&node.key.public())
}

impl Managed {
    fn channel(&self, trust: Arc<rustls::ClientConfig>) -> Channel {
        let endpoint = Endpoint::from(self.address);
        Curators::new(vec![endpoint], trust, ClientOptions::default()).channel()
    }

    fn as_user(&self, name: &str) -> NodeManagementClient<Channel> {
        self.with(&self.cluster.user(name))
    }

    fn with(&self, user: &UserCredentials) -> NodeManagementClient<Channel> {
        let trust = tls::user_client_config(user, ExpectedServer::AnyNode, wall_clock());
        NodeManagementClient::new(self.channel(trust.unwrap()))
    }

    fn as_node(&self, node: &NodeCredentials) -> Channel {
        self.channel(testing::node_client_config(node, wall_clock()))
    }

    /// The curators know exactly these nodes.
    fn sees(&self, nodes: &[&NodeCredentials]) {
        let seen = Seen {
            state: NodeState::Up,
            roles: NodeRoles::default(),
            located: None,
            second_address: None,
            curator_port: 0,
            labels: Vec::new(),
            settings: Vec::new(),
            networking: None,
        };
        self.view.set(Arc::new(View {
            nodes: nodes.iter().map(|node| (id(node), seen.clone())).collect(),
            ..View::default()
        }));
    }
}

/// The result of a call by this caller; `Ok` if addresses are exchanged.
async fn exchange(channel: &Channel) -> Result<(), Code> {
    let request = ExchangeAddressesRequest::default();
    let mut client = NodeLocalClient::new(channel.clone());
    let answer = within_timeout("an answer", client.exchange_addresses(request)).await;
    answer.map(drop).map_err(|status| status.code())
}

async fn messages(stream: &mut Streaming<GetLogsResponse>, count: usize) -> Vec<String> {
    let mut all = Vec::new();
    while all.len() < count {
        let response = within_timeout("a piece", stream.message()).await.unwrap();
        let entries = response.expect("it goes on").entries;
        all.extend(entries.into_iter().map(|entry| entry.message));
    }
    all
}

#[tokio::test]
async fn the_owner_reads_the_log() {
    let test = managed().await;
    for (dn, severity, line) in [
        ("root.a", Severity::Info, "one"),
        ("root.a.b", Severity::Warning, "two"),
        ("root.a.b", Severity::Info, "three"),
        ("root.ab", Severity::Error, "four"),
    ] {
        test.log.append_raw(dn, severity, line);
    }
    let mut owner = test.as_user("owner");
    let all = GetLogsRequest {
        dn: "root.a".into(),
        subtree: true,
        ..GetLogsRequest::default()
    };
    let mut ask = async |request: GetLogsRequest| {
        let stream = within_timeout("an answer", owner.get_logs(request)).await;
        stream.map(tonic::Response::into_inner)
    };
    let mut stream = ask(all.clone()).await.unwrap();
    assert_eq!(messages(&mut stream, 3).await, ["one", "two", "three"]);
    assert!(
        within_timeout("the end", stream.message())
            .await
            .unwrap()
            .is_none()
    );

    let grave = GetLogsRequest {
        min_severity: LogSeverity::Warning.into(),
        follow: true,
        ..all.clone()
    };
    let mut stream = ask(grave).await.unwrap();
    assert_eq!(messages(&mut stream, 1).await, ["two"]);
    test.log.append_raw("root.a", Severity::Info, "five");
    test.log.append_raw("root.a", Severity::Error, "six");
    assert_eq!(messages(&mut stream, 1).await, ["six"]);
    assert_never("more", stream.message()).await;

    let newest = GetLogsRequest {
        backlog: 1,
        subtree: false,
        ..all.clone()
    };
    let mut stream = ask(newest).await.unwrap();
    assert_eq!(messages(&mut stream, 1).await, ["six"]);

    let unknown = GetLogsRequest {
        min_severity: 77,
        ..all
    };
    assert_eq!(
        ask(unknown).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn there_are_so_many_readers_and_no_more() {
    let test = managed().await;
    let mut owner = test.as_user("owner");
    let request = GetLogsRequest {
        follow: true,
        ..GetLogsRequest::default()
    };
    let mut readers = Vec::new();
    let refused = loop {
        match within_timeout("an answer", owner.get_logs(request.clone())).await {
            Ok(stream) => readers.push(stream),
            Err(status) => break status,
        }
    };
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(readers.len(), 32);
    // After one reader is closed, another is admitted.
    readers.pop();
    until_ok("a place", || {
        let (mut owner, request) = (owner.clone(), request.clone());
        async move { owner.get_logs(request).await }
    })
    .await;
    test.worker.stop().await;
}

#[tokio::test]
async fn the_packet_filter_is_shown_as_the_kernel_has_it() {
    let managed = managed().await;
    let mut owner = managed.as_user("owner");
    let mut read = async |all_tables| {
        let request = GetPacketFilterRequest { all_tables };
        let mut parts = owner.get_packet_filter(request).await?.into_inner();
        let mut read = Vec::new();
        while let Some(part) = parts.message().await? {
            read.push(part.rules);
        }
        Ok::<_, tonic::Status>(read)
    };
    let none = read(false).await.unwrap_err();
    assert_eq!(none.code(), Code::FailedPrecondition);
    assert!(none.message().contains("no packet filter"), "{none}");

    // A program in the place of nft that says how it was called, and then some.
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("nft");
    let script = "#!/bin/sh\necho \"$*\"\nn=0; while [ $n -lt 99 ]; do\n\
                  /usr/bin/printf '%01000d\\n' $n; n=$((n+1)); done\n";
    std::fs::write(&program, script).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, executable).unwrap();
    managed.packet_filter.set(PacketFilter {
        nftables: Nftables::at(program),
        table: "own",
        ranges: None,
    });
    for (all, called) in [(false, "list table inet own\n"), (true, "list ruleset\n")] {
        let parts = read(all).await.unwrap();
        assert!(
            parts.len() > 1 && parts[0].starts_with(called),
            "{}",
            parts.len()
        );
        assert_eq!(parts.concat().len(), called.len() + 99 * 1001);
    }
    managed.worker.stop().await;
}

#[tokio::test]
async fn a_former_owner_is_refused_as_soon_as_the_node_knows_another_one() {
    let test = managed().await;
    let (former, present) = (test.cluster.user("owner"), test.cluster.user("owner"));
    let becomes_owner = |owner: &UserCredentials| {
        test.recorded.set(UnlockSettings {
            cold_start_policy: ColdStartPolicy::Owner,
            recovery_recipient: None,
            owner: Some(owner.key.public()),
        });
    };
    let request = GetLogsRequest {
        follow: true,
        ..GetLogsRequest::default()
    };
    becomes_owner(&former);
    let answer = test.with(&former).get_logs(request.clone()).await;
    let mut open = answer.unwrap().into_inner();
    let refused = test.with(&present).get_logs(request.clone()).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let key = former.key.public().to_string();
    assert!(refused.message().contains(&key), "{refused}");

    becomes_owner(&present);
    within_timeout("the end of the stream", async {
        while let Ok(Some(_)) = open.message().await {}
    })
    .await;
    let refused = test.with(&former).get_logs(request.clone()).await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    test.with(&present).get_logs(request).await.unwrap();
    test.worker.stop().await;
}

#[tokio::test]
async fn the_owner_ends_the_machine() {
    let test = managed().await;
    let mut owner = test.as_user("owner");
    within_timeout("an answer", owner.reboot(RebootRequest {}))
        .await
        .unwrap();
    assert_eq!(
        within_timeout("the end", test.power.asked()).await,
        PowerRequest::Reboot
    );
    test.worker.stop().await;

    let test = managed().await;
    let mut owner = test.as_user("owner");
    within_timeout("an answer", owner.power_off(PowerOffRequest {}))
        .await
        .unwrap();
    assert_eq!(
        within_timeout("the end", test.power.asked()).await,
        PowerRequest::PowerOff
    );
    test.worker.stop().await;
}

/// In each state of the node's knowledge, the owner is admitted and a node is not.
#[tokio::test]
async fn the_log_and_the_power_are_for_the_owner_alone() {
    let test = managed().await;
    let node = test.cluster.node();
    let as_node = test.as_node(&node);
    for step in 0..4 {
        match step {
            0 => {}
            1 => test.sees(&[&node]),
            2 => drop(test.state.set(State::Split).unwrap()),
            _ => drop(test.state.set(State::Disowning).unwrap()),
        }
        let mut owner = test.as_user("owner");
        let logs = owner.get_logs(GetLogsRequest::default());
        within_timeout("an answer", logs).await.unwrap();
        let mut other = test.as_user("somebody");
        let refused = within_timeout("an answer", other.reboot(RebootRequest {})).await;
        assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
        let mut node = NodeManagementClient::new(as_node.clone());
        let refused = within_timeout("an answer", node.reboot(RebootRequest {})).await;
        assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    }
    assert_never("an end", test.power.asked()).await;
    test.worker.stop().await;
}

#[tokio::test]
async fn nodes_exchange_addresses_unless_they_are_gone() {
    let test = managed().await;
    let (node, gone) = (test.cluster.node(), test.cluster.node());
    let (as_node, as_gone) = (test.as_node(&node), test.as_node(&gone));
    // Nothing is known about any node.
    assert_eq!(exchange(&as_node).await, Ok(()));
    assert_eq!(exchange(&as_gone).await, Ok(()));
    test.sees(&[&node]);
    let cut = || async { exchange(&as_gone).await.err().ok_or(()) };
    until_ok("it is refused", cut).await;
    assert_eq!(exchange(&as_node).await, Ok(()));
    // Address exchange works without a quorum.
    test.state.set(State::Split).unwrap();
    assert_eq!(exchange(&as_node).await, Ok(()));
    test.state.set(State::Disowning).unwrap();
    assert_eq!(exchange(&as_node).await, Err(Code::PermissionDenied));
    test.worker.is_fine();
    test.worker.stop().await;
}

/// The time, too, needs no quorum, but a node of the cluster.
#[tokio::test]
async fn nodes_tell_their_time_to_nodes() {
    let test = managed().await;
    let node = test.cluster.node();
    test.sees(&[&node]);
    test.state.set(State::Split).unwrap();
    let before = clock::unix_milliseconds();
    let ask = async |channel| {
        let mut client = NodeLocalClient::new(channel);
        let answer = client.get_time(GetTimeRequest {});
        within_timeout("an answer", answer).await
    };
    let time = ask(test.as_node(&node)).await.unwrap().into_inner();
    assert!(before <= time.time_ms && time.time_ms <= clock::unix_milliseconds());
    assert_eq!(time.synchronized, clock::is_synchronised());
    let user = test.cluster.user("somebody");
    let trust = tls::user_client_config(&user, ExpectedServer::AnyNode, wall_clock());
    let refused = ask(test.channel(trust.unwrap())).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    test.worker.is_fine();
    test.worker.stop().await;
}

/// Not only calls are ended, but the connection itself.
#[tokio::test]
async fn the_open_connection_of_a_deleted_node_is_cut() {
    use tokio::io::AsyncReadExt as _;
    let test = managed().await;
    let node = test.cluster.node();
    test.sees(&[&node]);
    let trust = testing::node_client_config(&node, wall_clock());
    let stream = tokio::net::TcpStream::connect(test.address).await.unwrap();
    let name = rustls_pki_types::ServerName::IpAddress(test.address.ip().into());
    let connecting = tokio_rustls::TlsConnector::from(trust).connect(name, stream);
    let mut stream = within_timeout("a connection", connecting).await.unwrap();
    let mut settings = [0; 9];
    within_timeout(
        "the server's SETTINGS frame",
        stream.read_exact(&mut settings),
    )
    .await
    .unwrap();
    test.sees(&[]);
    let mut rest = Vec::new();
    // With or without an error.
    drop(within_timeout("the end", stream.read_to_end(&mut rest)).await);
    test.worker.is_fine();
    test.worker.stop().await;
}
