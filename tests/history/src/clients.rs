//! Clients that read and write through curators, and record what they do.
//!
//! Each client uses one channel: usually that of one curator, so that one which serves what is out of date is found
//! out; and one operation at a time. The registers are what curators promise to be linearizable:
//!
//! | register | read by | changed by |
//! |---|---|---|
//! | labels of one node | `GetNodes`, all of them in one answer | `UpdateNodeLabels`: a write |
//! | a setting of the cluster | `GetClusterInfo` | `ConfigureCluster`, which names the version it was read at: an exchange |
//!
//! The setting is `kubernetes.synchronized_labels`, which has no effect without Kubernetes. Its version is that of the
//! whole configuration, so nobody else may change that meanwhile.
//!
//! A client that gets no answer only reads until it gets one again. So an outage adds no more than one operation of each
//! client whose result is unknown, whatever its length.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hearth_api::client::{Channel, ConnectError, within};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ClusterConfiguration, ConfigureClusterRequest, GetClusterInfoRequest, GetNodesRequest,
    KubernetesConfiguration, Label, NodeSelector, UpdateNodeLabelsRequest, node_selector,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::{Code, Status};

use crate::history::{Action, Answer, History, Pending, Recorder, Register, Value};

/// The path of the setting.
const SETTING: &str = "kubernetes.synchronized_labels";
/// Prefix of its values.
const PREFIX: &str = "history-";
/// Within this time the registers are read for the first time.
const BEGIN: Duration = Duration::from_secs(30);
/// After an operation without an answer.
const PAUSE: Duration = Duration::from_millis(100);

/// How clients read labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// As by default.
    Linearizable,
    /// From the curator's cache, without asking etcd: the flaw that the check must find.
    FromCache,
}

/// What clients do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The ID of the node whose labels are used.
    pub node: String,
    /// The keys of these labels. Nobody else may use them.
    pub labels: Vec<String>,
    /// How they are read.
    pub reads: Reads,
    /// After this time a client gives up an operation.
    pub patience: Duration,
    /// Between two operations of a client.
    pub pace: Duration,
}

/// Why there is no history.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientsError {
    /// The first reads were not answered.
    #[error("cannot read the registers: {0}")]
    Begin(Status),
    /// A failure that no fault of a cluster explains.
    #[error("client {client}: {action}: {status}")]
    Refused {
        /// The client.
        client: usize,
        /// The call.
        action: &'static str,
        /// Its answer.
        status: Status,
    },
    /// A register has a value that no client of ours sets.
    #[error("{register}: expected a number, got {found}")]
    NotANumber {
        /// The register.
        register: String,
        /// What it has.
        found: String,
    },
    /// Clients do not continue.
    #[error(
        "clients {clients:?} did not continue within {bound:?}; answers and changes so far: {counts:?}"
    )]
    Stalled {
        /// The clients.
        clients: Vec<usize>,
        /// The bound.
        bound: Duration,
        /// Of all clients.
        counts: Vec<Counts>,
    },
}

/// Clients at work, until they are stopped or dropped.
pub struct Clients {
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

/// What the clients have in common.
struct Shared {
    plan: Plan,
    recorder: Recorder,
    /// The next value; each is used once.
    next: AtomicU64,
    progress: watch::Sender<Progress>,
    stop: watch::Sender<bool>,
}

/// How far a client is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations that have ended, in any way.
    pub ended: u64,
    /// Those that were answered.
    pub answered: u64,
    /// Changes that were acknowledged.
    pub changed: u64,
}

#[derive(Clone, Debug, Default)]
struct Progress {
    /// Of each client.
    counts: Vec<Counts>,
    broken: Option<ClientsError>,
}

/// One client.
struct Client {
    number: usize,
    management: ManagementClient<Channel>,
    shared: Arc<Shared>,
    random: fastrand::Rng,
    /// The setting and its version, if this client has read them since its last attempt to change them.
    setting: Option<(Value, u64)>,
}

