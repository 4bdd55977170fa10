//! The time service: keeps the clock of a node right.
//!
//! A clock that is wrong ends a node: certificates are not valid yet, or not any more. Before
//! anything else the boot sets the clock to a time that is not impossible
//! ([`hearth_host::clock`]); this worker asks others, from the boot on and for as long as the node
//! runs. Nothing waits for it, except the creation of a cluster while the clock is past the end of
//! the certificates that would be created, and that only for half a minute.
//!
//! | part | does |
//! |---|---|
//! | `sources` | decides whom to ask: time servers, other consensus members, or a curator |
//! | `packet`, `exchange` | ask a time server by NTP |
//! | `nodes` | ask other nodes |
//! | `agreement` | decides which answers are right |
//! | `machine` | decides whether to set the clock, to slew it or to leave it, and when to ask again |
//!
//! # What it does not protect from
//! NTP without NTS is not authenticated. Who can change packets between a node and most of its time
//! servers decides what time the node has, within the bounds of `machine`: not before the build of
//! the image, not after the end of the cluster's CA. Who can only send packets has to guess 64
//! random bits and a port. Times of other nodes are authenticated by the cluster's certificates.
//!
//! # Limitations
//! A node whose clock is past the end of its own certificate cannot ask other nodes; only time
//! servers help it. The cluster's setting is known once a curator has answered, so at the begin of a
//! boot only the servers of the parameters and of DHCP are.

mod agreement;
mod exchange;
mod machine;
mod nodes;
mod packet;
mod sources;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_api::chain;
use hearth_api::identity::NodeId;
use hearth_api::time_server::{self, TimeServer};
use hearth_api::tls::{self, ExpectedServer};
use hearth_api::v1::ClusterDirectory;
use hearth_base::event::{self, Closed, Value, Watcher, Writer};
use hearth_base::supervisor::{Context, Failure, Outcome};
use hearth_host::date::date_and_time;
use hearth_host::handover::{Measured, MemberData, TimeProblem, TimeStatus};
use hearth_sys::clock::SystemClock;
use hearth_sys::random;
use rustls::ClientConfig;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::connection::CuratorConnection;
use crate::control_plane::LocalControlPlane;
use agreement::{Agreement, Sample, median};
use machine::{Decision, LONGEST, Machine, Reason, SHORTEST, shifted};
pub use nodes::CuratorTime;
use sources::{Known, Sources};

/// Interval at which the cluster's setting is asked for.
const SETTING_EVERY: Duration = Duration::from_secs(60);
/// Delay after a request for it that has failed.
const SETTING_AGAIN: Duration = Duration::from_secs(2);
/// Timeout of a request for it.
const SETTING_WITHIN: Duration = Duration::from_secs(10);

/// Keeps the clock right.
pub struct Worker {
    /// The clock.
    pub clock: Arc<dyn SystemClock>,
    /// When the image was built: no time is before it.
    pub build_time: SystemTime,
    /// The end of the certificates that this image makes: for a node without a cluster no time is after it.
    pub end: SystemTime,
    /// The time servers of the parameters.
    pub parameters: Vec<TimeServer>,
    /// The port of node management on the other nodes.
    pub port: u16,
    /// Read: the time servers that DHCP names.
    pub dhcp_time_servers: Value<Vec<IpAddr>>,
    /// Read: this node's identity, certificates and CA.
    pub member: Value<MemberData>,
    /// Read: whether this node runs a curator.
    pub control_plane: Value<LocalControlPlane>,
    /// Read: the consensus members.
    pub directory: Value<ClusterDirectory>,
    /// Read: the curators, for the cluster's setting.
    pub connection: Value<CuratorConnection>,
    /// Read: the time of the curator that answers heartbeats.
    pub curator_time: Value<CuratorTime>,
    /// Written: the state of the clock, after each measurement.
    pub time: Writer<TimeStatus>,
}

