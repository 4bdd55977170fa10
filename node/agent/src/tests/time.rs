//! The time service against real sockets: small NTP servers of this test, chronyd, and the nodes of a
//! cluster. Only the clock is not the machine's.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_api::identity::{NodeCredentials, NodeId};
use hearth_api::server::{Server, Services, Transport};
use hearth_api::testing::{self, Script, TestCluster};
use hearth_api::time_server::TimeServer;
use hearth_api::v1::cluster_directory::{Address, Node};
use hearth_api::v1::node_local_server::{NodeLocal, NodeLocalServer};
use hearth_api::v1::{
    ClusterConfiguration, ClusterDirectory, ExchangeAddressesRequest, ExchangeAddressesResponse,
    GetTimeRequest, GetTimeResponse, TimeSource,
};
use hearth_base::event::{self, Value, Writer};
use hearth_base::testing::{TestSupervisor, within_timeout};
use hearth_host::handover::{MemberData, TimeProblem, TimeStatus};
use hearth_sys::clock::{ClockError, SystemClock};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::testing::Fake;
use crate::time::{CuratorTime, Worker, run};
use crate::{CuratorConnection, LocalControlPlane};

const HOUR: i64 = 3600;
const YEAR: i64 = 365 * 24 * HOUR;
/// How exact a comparison on a busy machine is, in milliseconds.
const EXACT: i64 = 100;

/// A clock that is the machine's, plus a difference in nanoseconds.
#[derive(Default)]
struct TestClock {
    ahead: AtomicI64,
    steps: AtomicUsize,
    saved: AtomicUsize,
    is_stuck: AtomicBool,
    /// What the last correction said about synchronisation.
    synchronised: Mutex<Option<bool>>,
}

impl TestClock {
    fn ahead_by(seconds: i64) -> Arc<Self> {
        Arc::new(Self {
            ahead: AtomicI64::new(seconds * 1_000_000_000),
            ..Self::default()
        })
    }

    /// Against the machine's clock, in milliseconds.
    fn error_ms(&self) -> i64 {
        self.ahead.load(Ordering::SeqCst) / 1_000_000
    }
}

impl SystemClock for TestClock {
    fn now(&self) -> SystemTime {
        let ahead = self.ahead.load(Ordering::SeqCst);
        let by = Duration::from_nanos(ahead.unsigned_abs());
        match ahead < 0 {
            true => SystemTime::now() - by,
            false => SystemTime::now() + by,
        }
    }

