//! Measures a curator with many nodes, each with its own connection, heartbeat stream and watch,
//! while some of them change.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hearth_api::client::Channel;
use hearth_api::identity::{NodeCredentials, NodeId};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ClusterState, GetNodesRequest, HeartbeatRequest, HeartbeatResponse, Node, NodeHealth,
    NodeStatus, UpdateNodeStatusRequest, WatchRequest,
};
use hearth_curator::streams::EncodedEvent;
use hearth_curator::testing::BOOT_ID;
use prost::Message as _;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::report;
use crate::serve::{Budget, Served};

/// Maximum number of nodes that connect concurrently; a server accepts 64 concurrent handshakes.
const AT_A_TIME: usize = 8;
/// Timeout for all nodes to connect.
const GATHER_BOUND: Duration = Duration::from_secs(900);
/// Timeout for changes to reach all watchers.
const ARRIVAL_BOUND: Duration = Duration::from_secs(30);
/// Interval of changes.
const CHANGE_EVERY: Duration = Duration::from_millis(100);
/// Timeout for watchers to see that a node has died; longer than the heartbeat timeout.
const DEATH_BOUND: Duration = Duration::from_secs(60);
/// Delay before a call or stream that a curator has ended is retried.
const AGAIN_AFTER: Duration = Duration::from_millis(250);
/// Changes are sent as the version of the node's image: this prefix and a number.
const MARK: &str = "change-";

/// Measurements shared by all nodes.
struct Board {
    /// When each change was sent.
    sent: Mutex<Vec<Instant>>,
    /// Seconds from then until a watcher received it, for each change and watcher.
    seen: Mutex<Vec<f32>>,
    arrived: AtomicUsize,
    /// Stopped nodes, and when their last heartbeat was acknowledged.
    dead: Mutex<HashMap<String, Instant>>,
    deaths_seen: Mutex<Vec<f64>>,
    died: Notify,
    /// The number of calls that were answered by `Unavailable` and retried.
    repeated: AtomicUsize,
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
            repeated: AtomicUsize::new(0),
            ending: AtomicBool::new(false),
        }
    }

    /// Processes an event of one watcher. `known` are the changes that it has seen before, because
    /// a watch that is opened again sends the whole backlog.
    fn read(&self, event: EncodedEvent, known: &mut HashSet<usize>) -> Result<()> {
        for node in event.nodes {
            let node = Node::decode(node)?;
            let version = node.status.as_ref().map(|status| status.version.as_str());
            let number = version.and_then(|version| version.strip_prefix(MARK)?.parse().ok());
            let sent = |number: usize| Some((number, *lock(&self.sent).get(number)?));
            if let Some((number, sent)) = number.and_then(sent)
                && known.insert(number)
            {
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

    /// Retries a call until it succeeds, as a node does. `Unavailable`, the answer of a stale
    /// curator, is counted and retried; any other status is a failure.
    async fn persist<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        loop {
            match call().await {
                Ok(answer) => return Ok(answer),
                Err(status) => self.excuse(status).await?,
            }
        }
    }

    /// Waits before a retry; returns an error if the call is not to be retried.
    async fn excuse(&self, status: Status) -> Result<()> {
        if status.code() != Code::Unavailable {
            return Err(status.into());
        }
        self.repeated.fetch_add(1, Ordering::Relaxed);
        sleep(AGAIN_AFTER).await;
        Ok(())
    }

    fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }
}

/// A simulated node.
struct Player {
    id: NodeId,
    client: CuratorClient<Channel>,
    /// Stops its heartbeats and nothing else, as if it hung; answers with the time of the last
    /// acknowledgement.
    stop: oneshot::Sender<oneshot::Sender<Instant>>,
}

/// Connects one node and starts its tasks. Returns when its first heartbeat is acknowledged and it
/// has received the backlog.
async fn join(
    channel: Channel,
    id: NodeId,
    board: Arc<Board>,
    tasks: &Mutex<JoinSet<Result<()>>>,
) -> Result<Player> {
    let client = CuratorClient::new(channel.clone());
    let heart = board.persist(|| Heart::start(client.clone())).await?;
    let events = board.persist(|| backlog(channel.clone())).await?;
    let (stop, stopped) = oneshot::channel();
    let mut tasks = lock(tasks);
    tasks.spawn(pulse(heart, client.clone(), stopped, board.clone()));
    tasks.spawn(follow(events, channel, board));
    Ok(Player { id, client, stop })
}

/// Opens a watch and reads its backlog.
async fn backlog(channel: Channel) -> Result<Streaming<EncodedEvent>, Status> {
    let mut events = watch(channel).await?;
    loop {
        let event = events.message().await?.ok_or_else(ended)?;
        if event.backlog_complete {
            return Ok(events);
        }
    }
}

/// Opens a watch whose nodes are not decoded: this process does the work of thousands of machines,
/// and each of them gets all nodes at first.
async fn watch(channel: Channel) -> Result<Streaming<EncodedEvent>, Status> {
    let mut grpc = tonic::client::Grpc::new(channel);
    let ready = grpc.ready().await;
    ready.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = http::uri::PathAndQuery::from_static("/hearth.v1.Curator/Watch");
    let codec = tonic_prost::ProstCodec::<WatchRequest, EncodedEvent>::default();
    let request = tonic::Request::new(WatchRequest::default());
    let answer = grpc.server_streaming(request, path, codec).await?;
    Ok(answer.into_inner())
}

/// The status for a stream that has ended without one.
fn ended() -> Status {
    Status::internal("the curator ended the stream")
}

