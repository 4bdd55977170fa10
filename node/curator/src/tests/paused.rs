//! A curator's process is paused, not only its etcd: it resumes with its old state, and with calls
//! that have waited for it.

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::{Channel, Curators, Endpoint, Options};
use hearth_api::identity::{NodeCredentials, NodeKey, UserCredentials};
use hearth_api::settings;
use hearth_api::tls::{self, ExpectedServer, wall_clock};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::curator_local_client::CuratorLocalClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ClusterConfiguration, GetCurrentLeaderRequest, GetNodesRequest, HeartbeatRequest, Label, Node,
    NodeState, UpdateNodeLabelsRequest, WatchRequest,
};
use hearth_base::testing::{BOUND, pause, within_timeout};
use hearth_cluster::state;
use hearth_consensus::RootClient;
use hearth_consensus::fenced::{Condition, Write, WriteError};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tonic::{Code, Status};

use super::super::Timing;
use super::super::testing::{Pulse, Who, World, id_of, quick, serve};
use super::machine::by_id;

/// Environment variable with the directory of the other process.
const FOLDER: &str = "HEARTH_TEST_OTHER_CURATOR";
/// Prefix of the port on its standard output, among the lines of the test runner.
const PORT: &str = "curator port ";

/// A session lasts longer than the freshness bound, as in a real cluster: a curator whose session
/// has expired is stale.
fn timing() -> Timing {
    let real = Timing::default();
    let shortest = Duration::from_secs(5);
    let setting = settings::find("setting", "curator_session_seconds").unwrap();
    let mut configuration = ClusterConfiguration::default();
    let mut set = |seconds: u64| setting.assign(&mut configuration, &seconds.to_string());
    set(shortest.as_secs()).unwrap();
    set(shortest.as_secs() - 1).unwrap_err();
    assert!(shortest > real.freshness + shortest / 4);
    Timing {
        session: Some(shortest),
        freshness: real.freshness,
        ..quick()
    }
}

/// A curator in another process: this program, running a test that is only the curator.
struct Other {
    process: Child,
    endpoint: Endpoint,
    /// Keeps the output pipe of the test runner open.
    _lines: Lines<BufReader<ChildStdout>>,
    _folder: tempfile::TempDir,
}

