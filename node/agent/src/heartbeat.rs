//! Tells the curators that this node lives.
//!
//! A stream is opened to a curator; it says how often it wants to hear from
//! us and how long it will wait. Each answer means that the cluster holds this
//! node as alive, and is passed on as a moment in time. A stream that is not
//! answered within half of the curator's own bound is given up: the next one
//! may reach another curator, in time.
//!
//! A curator that does not let this node in is not asked again in a hurry, as
//! one that cannot be reached is, but ever more seldom; and it is counted, for
//! the cluster may have removed this node. What that means the answer cannot
//! say: it is for enrolment to ask, by the join key.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::v1::{HeartbeatRequest, HeartbeatResponse};
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::boot_record::boot_id;
use hearth_host::handover::Refusals;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use crate::connection::{self, CuratorConnection, over_each, refused};

/// What this node speaks.
const PROTOCOL_VERSION: u32 = 1;
/// Until the curator has told its own.
const FIRST_BOUND: Duration = Duration::from_secs(5);

/// Tells curators that this node is alive.
pub struct Worker {
    /// Will be read.
    pub connection: Value<CuratorConnection>,
    /// Will be written: when a heartbeat was sent that has been answered.
    pub acknowledged: Writer<Instant>,
    /// Will be written: one more for each curator that does not let us in.
    pub refusals: Arc<Writer<Refusals>>,
}

/// Sends heartbeats over each connection that there is.
pub async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let boot_id = boot_id()?;
    ctx.restart_within(Some(connection::ASK_AGAIN_WITHIN));
    let health = Health::of(&ctx);
    let beat = |connection| beat(&ctx, &health, &worker, connection, &boot_id);
    ctx.until_cancelled(over_each(&worker.connection, beat))
        .await
}

/// What a curator has answered that did not acknowledge.
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

/// One more refusal. Two workers count, and one of two at the same moment may
/// be lost: it is the growth that is looked at.
pub(super) fn count(refusals: &Writer<Refusals>) {
    let before = refusals.value().get().unwrap_or_default();
    refusals.set(before.saturating_add(1));
}

/// Nothing has come in time. It is a call that was begun and not ended, or given
/// up before the client's own bound: the client does not see anything wrong with it.
fn silent(connection: &CuratorConnection) -> Failure {
    connection.doubt();
    Failure::msg("the curator does not answer heartbeats")
}

async fn beat(
    ctx: &Context,
    health: &Health<'_>,
    worker: &Worker,
    connection: CuratorConnection,
    boot_id: &str,
) -> Outcome {
    let request = || HeartbeatRequest {
        boot_id: boot_id.to_owned(),
        protocol_version: PROTOCOL_VERSION,
    };
    let (beats, stream) = mpsc::channel(1);
    // Before the sending, however long that takes: what is acknowledged is not
    // that we lived any later.
    let mut sent = Instant::now();
    beats.send(request()).await?;
    let mut curator = connection.curator();
    let answers = curator.heartbeat(ReceiverStream::new(stream));
    let silent = |_| silent(&connection);
    let answers = timeout(FIRST_BOUND, answers).await.map_err(silent)?;
    let turned_away = |status| turned_away(ctx, worker, status);
    let mut answers = answers.map_err(turned_away)?.into_inner();
    let mut bound = FIRST_BOUND;
    loop {
        let answer = timeout(bound, answers.message()).await.map_err(silent)?;
        let answer = answer.map_err(turned_away)?;
        let answer = answer.ok_or_else(|| Failure::msg("the curator ended the heartbeats"))?;
        worker.acknowledged.set(sent);
        health.good();
        let interval = pace(&answer, &mut bound);
        sleep(interval).await;
        sent = Instant::now();
        beats.send(request()).await?;
    }
}

/// How long to wait until the next beat; a curator that asks for nonsense is
/// not followed into a busy loop or into silence.
fn pace(answer: &HeartbeatResponse, bound: &mut Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(60);
    let clamp = |ms: u32| Duration::from_millis(ms.into()).clamp(SHORTEST, LONGEST);
    // Half of it, so that there is time left to be heard by another one.
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