/// A heartbeat stream with at least one acknowledgement.
struct Heart {
    beats: mpsc::Sender<HeartbeatRequest>,
    answers: Streaming<HeartbeatResponse>,
    interval: Duration,
    last: Instant,
}

impl Heart {
    async fn start(mut client: CuratorClient<Channel>) -> Result<Self, Status> {
        let (beats, requests) = mpsc::channel(1);
        // The channel has capacity for one.
        let _ = beats.try_send(beat());
        let answers = client.heartbeat(ReceiverStream::new(requests)).await?;
        let mut answers = answers.into_inner();
        let first = answers.message().await?.ok_or_else(ended)?;
        Ok(Self {
            beats,
            answers,
            interval: Duration::from_millis(first.interval_ms.into()),
            last: Instant::now(),
        })
    }

    async fn beat(&mut self) -> Result<(), Status> {
        // Fails if the stream has ended; the answer below has the reason.
        let _ = self.beats.send(beat()).await;
        self.answers.message().await?.ok_or_else(ended)?;
        self.last = Instant::now();
        Ok(())
    }
}

fn beat() -> HeartbeatRequest {
    HeartbeatRequest {
        boot_id: BOOT_ID.into(),
        protocol_version: 1,
        ending: false,
    }
}

async fn pulse(
    mut heart: Heart,
    client: CuratorClient<Channel>,
    mut stopped: oneshot::Receiver<oneshot::Sender<Instant>>,
    board: Arc<Board>,
) -> Result<()> {
    loop {
        tokio::select! {
            () = sleep_until((heart.last + heart.interval).into()) => {}
            asked = &mut stopped => {
                if let Ok(asked) = asked {
                    let _ = asked.send(heart.last);
                }
                // The curator ends the stream; that is expected.
                while let Ok(Some(_)) = heart.answers.message().await {}
                return Ok(());
            }
        }
        let Err(status) = heart.beat().await else {
            continue;
        };
        if board.is_ending() {
            return Ok(());
        }
        board.excuse(status).await.context("heartbeat failed")?;
        let again = board.persist(|| Heart::start(client.clone()));
        heart = again.await.context("cannot reopen the heartbeat stream")?;
    }
}

async fn follow(
    mut events: Streaming<EncodedEvent>,
    channel: Channel,
    board: Arc<Board>,
) -> Result<()> {
    let mut known = HashSet::new();
    loop {
        let event = events.message().await;
        match event.and_then(|event| event.ok_or_else(ended)) {
            Ok(event) => board.read(event, &mut known)?,
            Err(_) if board.is_ending() => return Ok(()),
            Err(status) => {
                board.excuse(status).await.context("watch failed")?;
                let again = board.persist(|| watch(channel.clone()));
                events = again.await.context("cannot reopen the watch")?;
            }
        }
    }
}

/// Runs the measurement and reports the results.
pub(crate) async fn run(count: usize, seconds: u64) -> Result<()> {
    let served = Served::start(count, Budget::Unlimited).await?;
    let board = Arc::new(Board::new());
    let tasks = Arc::new(Mutex::new(JoinSet::new()));
    let begin = Instant::now();
    let mut nodes = timeout(GATHER_BOUND, gather(&served, &board, &tasks))
        .await
        .context("timeout: not all nodes have connected")??;
    let name = |what: &str| format!("curator.{what}_{count}");
    report(
        &name("gather_seconds"),
        "s",
        &[begin.elapsed().as_secs_f64()],
    );

    let (before, begin) = (served.cpu()?, Instant::now());
    let changes = change(&nodes, &board, Duration::from_secs(seconds)).await?;
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
    let repeated = board.repeated.load(Ordering::Relaxed);
    report(&name("calls_repeated"), "calls", &[repeated as f64]);

    board.ending.store(true, Ordering::Relaxed);
    none_has_failed(&tasks)?;
    lock(&tasks).abort_all();
    served.stop().await
}

/// Returns the error of a node's task that has failed.
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
                eprintln!("{} of {count} nodes connected", nodes.len());
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

/// Changes the status of one node after the other at a constant rate. Returns the number of
/// changes.
async fn change(nodes: &[Player], board: &Board, span: Duration) -> Result<usize> {
    let begin = Instant::now();
    let mut number = 0;
    while begin.elapsed() < span {
        let due = begin + CHANGE_EVERY * u32::try_from(number)?;
        sleep_until(due.into()).await;
        let at = number % nodes.len();
        let node = &nodes[at];
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
        let update = || {
            let (mut client, request) = (node.client.clone(), request.clone());
            async move { client.update_node_status(request).await }
        };
        board.persist(update).await?;
        number += 1;
    }
    Ok(number)
}

/// The number of healthy nodes; the curator's own node sends no heartbeats and is not healthy.
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

/// Stops the last node. Returns the seconds until the first watcher sees it.
async fn die(nodes: &mut Vec<Player>, board: &Board) -> Result<f64> {
    let node = nodes.pop().context("there is no node")?;
    let (answer, last) = oneshot::channel();
    if node.stop.send(answer).is_err() {
        bail!("the node has stopped before");
    }
    let last = last.await?;
    lock(&board.dead).insert(node.id.to_string(), last);
    timeout(DEATH_BOUND, board.died.notified())
        .await
        .context("timeout: no watcher has seen that a node died")?;
    let seen = lock(&board.deaths_seen);
    seen.first()
        .copied()
        .context("no watcher has seen that a node died")
}
