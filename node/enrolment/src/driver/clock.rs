//! What enrolment does not begin while the machine's clock is past the end of certificates.
//!
//! A cluster that is founded with such a clock would be unusable from the start, so that is refused,
//! after the time service has had [`CORRECTED_WITHIN`] to correct the clock, if it knows a time
//! server. A member waits instead: its clock may become right.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_api::certificates::ClusterCa;
use hearth_base::event::Value;
use hearth_host::date::date;
use hearth_host::handover::TimeStatus;
use hearth_host::pki::Lifetime;
use rustls_pki_types::CertificateDer;
use tokio::time::timeout;

use super::{Failure, refuse};

/// How long after the node has an address a time server may become known.
const KNOWN_WITHIN: Duration = Duration::from_secs(2);
/// How long a known time server may take to correct the clock.
const CORRECTED_WITHIN: Duration = Duration::from_secs(30);

/// Waits while the clock is past the end of certificates with this lifetime and a time server may correct it.
pub(super) async fn await_correction(lifetime: &Lifetime, time: &Value<TimeStatus>) {
    await_right(time, || ended(lifetime.end()).is_none()).await;
}

async fn await_right(time: &Value<TimeStatus>, is_right: impl Fn() -> bool) {
    if is_right() {
        return;
    }
    let mut states = time.watch();
    let known = timeout(KNOWN_WITHIN, states.wait_for(TimeStatus::has_servers)).await;
    let Ok(Ok(status)) = known else {
        return;
    };
    let servers = status.servers.join(", ");
    tracing::warn!("enrolment: the clock cannot be right: waiting for {servers} to correct it");
    // Observed again from the present state: it may have been corrected meanwhile.
    let mut states = time.watch();
    let corrected = states.wait_for(|_| is_right());
    if timeout(CORRECTED_WITHIN, corrected).await.is_err() {
        tracing::warn!("enrolment: the clock was not corrected within {CORRECTED_WITHIN:?}");
    }
}

/// Fails if certificates with this lifetime have ended.
pub(super) fn can_found(lifetime: &Lifetime) -> Result<(), Failure> {
    match ended(lifetime.end()) {
        None => Ok(()),
        Some((now, end)) => Err(Failure::Refuse(format!(
            "the clock of this machine says {now}, and the certificates that it would create end on {end}. \
             Nothing was changed. Set the clock, or use a newer image"
        ))),
    }
}

/// Fails if the certificates of the cluster with this CA have ended.
pub(super) fn is_before_the_end(ca: &CertificateDer<'_>) -> Result<(), Failure> {
    let end = ClusterCa::parse(ca).map_err(refuse)?.not_after();
    match ended(UNIX_EPOCH + Duration::from_secs(end.as_secs())) {
        None => Ok(()),
        Some((now, end)) => Err(Failure::Again(format!(
            "the clock of this machine says {now}, and the certificates of its cluster end on {end}: set the clock"
        ))),
    }
}

/// The date of now and of the end, if that has passed.
#[expect(clippy::disallowed_methods, reason = "this is about the system clock")]
fn ended(end: SystemTime) -> Option<(String, String)> {
    let now = SystemTime::now();
    (now >= end).then(|| (date(now), date(end)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use hearth_api::v1::TimeSource;
    use hearth_base::event;
    use tokio::time::{Instant, sleep};

    use super::*;

    fn asking() -> TimeStatus {
        TimeStatus {
            source: TimeSource::Dhcp,
            servers: vec!["192.0.2.1".into()],
            ..TimeStatus::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_right_or_cannot_be_corrected_is_not_waited_for() {
        let (writer, time) = event::value();
        let begin = Instant::now();
        await_right(&time, || true).await;
        assert_eq!(begin.elapsed(), Duration::ZERO);
        writer.set(TimeStatus::default());
        await_right(&time, || false).await;
        let waited = begin.elapsed();
        assert!(
            waited >= KNOWN_WITHIN && waited < 2 * KNOWN_WITHIN,
            "{waited:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_time_server_has_half_a_minute() {
        let (writer, time) = event::value();
        writer.set(asking());
        let begin = Instant::now();
        await_right(&time, || false).await;
        let waited = begin.elapsed();
        assert!(waited >= CORRECTED_WITHIN, "{waited:?}");
        assert!(waited < CORRECTED_WITHIN + KNOWN_WITHIN, "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_correction_ends_the_wait() {
        let (writer, time) = event::value();
        let is_right = AtomicBool::new(false);
        let begin = Instant::now();
        let correct = async {
            sleep(Duration::from_secs(1)).await;
            writer.set(asking());
            sleep(Duration::from_secs(5)).await;
            is_right.store(true, Ordering::Relaxed);
            writer.set(asking());
        };
        tokio::join!(
            correct,
            await_right(&time, || is_right.load(Ordering::Relaxed))
        );
        assert_eq!(begin.elapsed().as_secs(), 6);
    }
}