    fn step(&self, by: i64) -> Result<(), ClockError> {
        if self.is_stuck.load(Ordering::SeqCst) {
            let source = std::io::ErrorKind::PermissionDenied.into();
            return Err(ClockError::Correct { by, source });
        }
        self.ahead.fetch_add(by, Ordering::SeqCst);
        self.steps.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn slew(&self, by: i64, _: Duration, synchronised: bool) -> Result<(), ClockError> {
        self.ahead.fetch_add(by, Ordering::SeqCst);
        *self.synchronised.lock().unwrap() = Some(synchronised);
        Ok(())
    }

    fn save(&self) -> Result<(), ClockError> {
        self.saved.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A time server on a loopback address, whose clock is ahead by this many seconds.
async fn server(tasks: &mut JoinSet<()>, ahead: i64) -> TimeServer {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tasks.spawn(async move {
        let mut request = [0; 48];
        loop {
            let (length, from) = socket.recv_from(&mut request).await.unwrap();
            assert_eq!((length, request[0]), (48, 0x23));
            let answer = answer(&request, ahead);
            // Something else first, as an attacker could send it.
            socket.send_to(&[0x24; 48], from).await.unwrap();
            socket.send_to(&answer, from).await.unwrap();
        }
    });
    address.into()
}

fn answer(request: &[u8; 48], ahead: i64) -> [u8; 48] {
    const BEGIN: u64 = 2_208_988_800;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seconds = (since.as_secs() + BEGIN).checked_add_signed(ahead).unwrap();
    let fraction = (u64::from(since.subsec_nanos()) << 32) / 1_000_000_000;
    let now = (seconds << 32 | fraction).to_be_bytes();
    let mut bytes = [0; 48];
    (bytes[0], bytes[1]) = (0x24, 1);
    bytes[24..32].copy_from_slice(&request[40..]);
    bytes[32..40].copy_from_slice(&now);
    bytes[40..].copy_from_slice(&now);
    bytes
}

/// A running worker and the values that it reads.
struct Keeping {
    worker: TestSupervisor,
    time: Value<TimeStatus>,
    dhcp: Writer<Vec<IpAddr>>,
    member: Writer<MemberData>,
    control_plane: Writer<LocalControlPlane>,
    _directory: Writer<ClusterDirectory>,
    connection: Writer<CuratorConnection>,
    curator_time: Writer<CuratorTime>,
}

fn keeping(clock: &Arc<TestClock>, parameters: Vec<TimeServer>, port: u16) -> Keeping {
    let (dhcp, dhcp_time_servers) = event::value();
    let (member_writer, member) = event::value();
    let (control_plane_writer, control_plane) = event::value();
    let (directory_writer, directory) = event::value();
    let (connection_writer, connection) = event::value();
    let (curator_time_writer, curator_time) = event::value();
    let (time_writer, time) = event::value();
    let build_time = SystemTime::now() - Duration::from_secs(30 * 24 * 3600);
    let worker = Arc::new(Worker {
        clock: clock.clone(),
        build_time,
        end: build_time + Duration::from_secs(20 * YEAR.unsigned_abs()),
        parameters,
        port,
        dhcp_time_servers,
        member,
        control_plane,
        directory,
        connection,
        curator_time,
        time: time_writer,
    });
    Keeping {
        worker: TestSupervisor::run(move |ctx| run(ctx, worker.clone())),
        time,
        dhcp,
        member: member_writer,
        control_plane: control_plane_writer,
        _directory: directory_writer,
        connection: connection_writer,
        curator_time: curator_time_writer,
    }
}

impl Keeping {
    async fn until(&self, what: &str, wanted: impl Fn(&TimeStatus) -> bool) -> TimeStatus {
        let mut times = self.time.watch();
        within_timeout(what, times.wait_for(wanted)).await.unwrap()
    }

    async fn synchronised(&self) -> TimeStatus {
        self.until("synchronisation", |status| status.synchronised)
            .await
    }
}

/// An hour ahead, an hour behind, three years ahead, and in 2066: the first answer of a server corrects each.
#[tokio::test]
async fn a_server_corrects_any_clock_at_once() {
    for ahead in [HOUR, -HOUR, 3 * YEAR, 40 * YEAR] {
        let mut tasks = JoinSet::new();
        let clock = TestClock::ahead_by(ahead);
        let server = server(&mut tasks, 0).await;
        let test = keeping(&clock, vec![server], 1);
        let status = test.synchronised().await;
        assert!(clock.error_ms().abs() < EXACT, "{} ms", clock.error_ms());
        assert_eq!(status.source, TimeSource::Parameters);
        assert_eq!(status.servers, [server.to_string()]);
        assert_eq!(status.steps, 1);
        let offset = status.measured.unwrap().offset / 1_000_000_000;
        assert!((offset + ahead).abs() <= 1, "{offset}");
        assert_eq!(*clock.synchronised.lock().unwrap(), Some(true));
        assert_eq!(clock.saved.load(Ordering::SeqCst), 1);
        test.worker.is_fine();
        test.worker.stop().await;
    }
}

#[tokio::test]
async fn a_clock_that_is_right_is_not_set() {
    let mut tasks = JoinSet::new();
    let clock = TestClock::ahead_by(0);
    let test = keeping(&clock, vec![server(&mut tasks, 0).await], 1);
    test.synchronised().await;
    assert_eq!(clock.steps.load(Ordering::SeqCst), 0);
    assert!(clock.error_ms().abs() < EXACT);
    test.worker.stop().await;
}

#[tokio::test]
async fn two_of_three_servers_decide_and_one_of_two_does_not() {
    let mut tasks = JoinSet::new();
    let (right, wrong) = (
        server(&mut tasks, 0).await,
        server(&mut tasks, 5 * HOUR).await,
    );
    let another = server(&mut tasks, 0).await;
    let clock = TestClock::ahead_by(HOUR);
    let test = keeping(&clock, vec![wrong, right, another], 1);
    test.synchronised().await;
    assert!(clock.error_ms().abs() < EXACT, "{} ms", clock.error_ms());
    test.worker.stop().await;

    let clock = TestClock::ahead_by(HOUR);
    let test = keeping(&clock, vec![wrong, right], 1);
    let status = test
        .until("a problem", |status| status.problem.is_some())
        .await;
    let problem = "the 2 answers contradict each other".to_owned();
    assert_eq!(status.problem, Some(TimeProblem::Unknown(problem)));
    assert!(!status.synchronised);
    assert_eq!(clock.steps.load(Ordering::SeqCst), 0);
    test.worker.stop().await;
}

#[tokio::test]
async fn a_clock_that_cannot_be_set_is_known_to_be_wrong() {
    let mut tasks = JoinSet::new();
    let clock = TestClock::ahead_by(HOUR);
    clock.is_stuck.store(true, Ordering::SeqCst);
    let test = keeping(&clock, vec![server(&mut tasks, 0).await], 1);
    let status = test
        .until("a problem", |status| status.problem.is_some())
        .await;
    let Some(TimeProblem::Wrong(problem)) = status.problem else {
        panic!("{status:?}");
    };
    assert!(problem.contains("cannot correct the clock by"), "{problem}");
    test.worker.stop().await;
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_named() {
    let deaf = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let server = TimeServer::from(deaf.local_addr().unwrap());
    let test = keeping(&TestClock::ahead_by(0), vec![server], 1);
    let status = test
        .until("a problem", |status| status.problem.is_some())
        .await;
    let problem = format!("the time server {server} does not answer");
    assert_eq!(status.problem, Some(TimeProblem::Unknown(problem)));
    test.worker.is_fine();
    test.worker.stop().await;
}

/// A cluster's setting comes before DHCP, and a change of it is followed.
#[tokio::test]
async fn the_servers_of_the_cluster_come_before_those_of_dhcp() {
    let mut tasks = JoinSet::new();
    let server = server(&mut tasks, 0).await;
    let fake = Fake::new(Script {
        configuration: ClusterConfiguration {
            time_servers: vec![server.to_string(), "of a newer release".into()],
            ..ClusterConfiguration::default()
        },
        ..Script::default()
    })
    .await;
    let clock = TestClock::ahead_by(HOUR);
    let test = keeping(&clock, Vec::new(), 1);
    let status = test.until("a state", |_| true).await;
    assert_eq!(status, TimeStatus::default());
    let dhcp: IpAddr = [127, 0, 0, 99].into();
    test.dhcp.set(vec![dhcp]);
    let status = test.until("DHCP", TimeStatus::has_servers).await;
    assert_eq!(status.source, TimeSource::Dhcp);
    assert_eq!(status.servers, ["127.0.0.99"]);
    test.connection.set(fake.connection());
    let status = test.synchronised().await;
    assert_eq!(status.source, TimeSource::ClusterSetting);
    assert_eq!(status.servers, [server.to_string()]);
    assert!(clock.error_ms().abs() < EXACT, "{} ms", clock.error_ms());
    test.worker.stop().await;
}

/// A node of a cluster, whose clock is ahead by this many seconds.
struct Shifted {
    ahead: i64,
    is_synchronised: bool,
}

#[tonic::async_trait]
impl NodeLocal for Shifted {
    async fn exchange_addresses(
        &self,
        _: Request<ExchangeAddressesRequest>,
    ) -> Result<Response<ExchangeAddressesResponse>, Status> {
        Err(Status::unimplemented("ExchangeAddresses"))
    }

    async fn get_time(
        &self,
        _: Request<GetTimeRequest>,
    ) -> Result<Response<GetTimeResponse>, Status> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let now = i64::try_from(now.as_millis()).unwrap();
        Ok(Response::new(GetTimeResponse {
            time_ms: now + self.ahead * 1000,
            synchronized: self.is_synchronised,
        }))
    }
}

fn id(node: &NodeCredentials) -> NodeId {
    NodeId::from_public_key(&node.key.public())
}

/// The members of a cluster, without the node of the test, on loopback addresses 127.78.NET.HOST.
struct Members {
    cluster: TestCluster,
    port: u16,
    directory: ClusterDirectory,
    net: u8,
    tasks: JoinSet<()>,
}

impl Members {
    async fn new(net: u8) -> Self {
        let free = TcpListener::bind((IpAddr::from([127, 78, net, 250]), 0));
        Self {
            cluster: TestCluster::new(),
            port: free.await.unwrap().local_addr().unwrap().port(),
            directory: ClusterDirectory::default(),
            net,
            tasks: JoinSet::new(),
        }
    }

    async fn add(&mut self, ahead: i64, is_synchronised: bool) {
        let node = self.cluster.node();
        let host = u8::try_from(self.directory.nodes.len() + 1).unwrap();
        let host = IpAddr::from([127, 78, self.net, host]);
        self.directory.nodes.push(Node {
            id: id(&node).to_string(),
            addresses: vec![Address {
                host: host.to_string(),
                port: 0,
            }],
            roles: None,
        });
        let listener = TcpListener::bind(SocketAddr::new(host, self.port))
            .await
            .unwrap();
        let transport = Transport::of_node(&testing::own(&node)).unwrap();
        let service = Shifted {
            ahead,
            is_synchronised,
        };
        self.tasks.spawn(async move {
            let services = Services::new().with(NodeLocalServer::new(service));
            let serve = Server::new(transport).serve(listener, services, CancellationToken::new());
            serve.await.unwrap();
        });
    }

    fn member(&self) -> MemberData {
        let node = self.cluster.node();
        MemberData {
            own: testing::own(&node),
            directory: self.directory.clone(),
            uses_tpm: false,
        }
    }

    /// A worker of a consensus member.
    fn keeping(&self, clock: &Arc<TestClock>) -> Keeping {
        let test = keeping(clock, Vec::new(), self.port);
        test.control_plane.set(LocalControlPlane {
            curator_port: Some(1),
            ..LocalControlPlane::default()
        });
        test.member.set(self.member());
        test
    }
}

#[tokio::test]
async fn a_member_without_servers_follows_the_median() {
    let mut members = Members::new(1).await;
    members.add(0, false).await;
    members.add(0, false).await;
    let clock = TestClock::ahead_by(HOUR);
    let test = members.keeping(&clock);
    let status = test.synchronised().await;
    assert_eq!(status.source, TimeSource::ConsensusMembers);
    assert_eq!(status.servers.len(), 2);
    assert!(clock.error_ms().abs() < EXACT, "{} ms", clock.error_ms());
    assert_eq!(*clock.synchronised.lock().unwrap(), Some(false));
    test.worker.is_fine();
    test.worker.stop().await;
    // The median is its own clock.
    let mut members = Members::new(2).await;
    members.add(HOUR, false).await;
    members.add(-HOUR, false).await;
    let clock = TestClock::ahead_by(0);
    let test = members.keeping(&clock);
    test.synchronised().await;
    assert_eq!(clock.steps.load(Ordering::SeqCst), 0);
    test.worker.stop().await;
}

#[tokio::test]
async fn a_member_with_a_server_is_right() {
    let mut members = Members::new(3).await;
    members.add(0, false).await;
    members.add(HOUR, true).await;
    let clock = TestClock::ahead_by(0);
    let test = members.keeping(&clock);
    test.synchronised().await;
    let error = clock.error_ms() - 1000 * HOUR;
    assert!(error.abs() < EXACT, "{error} ms");
    test.worker.stop().await;
}

#[tokio::test]
async fn of_two_members_none_is_followed() {
    let mut members = Members::new(4).await;
    members.add(HOUR, false).await;
    let clock = TestClock::ahead_by(0);
    let test = members.keeping(&clock);
    let status = test
        .until("a problem", |status| status.problem.is_some())
        .await;
    let problem = status.problem.unwrap();
    assert!(
        problem
            .reason()
            .contains("the clocks of 2 consensus members"),
        "{problem:?}"
    );
    assert_eq!(clock.steps.load(Ordering::SeqCst), 0);
    test.worker.stop().await;
}

#[tokio::test]
async fn a_node_that_is_no_member_follows_its_curator() {
    let members = Members::new(5).await;
    let clock = TestClock::ahead_by(HOUR);
    let test = keeping(&clock, Vec::new(), 1);
    test.curator_time.set(CuratorTime {
        time: SystemTime::now(),
        is_synchronised: true,
        received: Instant::now(),
        round_trip: Duration::from_millis(2),
    });
    test.member.set(members.member());
    let status = test.synchronised().await;
    assert_eq!(status.source, TimeSource::Curator);
    assert!(clock.error_ms().abs() < EXACT, "{} ms", clock.error_ms());
    test.worker.stop().await;
}

/// chronyd with its own clock as the source, on a port of a loopback address. It does not touch the machine's clock.
#[tokio::test]
async fn chrony_is_followed() {
    let free = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let path = std::env::var("PATH").unwrap_or_default();
    let pid = tempfile::tempdir().unwrap();
    let chronyd = tokio::process::Command::new("chronyd")
        .env("PATH", format!("{path}:/usr/sbin:/sbin"))
        .args([
            "-d",
            "-x",
            "-U",
            "bindaddress 127.0.0.1",
            "allow 127.0.0.0/8",
        ])
        .args([
            "local stratum 5",
            "cmdport 0",
            "bindcmdaddress /",
            "user root",
        ])
        .arg(format!("port {}", address.port()))
        .arg(format!("pidfile {}", pid.path().join("pid").display()))
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn();
    let mut chronyd = match chronyd {
        Ok(chronyd) => chronyd,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: no chronyd on this machine (package chrony)");
            return;
        }
        Err(error) => panic!("chronyd: {error}"),
    };
    let clock = TestClock::ahead_by(40 * YEAR);
    let test = keeping(&clock, vec![address.into()], 1);
    let status = test.synchronised().await;
    assert_eq!(status.steps, 1);
    assert!(clock.error_ms().abs() < EXACT, "{} ms", clock.error_ms());
    test.worker.is_fine();
    test.worker.stop().await;
    chronyd.kill().await.unwrap();
}