/// Keeps the clock right until the node goes down.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let (setting_writer, setting) = event::value();
    ctx.healthy();
    let mut synchroniser = Synchroniser::new(worker.clone(), setting);
    tokio::select! {
        outcome = follow_setting(&worker.connection, &setting_writer) => outcome,
        outcome = synchroniser.keep() => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

/// Publishes the cluster's setting; only returns errors. The last one stays while no curator answers.
async fn follow_setting(
    connection: &Value<CuratorConnection>,
    setting: &Writer<Vec<TimeServer>>,
) -> Outcome {
    let mut connections = connection.watch();
    let mut connection = connections.next().await?;
    loop {
        let wait = match timeout(SETTING_WITHIN, connection.configuration()).await {
            Ok(Ok(configuration)) => {
                // Of what a newer release may write, what this one can use.
                let texts = configuration.time_servers.iter().take(time_server::MOST);
                let servers: Vec<TimeServer> = texts.filter_map(|text| text.parse().ok()).collect();
                if setting.value().get().as_ref() != Some(&servers) {
                    setting.set(servers);
                }
                SETTING_EVERY
            }
            Ok(Err(error)) => {
                tracing::debug!("cannot get the setting time_servers: {error}");
                SETTING_AGAIN
            }
            Err(_) => {
                tracing::debug!("cannot get the setting time_servers: no answer");
                SETTING_AGAIN
            }
        };
        tokio::select! {
            newer = connections.next() => connection = newer?,
            () = sleep(wait) => {}
        }
    }
}

/// What the sources follow from.
struct Inputs {
    dhcp: Watcher<Vec<IpAddr>>,
    setting: Watcher<Vec<TimeServer>>,
    member: Watcher<MemberData>,
    control_plane: Watcher<LocalControlPlane>,
    directory: Watcher<ClusterDirectory>,
}

impl Inputs {
    /// Waits until one of them may have changed.
    async fn changed(&mut self) -> Result<(), Closed> {
        tokio::select! {
            next = self.dhcp.next() => next.map(drop),
            next = self.setting.next() => next.map(drop),
            next = self.member.next() => next.map(drop),
            next = self.control_plane.next() => next.map(drop),
            next = self.directory.next() => next.map(drop),
        }
    }
}

struct Synchroniser {
    worker: Arc<Worker>,
    setting: Value<Vec<TimeServer>>,
    inputs: Inputs,
    sources: Sources,
    machine: Machine,
    /// Servers that have asked not to be asked, and until when they are not.
    muted: BTreeMap<TimeServer, Instant>,
    status: TimeStatus,
}

/// The answers of a round.
#[derive(Default)]
struct Round {
    asked: usize,
    samples: Vec<Sample>,
    /// Why there is no answer, if that is known.
    failure: Option<String>,
}

impl Synchroniser {
    fn new(worker: Arc<Worker>, setting: Value<Vec<TimeServer>>) -> Self {
        let inputs = Inputs {
            dhcp: worker.dhcp_time_servers.watch(),
            setting: setting.watch(),
            member: worker.member.watch(),
            control_plane: worker.control_plane.watch(),
            directory: worker.directory.watch(),
        };
        // After a restart of this worker.
        let steps = worker.time.value().get().map_or(0, |status| status.steps);
        Self {
            worker,
            setting,
            inputs,
            sources: Sources::Nobody,
            machine: Machine::new(),
            muted: BTreeMap::new(),
            status: TimeStatus {
                steps,
                ..TimeStatus::default()
            },
        }
    }

    /// Only returns errors.
    async fn keep(&mut self) -> Outcome {
        self.ask_others(self.known().sources());
        let mut due = Instant::now();
        loop {
            let sources = self.known().sources();
            if sources != self.sources {
                self.ask_others(sources);
                due = Instant::now();
            }
            let is_asking = self.sources != Sources::Nobody;
            tokio::select! {
                changed = self.inputs.changed() => changed?,
                () = sleep_until(due), if is_asking => {
                    self.round().await?;
                    due = Instant::now() + self.machine.next(random::number());
                }
            }
        }
    }

    fn known(&self) -> Known {
        let worker = &self.worker;
        let dhcp = worker.dhcp_time_servers.get().unwrap_or_default();
        let member = worker.member.get();
        let control_plane = worker.control_plane.get();
        let members = member.as_ref().map(|member| {
            let directory = worker.directory.get();
            let directory = directory.unwrap_or_else(|| member.directory.clone());
            sources::members(&directory, member.own.node())
        });
        Known {
            parameters: worker.parameters.clone(),
            setting: self.setting.get().unwrap_or_default(),
            dhcp: dhcp
                .into_iter()
                .take(time_server::MOST)
                .map(TimeServer::from)
                .collect(),
            is_member: control_plane.is_some_and(|local| local.curator_port.is_some()),
            members: members.unwrap_or_default(),
            has_cluster: member.is_some(),
        }
    }

    fn ask_others(&mut self, sources: Sources) {
        self.machine.ask_others();
        self.status = TimeStatus {
            source: sources.kind(),
            servers: sources.names(),
            steps: self.status.steps,
            ..TimeStatus::default()
        };
        self.sources = sources;
        self.publish();
    }

    fn publish(&self) {
        self.worker.time.set(self.status.clone());
    }

    async fn round(&mut self) -> Outcome {
        let round = match &self.sources {
            Sources::Nobody => return Ok(()),
            Sources::Servers(_, servers) => {
                let servers = servers.clone();
                self.ask_servers(&servers).await
            }
            Sources::Members(members) => self.ask_members(members).await?,
            Sources::Curator => self.look_at_curator(),
        };
        let now = self.worker.clock.now();
        let bounds = self.bounds()?;
        let decision = self
            .machine
            .round(now, &bounds, round.asked, &round.samples);
        self.perform(now, decision, round.failure);
        self.publish();
        Ok(())
    }

    /// No time outside of these is believed.
    fn bounds(&self) -> Result<Range<SystemTime>, Failure> {
        let end = match self.worker.member.get() {
            Some(member) => {
                let end = member.own.ca().not_after();
                UNIX_EPOCH + Duration::from_secs(end.as_secs())
            }
            None => self.worker.end,
        };
        Ok(self.worker.build_time..end)
    }

    async fn ask_servers(&mut self, servers: &[TimeServer]) -> Round {
        self.muted.retain(|_, until| *until > Instant::now());
        let mut calls = JoinSet::new();
        for server in servers
            .iter()
            .filter(|server| !self.muted.contains_key(server))
        {
            let (server, begin) = (*server, self.worker.build_time);
            let clock = self.worker.clock.clone();
            calls.spawn(async move { (server, exchange::ask(server, &*clock, begin).await) });
        }
        let mut round = Round {
            asked: servers.len(),
            ..Round::default()
        };
        while let Some(outcome) = calls.join_next().await {
            match outcome {
                Ok((_, Ok(sample))) => round.samples.push(sample),
                Ok((server, Err(error))) => {
                    let why = chain(&error);
                    tracing::debug!("{why}");
                    if error.is_refusal() {
                        self.muted.insert(server, Instant::now() + LONGEST);
                    }
                    round.failure = Some(why);
                }
                // A panic is in the log, and counts as no answer.
                Err(_) => {}
            }
        }
        round
    }

    async fn ask_members(&self, members: &BTreeMap<NodeId, IpAddr>) -> Result<Round, Failure> {
        let Some(trust) = self.trust()? else {
            return Ok(Round::default());
        };
        let worker = &self.worker;
        let clocks = nodes::ask_members(members, worker.port, &trust, &worker.clock).await;
        let mut round = Round {
            asked: members.len(),
            ..Round::default()
        };
        if clocks.is_empty() {
            return Ok(round);
        }
        match median(clocks) {
            Ok(sample) => round.samples.push(sample),
            Err(few) => round.failure = Some(few.to_string()),
        }
        Ok(round)
    }

    fn trust(&self) -> Result<Option<Arc<ClientConfig>>, Failure> {
        let Some(member) = self.worker.member.get() else {
            return Ok(None);
        };
        let expected = ExpectedServer::AnyNode;
        let trust = tls::node_client_config(&member.own, expected)?;
        Ok(Some(trust))
    }

    fn look_at_curator(&self) -> Round {
        let told = self.worker.curator_time.get();
        let sample = told.and_then(|time| time.compare("the curator", &*self.worker.clock));
        Round {
            asked: 1,
            samples: sample.into_iter().collect(),
            failure: None,
        }
    }

    fn perform(&mut self, now: SystemTime, decision: Decision, failure: Option<String>) {
        match decision {
            Decision::Slew(agreement) => self.slew(&agreement),
            Decision::Step(agreement) => self.step(now, &agreement),
            Decision::Confirm(agreement) => self.measured(agreement.offset),
            Decision::Nothing(reason) => self.leave(&reason, failure),
        }
    }

    /// The clock stays as it is. `failure`: a better reason than that nobody has answered.
    fn leave(&mut self, reason: &Reason, failure: Option<String>) {
        let text = failure.unwrap_or_else(|| reason.to_string());
        match reason {
            Reason::Dissent { offset, .. } => {
                self.measured(*offset);
                self.unsynchronised(TimeProblem::Wrong(reason.to_string()));
            }
            // One lost packet is no reason to doubt the clock.
            Reason::Silence { .. } if self.status.synchronised && !self.machine.is_deserted() => {
                tracing::debug!("{text}");
            }
            Reason::Silence { .. } => self.unsynchronised(TimeProblem::Unknown(text)),
            Reason::OutOfBounds { .. } | Reason::Contradiction { .. } => {
                self.unsynchronised(TimeProblem::Unknown(reason.to_string()));
            }
        }
    }

    fn slew(&mut self, agreement: &Agreement) {
        self.measured(agreement.offset);
        let every = self.machine.interval().max(SHORTEST);
        let has_servers = self.status.has_servers();
        match self.worker.clock.slew(agreement.offset, every, has_servers) {
            Ok(()) => self.synchronised(agreement),
            Err(error) => self.unsynchronised(TimeProblem::Unknown(chain(&error))),
        }
    }

    fn step(&mut self, now: SystemTime, agreement: &Agreement) {
        let clock = &self.worker.clock;
        let to = shifted(now, agreement.offset);
        let (from, to) = (date_and_time(now), date_and_time(to));
        let by = agreement.by.join(", ");
        // A step marks the clock as unsynchronised.
        let has_servers = self.status.has_servers();
        let set = clock
            .step(agreement.offset)
            .and_then(|()| clock.slew(0, SHORTEST, has_servers));
        if let Err(error) = set {
            self.measured(agreement.offset);
            let why = chain(&error);
            let problem = format!("{by} say that it is {to}, and not {from}: {why}");
            self.unsynchronised(TimeProblem::Wrong(problem));
            return;
        }
        tracing::warn!("the clock has been set from {from} to {to}, as {by} say");
        self.status.steps += 1;
        self.measured(agreement.offset);
        self.synchronised(agreement);
        if let Err(error) = self.worker.clock.save() {
            tracing::warn!(
                "the next boot may begin with a wrong clock: {}",
                chain(&error)
            );
        }
    }

    fn measured(&mut self, offset: i64) {
        self.status.measured = Some(Measured {
            offset,
            at: self.worker.clock.now(),
        });
    }

    fn synchronised(&mut self, agreement: &Agreement) {
        self.status.problem = None;
        if !std::mem::replace(&mut self.status.synchronised, true) {
            let by = agreement.by.join(", ");
            let source = self.status.source.as_str_name();
            let source = source.strip_prefix("TIME_SOURCE_").unwrap_or(source);
            tracing::info!("the clock follows {by} (source {source})");
        }
    }

    fn unsynchronised(&mut self, problem: TimeProblem) {
        if self.status.problem.as_ref() != Some(&problem) {
            tracing::warn!("the clock is not synchronised: {}", problem.reason());
        }
        self.status.problem = Some(problem);
        if std::mem::replace(&mut self.status.synchronised, false)
            && let Err(error) = self.worker.clock.slew(0, SHORTEST, false)
        {
            tracing::warn!("{}", chain(&error));
        }
    }
}
