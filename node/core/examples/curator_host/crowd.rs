//! Many nodes at a time, each with a connection, a heartbeat stream and a
//! watch of its own, while some of them change.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use hearth_api::{
    client::Channel,
    identity::{NodeCredentials, NodeId},
    v1::{
        ClusterState, GetNodesRequest, HeartbeatRequest, Node, NodeHealth, NodeStatus,
        UpdateNodeStatusRequest, WatchRequest, curator_client::CuratorClient,
        management_client::ManagementClient,
    },
};
use hearth_core::curator::{streams::EncodedEvent, testing::BOOT_ID};
use prost::Message as _;
use tokio::{
    sync::{Notify, Semaphore, mpsc, oneshot},
    task::JoinSet,
    time::{sleep, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::{report, serve::Served};

/// Nodes that connect at a time; a server takes 64 handshakes.
const AT_A_TIME: usize = 8;
/// Until all of them are there.
const GATHER_BOUND: Duration = Duration::from_secs(900);
/// What takes longer does not arrive any more.
const ARRIVAL_BOUND: Duration = Duration::from_secs(30);
/// Between two changes.
const CHANGE_EVERY: Duration = Duration::from_millis(100);
/// A node that dies is seen within the heartbeat's bound and a little.
const DEATH_BOUND: Duration = Duration::from_secs(60);
/// Changes bear a number behind this, as the version of the node's image.
const MARK: &str = "change-";

/// What all nodes of one crowd write down.
struct Board {
    /// When each change was asked for.
    sent: Mutex<Vec<Instant>>,
    /// Seconds from there until some watcher had it, of all watchers.
    seen: Mutex<Vec<f32>>,
    arrived: AtomicUsize,
    /// Lives no more, and when it was last acknowledged.
    dead: Mutex<HashMap<String, Instant>>,
    deaths_seen: Mutex<Vec<f64>>,
    died: Notify,
    ending: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Board {
    fn new() -> Self {
        Self {
            sent: Mutex::default(),
            seen: Mutex::default(),
            arrived: AtomicUsize::new(0),
            dead: Mutex::default(),
            deaths_seen: Mutex::default(),
            died: Notify::new(),
            ending: AtomicBool::new(false),
        }
    }

    /// Takes in what one watcher was sent.
    fn read(&self, event: EncodedEvent) -> Result<()> {
        for node in event.nodes {
            let node = Node::decode(node)?;
            let version = node.status.as_ref().map(|status| status.version.as_str());
            let number = version.and_then(|version| version.strip_prefix(MARK)?.parse().ok());
            let sent = number.and_then(|number: usize| lock(&self.sent).get(number).copied());
            if let Some(sent) = sent {
                lock(&self.seen).push(sent.elapsed().as_secs_f32());
                self.arrived.fetch_add(1, Ordering::Relaxed);
            }
            if node.health() == NodeHealth::Timeout
                && let Some(last) = lock(&self.dead).get(&node.id)
            {
                lock(&self.deaths_seen).push(last.elapsed().as_secs_f64());
                self.died.notify_one();
            }
        }
        Ok(())
    }
}

/// A node at work.
struct Player {
    id: NodeId,
    client: CuratorClient<Channel>,
    /// Ends its heartbeats and nothing else, as if it stood still; answers
    /// with when it was last acknowledged.
    stop: oneshot::Sender<oneshot::Sender<Instant>>,
}

/// Connects one node, which takes its part, and returns when it is acknowledged and has read what
/// there is.
async fn join(
    channel: Channel,
    id: NodeId,
    board: Arc<Board>,
    tasks: &Mutex<JoinSet<Result<()>>>,
) -> Result<Player> {
    let mut client = CuratorClient::new(channel.clone());
    let (beats, requests) = mpsc::channel(1);
    beats.send(beat()).await?;
    let answers = client.heartbeat(ReceiverStream::new(requests)).await?;
    let mut answers = answers.into_inner();
    let first = answers.message().await?.context("a heartbeat's answer")?;
    let interval = Duration::from_millis(first.interval_ms.into());
    let mut events = watch(channel).await?;
    while !events
        .message()
        .await?
        .context("the backlog")?
        .backlog_complete
    {}
    let (stop, stopped) = oneshot::channel();
    let heart = pulse(beats, answers, interval, stopped, board.clone());
    let mut tasks = lock(tasks);
    tasks.spawn(heart);
    tasks.spawn(follow(events, board));
    Ok(Player { id, client, stop })
}

/// A watch whose nodes are not decoded: thousands of callers in one process do
/// the work of thousands of machines, and each of them gets all nodes at first.
async fn watch(channel: Channel) -> Result<Streaming<EncodedEvent>> {
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await?;
    let path = http::uri::PathAndQuery::from_static("/hearth.v1.Curator/Watch");
    let codec = tonic_prost::ProstCodec::<WatchRequest, EncodedEvent>::default();
    let request = tonic::Request::new(WatchRequest::default());
    Ok(grpc
        .server_streaming(request, path, codec)
        .await?
        .into_inner())
}

fn beat() -> HeartbeatRequest {
    HeartbeatRequest {
        boot_id: BOOT_ID.into(),
        protocol_version: 1,
    }
}

async fn pulse(
    beats: mpsc::Sender<HeartbeatRequest>,
    mut answers: Streaming<hearth_api::v1::HeartbeatResponse>,
    interval: Duration,
    mut stopped: oneshot::Receiver<oneshot::Sender<Instant>>,
    board: Arc<Board>,
) -> Result<()> {
    let mut last = Instant::now();
    loop {
        tokio::select! {
            () = sleep_until((last + interval).into()) => {}
            asked = &mut stopped => {
                if let Ok(asked) = asked {
                    let _ = asked.send(last);
                }
                // The curator ends the stream; that is no failure.
                while let Ok(Some(_)) = answers.message().await {}
                return Ok(());
            }
        }
        if beats.send(beat()).await.is_err() {
            break;
        }
        match answers.message().await {
            Ok(Some(_)) => last = Instant::now(),
            Ok(None) => break,
            Err(status) if board.ending.load(Ordering::Relaxed) => {
                drop(status);
                break;
            }
            Err(status) => bail!("a heartbeat: {status}"),
        }
    }
    ensure!(
        board.ending.load(Ordering::Relaxed),
        "a heartbeat stream has ended"
    );
    Ok(())
}

async fn follow(mut events: Streaming<EncodedEvent>, board: Arc<Board>) -> Result<()> {
    loop {
        match events.message().await {
            Ok(Some(event)) => board.read(event)?,
            _ if board.ending.load(Ordering::Relaxed) => return Ok(()),
            Ok(None) => bail!("a watch has ended"),
            Err(status) => bail!("a watch: {status}"),
        }
    }
}

/// Measures and reports.
pub async fn run(count: usize, seconds: u64) -> Result<()> {
    let served = Served::start(count).await?;
    let board = Arc::new(Board::new());
    let tasks = Arc::new(Mutex::new(JoinSet::new()));
    let begin = Instant::now();
    let mut nodes = timeout(GATHER_BOUND, gather(&served, &board, &tasks))
        .await
        .context("the nodes take too long to come")??;
    let name = |what: &str| format!("curator.{what}_{count}");
    report(
        &name("gather_seconds"),
        "s",
        &[begin.elapsed().as_secs_f64()],
    );

    let (before, begin) = (served.cpu()?, Instant::now());
    let changes = change(&mut nodes, &board, Duration::from_secs(seconds)).await?;
    let cpu = (served.cpu()? - before) / begin.elapsed().as_secs_f64();
    let wanted = changes * count;
    let all = async {
        while board.arrived.load(Ordering::Relaxed) < wanted {
            none_has_failed(&tasks)?;
            sleep(Duration::from_millis(10)).await;
        }
        anyhow::Ok(())
    };
    let late = timeout(ARRIVAL_BOUND, all).await;
    let arrived = board.arrived.load(Ordering::Relaxed);
    late.with_context(|| format!("{arrived} of {wanted} changes arrived"))??;
    let mut seen: Vec<f32> = std::mem::take(&mut *lock(&board.seen));
    seen.sort_by(f32::total_cmp);
    let part = |part: f64| f64::from(seen[((seen.len() - 1) as f64 * part) as usize]);
    report(&name("fanout_median_seconds"), "s", &[part(0.5)]);
    report(&name("fanout_p99_seconds"), "s", &[part(0.99)]);
    report(&name("fanout_max_seconds"), "s", &[part(1.0)]);
    report(&name("cpu"), "cores", &[cpu]);
    report(&name("memory_bytes"), "bytes", &[served.memory()?]);
    let healthy = healthy(&served).await?;
    report(
        &name("all_healthy"),
        "boolean",
        &[f64::from(u8::from(healthy == count))],
    );
    if healthy != count {
        eprintln!("{healthy} of {count} nodes are healthy");
    }
    let death = die(&mut nodes, &board).await?;
    report(&name("death_seen_seconds"), "s", &[death]);

    board.ending.store(true, Ordering::Relaxed);
    none_has_failed(&tasks)?;
    lock(&tasks).abort_all();
    served.stop().await
}

/// What the tasks of the nodes end with, if they end early.
fn none_has_failed(tasks: &Mutex<JoinSet<Result<()>>>) -> Result<()> {
    while let Some(ended) = lock(tasks).try_join_next() {
        ended??;
    }
    Ok(())
}

async fn gather(
    served: &Served,
    board: &Arc<Board>,
    tasks: &Arc<Mutex<JoinSet<Result<()>>>>,
) -> Result<Vec<Player>> {
    let places = Arc::new(Semaphore::new(AT_A_TIME));
    let mut joining = JoinSet::new();
    let count = served.nodes.len() - 1;
    let mut nodes = Vec::new();
    for node in &served.nodes[1..] {
        let place = places.clone().acquire_owned().await?;
        while let Some(joined) = joining.try_join_next() {
            none_has_failed(tasks)?;
            nodes.push(joined??);
            if nodes.len() % 500 == 0 {
                eprintln!("{} of {count} nodes are there", nodes.len());
            }
        }
        let channel = served.curator(node)?;
        let id = id_of(node);
        let (board, tasks) = (board.clone(), tasks.clone());
        joining.spawn(async move {
            let joined = join(channel, id, board, &tasks).await;
            drop(place);
            joined.with_context(|| format!("node {id}"))
        });
    }
    while let Some(joined) = joining.join_next().await {
        nodes.push(joined??);
    }
    Ok(nodes)
}

fn id_of(node: &NodeCredentials) -> NodeId {
    NodeId::from_public_key(&node.key.public())
}

/// One node after the other says something new, steadily. Returns how many.
async fn change(nodes: &mut [Player], board: &Board, span: Duration) -> Result<usize> {
    let begin = Instant::now();
    let mut number = 0;
    while begin.elapsed() < span {
        let due = begin + CHANGE_EVERY * u32::try_from(number)?;
        sleep_until(due.into()).await;
        let at = number % nodes.len();
        let node = &mut nodes[at];
        let status = NodeStatus {
            external_address: "192.0.2.1".into(),
            version: format!("{MARK}{number}"),
            boot_id: BOOT_ID.into(),
            cluster_state: ClusterState::Home.into(),
            ..NodeStatus::default()
        };
        let request = UpdateNodeStatusRequest {
            node_id: node.id.to_string(),
            status: Some(status),
        };
        lock(&board.sent).push(Instant::now());
        node.client.update_node_status(request).await?;
        number += 1;
    }
    Ok(number)
}

/// How many nodes but the curator's own, which nobody plays, are healthy.
async fn healthy(served: &Served) -> Result<usize> {
    let mut management = ManagementClient::new(served.curator(&served.nodes[0])?);
    let request = GetNodesRequest {
        health: vec![NodeHealth::Healthy.into()],
        ..Default::default()
    };
    let mut answers = management.get_nodes(request).await?.into_inner();
    let mut healthy = 0;
    while let Some(answer) = answers.message().await? {
        healthy += answer.nodes.len();
    }
    Ok(healthy)
}

/// The last node stands still. Returns after how long the first watcher knows.
async fn die(nodes: &mut Vec<Player>, board: &Board) -> Result<f64> {
    let node = nodes.pop().context("a node")?;
    let (answer, last) = oneshot::channel();
    if node.stop.send(answer).is_err() {
        bail!("the node has died before");
    }
    let last = last.await?;
    lock(&board.dead).insert(node.id.to_string(), last);
    timeout(DEATH_BOUND, board.died.notified())
        .await
        .context("nobody has seen that a node died")?;
    let seen = lock(&board.deaths_seen);
    seen.first().copied().context("nobody has seen it")
}