impl Other {
    async fn start(etcd: &Path, node: &NodeCredentials) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes);
        write("seed", node.key.expose_seed().as_slice()).unwrap();
        write("certificate", &node.certificate).unwrap();
        write("ca", &node.ca).unwrap();
        write("etcd", etcd.to_str().unwrap().as_bytes()).unwrap();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::paused::the_other_process"])
            .args(["--ignored", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = within_timeout("the other curator serves", async {
            loop {
                let line = lines.next_line().await.unwrap().expect("a port");
                if let Some((_, port)) = line.split_once(PORT) {
                    return port.parse().unwrap();
                }
            }
        });
        Self {
            endpoint: Endpoint::new(Ipv4Addr::LOCALHOST.into(), port.await),
            process,
            _lines: lines,
            _folder: folder,
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id().expect("it runs").try_into().unwrap())
    }

    async fn stop(mut self) {
        drop(self.process.stdin.take());
        let ended = within_timeout("the other curator stops", self.process.wait()).await;
        assert!(ended.unwrap().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "not a test, but the other process of those here, which start it"]
async fn the_other_process() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let node = Arc::new(NodeCredentials {
        key: NodeKey::from_seed_slice(&read("seed")).unwrap(),
        certificate: read("certificate").into(),
        ca: read("ca").into(),
    });
    let etcd = RootClient::new(String::from_utf8(read("etcd")).unwrap().into());
    let (curator, ready) = serve(
        &etcd,
        &node,
        timing(),
        wall_clock(),
        hearth_base::event::value().1,
    )
    .await;
    // Not by `print!`, whose output the test runner captures.
    writeln!(std::io::stdout(), "{PORT}{}", ready.get().unwrap()).unwrap();
    let mut end = Vec::new();
    tokio::io::stdin().read_to_end(&mut end).await.unwrap();
    within_timeout("the curator stops", curator.shutdown()).await;
}

/// A connection that outlasts the pause, so that pending calls on it are answered.
fn patient(endpoint: &Endpoint, owner: &UserCredentials) -> Channel {
    let options = Options {
        call_timeout: 2 * BOUND,
        keep_alive: 2 * BOUND,
        ..Options::default()
    };
    let config = tls::user_client_config(owner, ExpectedServer::AnyNode, wall_clock());
    Curators::new(vec![endpoint.clone()], config.unwrap(), options).channel()
}

/// The leader in the first answer of the curator at this endpoint.
async fn leader(world: &World, at: &Endpoint) -> Result<String, Status> {
    let mut local = CuratorLocalClient::new(world.channel_to(at.clone(), &Who::Nobody));
    let leaders = local.get_current_leader(GetCurrentLeaderRequest {}).await?;
    let first = leaders.into_inner().message().await?;
    Ok(first.unwrap().leader_node_id)
}

/// Waits until this node leads, according to the curator at this endpoint.
async fn leads(world: &World, at: &Endpoint, node: &str) {
    within_timeout("a leader", async {
        while leader(world, at).await.ok().as_deref() != Some(node) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

async fn get_nodes(mut management: ManagementClient<Channel>) -> Result<Vec<Node>, Status> {
    let answers = management.get_nodes(GetNodesRequest::default()).await?;
    let mut answers = answers.into_inner();
    let mut nodes = Vec::new();
    while let Some(answer) = answers.message().await? {
        nodes.extend(answer.nodes);
    }
    Ok(nodes)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_curator_that_stood_still_decides_nothing_by_what_it_knew() {
    let mut world = World::new(timing()).await;
    let sleeper = world.add_node(NodeState::Up).await;
    let (sleeper_id, own_id) = (id_of(&sleeper).to_string(), world.site.node_id.to_string());
    let victim = world.add_node(NodeState::Up).await;
    let victim_id = id_of(&victim).to_string();

    // It is the only one, so it leads; then the other one starts.
    world.stop_curator().await;
    let etcd = world.site.config(false).socket_dir.join("client:0");
    let other = Other::start(&etcd, &sleeper).await;
    leads(&world, &other.endpoint, &sleeper_id).await;
    world.start_curator().await;
    leads(&world, &world.endpoint(), &sleeper_id).await;
    let candidates = world.client().list(state::ELECTION).await.unwrap().records;
    let oldest = candidates.iter().min_by_key(|c| c.create_revision).unwrap();
    let fence = Condition::Created(oldest.key.clone(), oldest.create_revision);

    // Its state, and the streams and calls by which it could act on it when it resumes.
    let mut pulse = Pulse::open_at(other.endpoint.clone(), &world, &victim)
        .await
        .unwrap();
    pulse.beat().await.unwrap();
    let channel = world.channel_to(other.endpoint.clone(), &Who::Node(&victim));
    let watch = CuratorClient::new(channel)
        .watch(WatchRequest::default())
        .await;
    let mut events = watch.unwrap().into_inner();
    let management = ManagementClient::new(patient(&other.endpoint, &world.owner().await));
    let known = within_timeout("nodes", get_nodes(management.clone()))
        .await
        .unwrap();
    assert!(known.iter().any(|node| node.id == victim_id));

    pause(other.pid()).await;
    // These calls wait in its socket from now on.
    let beat = HeartbeatRequest {
        boot_id: super::super::testing::BOOT_ID.into(),
        protocol_version: 1,
        ending: false,
    };
    pulse.beats.send(beat).await.unwrap();
    let listing = tokio::spawn(get_nodes(management.clone()));
    let labels = UpdateNodeLabelsRequest {
        node: by_id(&victim_id),
        upsert: vec![Label {
            key: "rack".into(),
            value: "2".into(),
        }],
        delete: Vec::new(),
    };
    let mut asking = management.clone();
    let labelling = tokio::spawn(async move { asking.update_node_labels(labels).await });
    // Its lease expires, another curator leads, and a node is deleted.
    leads(&world, &world.endpoint(), &own_id).await;
    world.delete_node(id_of(&victim)).await;
    let late = Write::when(fence).put("status/x", vec![1]);
    let fenced = world.client().write(late.clone()).await;
    assert!(matches!(fenced, Err(WriteError::Conflict)), "{fenced:?}");

    kill(other.pid(), Signal::SIGCONT).unwrap();
    let refused = [Code::Unavailable, Code::PermissionDenied];
    let answer = within_timeout("an end", pulse.answers.message()).await;
    let status = answer.expect_err("nothing is acknowledged that is gone");
    assert!(refused.contains(&status.code()), "{status}");
    // A late event is correct: the node is gone, or the watch ends.
    let end = within_timeout("the watch ends", async {
        loop {
            if let Err(status) = events.message().await {
                return status;
            }
        }
    })
    .await;
    assert!(refused.contains(&end.code()), "{end}");
    match within_timeout("an answer", listing).await.unwrap() {
        Ok(nodes) => assert!(nodes.iter().all(|node| node.id != victim_id), "{nodes:?}"),
        Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
    }
    let status = within_timeout("an answer", labelling)
        .await
        .unwrap()
        .unwrap_err();
    let refused = [Code::Unavailable, Code::NotFound];
    assert!(refused.contains(&status.code()), "{status}");
    // It never claims to lead, and serves again.
    within_timeout("it serves", async {
        loop {
            match leader(&world, &other.endpoint).await {
                Ok(leader) => {
                    assert_ne!(leader, sleeper_id);
                    if leader == own_id {
                        return;
                    }
                }
                Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert!(matches!(
        world.client().write(late).await,
        Err(WriteError::Conflict)
    ));
    let node = world.node.clone();
    let mut pulse = Pulse::open_at(other.endpoint.clone(), &world, &node)
        .await
        .unwrap();
    pulse.beat().await.unwrap();
    other.stop().await;
    world.stop().await;
}