impl Clients {
    /// Starts one client on each of these channels, with choices that follow from `seed`. Reads the registers first,
    /// through the first channel.
    ///
    /// # Errors
    /// If that fails.
    pub async fn start(
        plan: Plan,
        channels: Vec<Channel>,
        seed: u64,
    ) -> Result<Self, ClientsError> {
        let mut first = ManagementClient::new(channels[0].clone());
        let began = Instant::now();
        let values = loop {
            match read_all(&mut first, &plan).await? {
                Ok(values) => break values,
                Err(status) if began.elapsed() > BEGIN => return Err(ClientsError::Begin(status)),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        };
        let names = plan.labels.iter().map(|key| format!("label {key}"));
        let names = names.chain([SETTING.to_owned()]);
        let registers = names.zip(values);
        let registers: Vec<Register> = registers
            .map(|(name, initial)| Register { name, initial })
            .collect();
        let newest = registers.iter().filter_map(|register| register.initial);
        let next = newest.max().unwrap_or(0) + 1;
        let shared = Arc::new(Shared {
            plan,
            recorder: Recorder::new(registers),
            next: AtomicU64::new(next),
            progress: watch::Sender::new(Progress {
                counts: vec![Counts::default(); channels.len()],
                broken: None,
            }),
            stop: watch::Sender::new(false),
        });
        let mut seeds = fastrand::Rng::with_seed(seed);
        let mut tasks = JoinSet::new();
        for (number, channel) in channels.into_iter().enumerate() {
            let client = Client {
                number,
                management: ManagementClient::new(channel),
                shared: Arc::clone(&shared),
                random: seeds.fork(),
                setting: None,
            };
            tasks.spawn(client.run());
        }
        Ok(Self { shared, tasks })
    }

    /// Waits until each of these clients has got further answers to what it asked after this call, changes among them.
    ///
    /// # Errors
    /// If that takes longer than `bound`, or a client has failed for another reason than a fault.
    pub async fn go_on(&self, clients: &[usize], bound: Duration) -> Result<(), ClientsError> {
        // The one in progress, and a few that were surely begun later.
        let enough = |before: &Counts, now: &Counts| {
            now.answered >= before.answered + 20 && now.changed >= before.changed + 4
        };
        self.until(clients, bound, enough).await
    }

    /// Waits until each of these clients has ended some operations that it began after this call, whatever became of
    /// them.
    ///
    /// # Errors
    /// As for [`Self::go_on`].
    pub async fn try_on(&self, clients: &[usize], bound: Duration) -> Result<(), ClientsError> {
        let enough = |before: &Counts, now: &Counts| now.ended >= before.ended + 3;
        self.until(clients, bound, enough).await
    }

    async fn until(
        &self,
        clients: &[usize],
        bound: Duration,
        enough: impl Fn(&Counts, &Counts) -> bool,
    ) -> Result<(), ClientsError> {
        let mut progress = self.shared.progress.subscribe();
        let before = progress.borrow().counts.clone();
        let all = |progress: &Progress| {
            let mut clients = clients.iter();
            clients.all(|client| enough(&before[*client], &progress.counts[*client]))
        };
        let settled = |progress: &Progress| progress.broken.is_some() || all(progress);
        // The sender lives as long as `self`.
        let _ = tokio::time::timeout(bound, progress.wait_for(settled)).await;
        let now = self.shared.progress.borrow().clone();
        match now.broken {
            Some(broken) => Err(broken),
            None if all(&now) => Ok(()),
            None => Err(ClientsError::Stalled {
                clients: clients.to_vec(),
                bound,
                counts: now.counts,
            }),
        }
    }

    /// What has been recorded so far. The clients continue.
    pub fn history(&self) -> History {
        self.shared.recorder.snapshot()
    }

    /// Lets each client finish its operation, and returns the history.
    ///
    /// # Errors
    /// If a client has failed for another reason than a fault.
    pub async fn stop(mut self) -> Result<History, ClientsError> {
        self.shared.stop.send_replace(true);
        // Each operation has a bound.
        while let Some(ended) = self.tasks.join_next().await {
            match ended {
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                _ => {}
            }
        }
        let broken = self.shared.progress.borrow().broken.clone();
        match broken {
            Some(broken) => Err(broken),
            None => Ok(self.shared.recorder.snapshot()),
        }
    }
}

/// What became of an attempt.
enum Attempt {
    /// There was an answer.
    Answered {
        /// A change was acknowledged.
        changed: bool,
    },
    /// There was none.
    Silence,
}

impl Client {
    async fn run(mut self) {
        let mut stop = self.shared.stop.subscribe();
        let mut may_change = true;
        while !*stop.borrow() {
            let (answered, changed) = match self.step(may_change).await {
                Ok(Attempt::Answered { changed }) => (true, changed),
                Ok(Attempt::Silence) => (false, false),
                Err(error) => {
                    let broken = |progress: &mut Progress| {
                        progress.broken.get_or_insert(error);
                    };
                    self.shared.progress.send_modify(broken);
                    return;
                }
            };
            self.shared.progress.send_modify(|progress| {
                let counts = &mut progress.counts[self.number];
                counts.ended += 1;
                counts.answered += u64::from(answered);
                counts.changed += u64::from(changed);
            });
            may_change = answered;
            let pause = match answered {
                true => self.shared.plan.pace,
                false => PAUSE,
            };
            // The sender lives as long as `self`.
            let _ = tokio::time::timeout(pause, stop.wait_for(|stop| *stop)).await;
        }
    }

