//! Sends heartbeats to the curators.
//!
//! The worker opens a stream to a curator, which tells the heartbeat interval and its timeout. Each
//! response means that the cluster considers this node alive; the time of the request is published.
//! If a stream is not answered within half of the curator's timeout, the worker drops it, so that
//! the next one may reach another curator in time.
//!
//! When the node shuts down or reboots, the last request says so. Its next boot can then join at
//! once; otherwise it has to wait until the curators consider this one lost.
//!
//! A curator that rejects this node is retried with growing delays, unlike one that cannot be
//! reached. The rejection is also counted, because the cluster may have removed this node. The
//! error alone does not prove that: enrolment asks with the join key.
//!
//! The responses also tell, as a digest, who unlocks nodes when no curator is running; enrolment
//! compares it with what the node has recorded. And they tell the curator's time, which the time
//! service of a node without time servers follows.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::v1::{HeartbeatRequest, HeartbeatResponse};
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::boot_record::boot_id;
use hearth_host::handover::{Refusals, UnlockSettingsDigest};
use tokio::sync::{Mutex, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::connection::{self, CuratorConnection, for_each_connection, refused};
use crate::time::CuratorTime;

/// Version of the heartbeat protocol.
const PROTOCOL_VERSION: u32 = 1;
/// How long the announcement of the end of this boot may take: a curator's write to etcd. If no
/// curator can be reached any more, the node goes down without it.
const END_BOUND: Duration = Duration::from_secs(3);
/// Timeout until the curator has told its own.
const FIRST_BOUND: Duration = Duration::from_secs(5);

/// Sends heartbeats to a curator.
pub struct Worker {
    /// Read: the connection to the curators.
    pub connection: Value<CuratorConnection>,
    /// Written: when the last acknowledged heartbeat was sent.
    pub acknowledged: Writer<Instant>,
    /// Written: incremented when a curator rejects this node.
    pub refusals: Arc<Writer<Refusals>>,
    /// Written: the cluster's unlock settings, as the last response tells.
    pub unlock_settings: Writer<UnlockSettingsDigest>,
    /// Written: the curator's time, as the last response tells.
    pub curator_time: Writer<CuratorTime>,
}

/// Sends heartbeats over the current connection.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let boot_id = boot_id()?;
    ctx.restart_within(Some(connection::MAX_RETRY_DELAY));
    let health = Health::of(&ctx);
    let open = Mutex::new(None);
    let beat = |connection| beat(&ctx, &health, &worker, connection, &boot_id, &open);
    let beating = for_each_connection(&worker.connection, beat);
    let outcome = ctx.until_cancelled(beating).await;
    if ctx.is_cancelled()
        && let Some(stream) = open.into_inner()
    {
        // Runnables are cancelled when the node goes down. If it does not, because only what is
        // above this one has failed, the next heartbeat corrects this.
        let _ = timeout(END_BOUND, stream.end(&boot_id)).await;
    }
    outcome
}

/// An open heartbeat stream.
struct BeatStream {
    beats: mpsc::Sender<HeartbeatRequest>,
    answers: Streaming<HeartbeatResponse>,
}

impl BeatStream {
    /// Announces the end of this boot, and waits until the curator has recorded it.
    async fn end(mut self, boot_id: &str) {
        let last = HeartbeatRequest {
            ending: true,
            ..request(boot_id)
        };
        if self.beats.send(last).await.is_ok() {
            while let Ok(Some(_)) = self.answers.message().await {}
        }
    }
}

fn request(boot_id: &str) -> HeartbeatRequest {
    HeartbeatRequest {
        boot_id: boot_id.to_owned(),
        protocol_version: PROTOCOL_VERSION,
        ending: false,
    }
}

/// Handles an error returned by a curator.
fn turned_away(ctx: &Context, worker: &Worker, status: Status) -> Failure {
    if matches!(
        status.code(),
        Code::PermissionDenied | Code::Unauthenticated
    ) {
        ctx.restart_within(None);
        count(&worker.refusals);
    }
    refused(status)
}

