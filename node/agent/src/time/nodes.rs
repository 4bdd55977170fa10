//! The clocks of other nodes: of the consensus members, which are asked, and of the curator, which
//! tells its time with each answer to a heartbeat.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hearth_api::client::{Curators, Endpoint, Options};
use hearth_api::identity::NodeId;
use hearth_api::v1::GetTimeRequest;
use hearth_api::v1::node_local_client::NodeLocalClient;
use hearth_sys::clock::SystemClock;
use rustls::ClientConfig;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::agreement::{MemberClock, Sample};
use super::exchange::difference;

/// Timeout of a call to another node.
const BOUND: Duration = Duration::from_secs(4);
/// A curator's time that is older says nothing of whether there still is a curator.
const FRESH: Duration = Duration::from_secs(30);
/// Times are told in milliseconds.
const PRECISION: Duration = Duration::from_millis(1);

/// What a curator's answer to a heartbeat says about the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CuratorTime {
    /// Its clock when it sent the answer.
    pub time: SystemTime,
    /// Whether its clock is synchronised to a time server.
    pub is_synchronised: bool,
    /// When the answer arrived.
    pub received: Instant,
    /// How long it had taken.
    pub round_trip: Duration,
}

impl CuratorTime {
    /// From an answer that has just arrived; `None` if its sender does not tell the time.
    pub(crate) fn of(time_ms: i64, is_synchronised: bool, round_trip: Duration) -> Option<Self> {
        let time_ms = u64::try_from(time_ms).ok().filter(|ms| *ms != 0)?;
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(time_ms))?;
        Some(Self {
            time,
            is_synchronised,
            received: Instant::now(),
            round_trip,
        })
    }

    /// Compares it with this node's clock; `None` if it is old.
    pub(super) fn compare(&self, from: &str, clock: &dyn SystemClock) -> Option<Sample> {
        let age = self.received.elapsed();
        // The answer was on its way for half of the round trip, or less.
        let way = self.round_trip / 2;
        (age < FRESH).then(|| Sample {
            from: from.to_owned(),
            offset: difference(self.time + way + age, clock.now()),
            error: way + PRECISION,
        })
    }
}

/// Compares the clocks of all members with this one. Those that do not answer are left out. The
/// server is verified to be a node of the cluster.
pub(super) async fn ask_members(
    members: &BTreeMap<NodeId, IpAddr>,
    port: u16,
    trust: &Arc<ClientConfig>,
    clock: &Arc<dyn SystemClock>,
) -> Vec<MemberClock> {
    let mut calls = JoinSet::new();
    for (id, host) in members {
        let endpoint = Endpoint::new(*host, port);
        calls.spawn(ask(*id, endpoint, trust.clone(), clock.clone()));
    }
    let mut clocks = Vec::new();
    while let Some(outcome) = calls.join_next().await {
        // A panic is in the log, and counts as no answer.
        clocks.extend(outcome.ok().flatten());
    }
    clocks
}

async fn ask(
    id: NodeId,
    endpoint: Endpoint,
    trust: Arc<ClientConfig>,
    clock: Arc<dyn SystemClock>,
) -> Option<MemberClock> {
    let options = Options {
        connect_timeout: BOUND,
        call_timeout: BOUND,
        ..Options::default()
    };
    let there = Curators::new(vec![endpoint.clone()], trust, options);
    let mut node = NodeLocalClient::new(there.channel());
    // The first call connects, the second is measured.
    let mut answer = None;
    for _ in 0..2 {
        let sent = Instant::now();
        match node.get_time(GetTimeRequest {}).await {
            Ok(time) => answer = Some((time.into_inner(), sent.elapsed())),
            Err(status) => {
                tracing::debug!(%endpoint, "cannot ask for the time: {}", status.message());
                return None;
            }
        }
    }
    let (answer, round_trip) = answer?;
    let time = CuratorTime::of(answer.time_ms, answer.synchronized, round_trip)?;
    Some(MemberClock {
        sample: time.compare(&id.to_string(), &*clock)?,
        is_synchronised: answer.synchronized,
    })
}