    async fn step(&mut self, may_change: bool) -> Result<Attempt, ClientsError> {
        match self.random.u8(..10) {
            0..4 => self.read_labels().await,
            4..7 if may_change => self.write_label().await,
            _ => match self.setting.take().filter(|_| may_change) {
                Some((expected, version)) => self.exchange_setting(expected, version).await,
                None => self.read_setting().await,
            },
        }
    }

    fn invokes(&self, register: usize, action: Action) -> Pending {
        let recorder = &self.shared.recorder;
        recorder.invokes(self.number, register, action)
    }

    fn returns(&self, pending: Pending, answer: Answer) {
        self.shared.recorder.returns(pending, answer);
    }

    fn next_value(&self) -> u64 {
        self.shared.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The number of the setting's register.
    fn setting_register(&self) -> usize {
        self.shared.plan.labels.len()
    }

    async fn read_labels(&mut self) -> Result<Attempt, ClientsError> {
        let labels = 0..self.shared.plan.labels.len();
        let pending: Vec<Pending> = labels
            .map(|register| self.invokes(register, Action::Read))
            .collect();
        let plan = &self.shared.plan;
        match read_labels(&mut self.management, plan, plan.reads).await? {
            Ok(values) => {
                for (pending, value) in pending.into_iter().zip(values) {
                    self.returns(pending, Answer::Value(value));
                }
                Ok(Attempt::Answered { changed: false })
            }
            Err(status) => {
                for pending in pending {
                    self.returns(pending, Answer::Failed);
                }
                self.silence("GetNodes", status)
            }
        }
    }

    async fn write_label(&mut self) -> Result<Attempt, ClientsError> {
        let register = self.random.usize(..self.shared.plan.labels.len());
        let value = self.next_value();
        let request = UpdateNodeLabelsRequest {
            node: Some(NodeSelector {
                node: Some(node_selector::Node::NodeId(self.shared.plan.node.clone())),
            }),
            upsert: vec![Label {
                key: self.shared.plan.labels[register].clone(),
                value: value.to_string(),
            }],
            delete: Vec::new(),
        };
        let pending = self.invokes(register, Action::Write(value));
        let call = self.management.update_node_labels(request);
        match within(self.shared.plan.patience, call).await {
            Ok(_) => {
                self.returns(pending, Answer::Done);
                Ok(Attempt::Answered { changed: true })
            }
            Err(status) => {
                self.returns(pending, unanswered(&status));
                self.silence("UpdateNodeLabels", status)
            }
        }
    }

    async fn read_setting(&mut self) -> Result<Attempt, ClientsError> {
        let pending = self.invokes(self.setting_register(), Action::Read);
        match read_setting(&mut self.management, self.shared.plan.patience).await? {
            Ok((value, version)) => {
                self.returns(pending, Answer::Value(value));
                self.setting = Some((value, version));
                Ok(Attempt::Answered { changed: false })
            }
            Err(status) => {
                self.returns(pending, Answer::Failed);
                self.silence("GetClusterInfo", status)
            }
        }
    }

    async fn exchange_setting(
        &mut self,
        expected: Value,
        version: u64,
    ) -> Result<Attempt, ClientsError> {
        let new = self.next_value();
        let request = ConfigureClusterRequest {
            version,
            configuration: Some(ClusterConfiguration {
                kubernetes: Some(KubernetesConfiguration {
                    synchronized_labels: vec![format!("{PREFIX}{new}")],
                    ..KubernetesConfiguration::default()
                }),
                ..ClusterConfiguration::default()
            }),
            field_mask: vec![SETTING.to_owned()],
        };
        let pending = self.invokes(self.setting_register(), Action::Exchange { expected, new });
        let call = self.management.configure_cluster(request);
        match within(self.shared.plan.patience, call).await {
            Ok(answer) => {
                self.returns(pending, Answer::Done);
                self.setting = Some((Some(new), answer.into_inner().version));
                Ok(Attempt::Answered { changed: true })
            }
            // The version is not the current one. It is the answer to nothing else.
            Err(status) if status.code() == Code::Aborted => {
                self.returns(pending, Answer::Differs);
                Ok(Attempt::Answered { changed: false })
            }
            Err(status) => {
                self.returns(pending, unanswered(&status));
                self.silence("ConfigureCluster", status)
            }
        }
    }

    /// # Errors
    /// If no fault explains this answer.
    fn silence(&self, action: &'static str, status: Status) -> Result<Attempt, ClientsError> {
        let passes = matches!(
            status.code(),
            Code::Unavailable
                | Code::DeadlineExceeded
                | Code::Aborted
                | Code::Cancelled
                | Code::Internal
                | Code::Unknown
        );
        match passes {
            true => Ok(Attempt::Silence),
            false => Err(ClientsError::Refused {
                client: self.number,
                action,
                status,
            }),
        }
    }
}

/// What is known of a change that was not acknowledged: it was never sent, or nothing.
fn unanswered(status: &Status) -> Answer {
    let source = status.source();
    match source.is_some_and(|source| source.is::<ConnectError>()) {
        true => Answer::Failed,
        false => Answer::Unknown,
    }
}

fn number(register: &str, found: &str) -> Result<u64, ClientsError> {
    found.parse().map_err(|_| ClientsError::NotANumber {
        register: register.to_owned(),
        found: found.to_owned(),
    })
}

/// The values of the plan's labels.
async fn read_labels(
    management: &mut ManagementClient<Channel>,
    plan: &Plan,
    reads: Reads,
) -> Result<Result<Vec<Value>, Status>, ClientsError> {
    let request = GetNodesRequest {
        node_ids: vec![plan.node.clone()],
        allow_stale: reads == Reads::FromCache,
        ..GetNodesRequest::default()
    };
    let call = async {
        let mut answers = management.get_nodes(request).await?.into_inner();
        let mut nodes = Vec::new();
        while let Some(answer) = answers.message().await? {
            nodes.extend(answer.nodes);
        }
        let node = nodes.pop();
        node.ok_or_else(|| Status::not_found(format!("{} is not listed", plan.node)))
    };
    let node = match within(plan.patience, call).await {
        Ok(node) => node,
        Err(status) => return Ok(Err(status)),
    };
    let mut values = Vec::new();
    for key in &plan.labels {
        let label = node.labels.iter().find(|label| label.key == *key);
        let value = label.map(|label| number(key, &label.value));
        values.push(value.transpose()?);
    }
    Ok(Ok(values))
}

/// The values of all registers, in the order of the history.
async fn read_all(
    management: &mut ManagementClient<Channel>,
    plan: &Plan,
) -> Result<Result<Vec<Value>, Status>, ClientsError> {
    let mut values = match read_labels(management, plan, Reads::Linearizable).await? {
        Ok(values) => values,
        Err(status) => return Ok(Err(status)),
    };
    let setting = read_setting(management, plan.patience).await?;
    Ok(setting.map(|(value, _)| {
        values.push(value);
        values
    }))
}

/// The setting and its version.
async fn read_setting(
    management: &mut ManagementClient<Channel>,
    patience: Duration,
) -> Result<Result<(Value, u64), Status>, ClientsError> {
    let call = management.get_cluster_info(GetClusterInfoRequest {});
    let info = match within(patience, call).await {
        Ok(info) => info.into_inner(),
        Err(status) => return Ok(Err(status)),
    };
    let kubernetes = info
        .configuration
        .and_then(|configuration| configuration.kubernetes);
    let patterns = kubernetes.map_or_else(Vec::new, |kubernetes| kubernetes.synchronized_labels);
    let value = match &patterns[..] {
        [] => None,
        [pattern] => {
            let text = pattern.strip_prefix(PREFIX).unwrap_or(pattern);
            Some(number(SETTING, text)?)
        }
        several => {
            return Err(ClientsError::NotANumber {
                register: SETTING.to_owned(),
                found: format!("{several:?}"),
            });
        }
    };
    Ok(Ok((value, info.configuration_version)))
}