/// Counts a refusal. Two workers count, and one of two simultaneous increments may be lost: only
/// the growth matters.
pub(super) fn count(refusals: &Writer<Refusals>) {
    let before = refusals.value().get().unwrap_or_default();
    refusals.set(before.saturating_add(1));
}

/// Handles a timeout. The client cannot detect it, because the call is still open.
fn silent(connection: &CuratorConnection) -> Failure {
    connection.mark_suspect();
    Failure::msg("the curator did not answer a heartbeat in time")
}

async fn beat(
    ctx: &Context,
    health: &Health<'_>,
    worker: &Worker,
    connection: CuratorConnection,
    boot_id: &str,
    open: &Mutex<Option<BeatStream>>,
) -> Outcome {
    let mut open = open.lock().await;
    *open = None;
    let (beats, stream) = mpsc::channel(1);
    // Taken before the request is sent: an acknowledgement only proves that the node was alive
    // before that.
    let mut sent = Instant::now();
    beats.send(request(boot_id)).await?;
    let mut curator = connection.curator();
    let answers = curator.heartbeat(ReceiverStream::new(stream));
    let silent = |_| silent(&connection);
    let answers = timeout(FIRST_BOUND, answers).await.map_err(silent)?;
    let turned_away = |status| turned_away(ctx, worker, status);
    let answers = answers.map_err(turned_away)?.into_inner();
    let BeatStream { beats, answers } = open.insert(BeatStream { beats, answers });
    let mut bound = FIRST_BOUND;
    let mut is_first = true;
    loop {
        let answer = timeout(bound, answers.message()).await.map_err(silent)?;
        let answer = answer.map_err(turned_away)?;
        let answer =
            answer.ok_or_else(|| Failure::msg("the curator closed the heartbeat stream"))?;
        worker.acknowledged.set(sent);
        publish(&worker.unlock_settings, answer.unlock_settings);
        let (time_ms, is_synchronised) = (answer.time_ms, answer.time_is_synchronized);
        // The first answer has waited for the connection, so its round trip says little.
        if !std::mem::take(&mut is_first)
            && let Some(time) = CuratorTime::of(time_ms, is_synchronised, sent.elapsed())
        {
            worker.curator_time.set(time);
        }
        health.good();
        let interval = pace(&answer, &mut bound);
        sleep(interval).await;
        sent = Instant::now();
        beats.send(request(boot_id)).await?;
    }
}

/// Publishes the cluster's unlock settings if they have changed. Curators of former releases do not
/// tell them.
fn publish(writer: &Writer<UnlockSettingsDigest>, told: u64) {
    if told != 0 && writer.value().get() != Some(told) {
        writer.set(told);
    }
}

/// The delay before the next heartbeat. Values of the curator are limited, so that they can cause
/// neither a busy loop nor silence.
fn pace(answer: &HeartbeatResponse, bound: &mut Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(60);
    let clamp = |ms: u32| Duration::from_millis(ms.into()).clamp(SHORTEST, LONGEST);
    // Half of it, which leaves time to reach another curator.
    *bound = clamp(answer.bound_ms) / 2;
    clamp(answer.interval_ms).min(*bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_is_the_curators_within_reason() {
        let mut bound = Duration::ZERO;
        let mut pace = |interval_ms, bound_ms| {
            let answer = HeartbeatResponse {
                interval_ms,
                bound_ms,
                ..HeartbeatResponse::default()
            };
            (pace(&answer, &mut bound), bound)
        };
        assert_eq!(
            pace(2000, 10_000),
            (Duration::from_secs(2), Duration::from_secs(5))
        );
        assert_eq!(
            pace(0, 0),
            (Duration::from_millis(50), Duration::from_millis(50))
        );
        assert_eq!(
            pace(u32::MAX, 4000),
            (Duration::from_secs(2), Duration::from_secs(2))
        );
    }
}
