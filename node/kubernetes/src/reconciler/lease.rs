//! Leader election among the reconcilers of several controllers, with a lease in Kubernetes.
//!
//! Why in Kubernetes and not with the curators' election: a controller that cannot reach the API
//! server cannot reconcile, and must not block one that can.
//!
//! Clocks of different nodes are not compared. A candidate polls the lease, and acquires it when it
//! has not changed for its whole duration by the candidate's own clock; a holder that cannot renew
//! it stops before that. All work of the leader is idempotent, so two leaders for a moment cause
//! additional work but no damage.

use std::time::Duration;

use hearth_kubernetes_api::fields::Lease;
use hearth_kubernetes_api::{ApiError, Client, Objects, kinds};
use http::StatusCode;
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::time::{Instant, sleep, timeout};

/// Duration and intervals of the lease.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Duration of the lease after its last renewal.
    pub lasts: Duration,
    /// Interval between two renewals, and between two polls by a candidate.
    pub each: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lasts: Duration::from_secs(20),
            each: Duration::from_secs(4),
        }
    }
}

/// A candidate for the lease.
pub struct Competitor {
    leases: Objects,
    name: &'static str,
    identity: String,
    timing: Timing,
}

impl Competitor {
    /// `identity` is unique among all candidates.
    pub fn new(
        client: &Client,
        namespace: &str,
        name: &'static str,
        identity: String,
        timing: Timing,
    ) -> Self {
        Self {
            leases: client.within(namespace, kinds::LEASES),
            name,
            identity,
            timing,
        }
    }

    /// Waits until the lease is acquired; calls `others` whenever another candidate holds it.
    /// Errors of the API server are retried: it may be starting.
    pub async fn win(&self, others: impl Fn()) {
        let mut seen = None;
        loop {
            match timeout(self.timing.each, self.attempt(&mut seen)).await {
                Ok(Ok(true)) => return,
                Ok(Ok(false)) => others(),
                Ok(Err(error)) => {
                    let error = hearth_api::chain(&error);
                    tracing::debug!("cannot acquire the lease: {error}");
                }
                Err(_) => tracing::debug!("cannot acquire the lease: no answer from the API"),
            }
            sleep(self.timing.each).await;
        }
    }

    /// Tries to acquire the lease. `seen` is the last observed version, and when it was first
    /// observed.
    async fn attempt(&self, seen: &mut Option<(String, Instant)>) -> Result<bool, ApiError> {
        let Some(found) = self.leases.get::<Lease>(self.name).await? else {
            let lease = json!({ "metadata": { "name": self.name }, "spec": self.taken(0) });
            return won(self.leases.create(lease).await.map(drop));
        };
        let version = &found.metadata.resource_version;
        let now = Instant::now();
        let since = match seen {
            Some((known, since)) if known == version => *since,
            _ => {
                *seen = Some((version.clone(), now));
                now
            }
        };
        // Free if it was released, if it is ours from before a restart, or if it has expired.
        let (holder, lasts) = (
            found.spec.holder_identity,
            found.spec.lease_duration_seconds,
        );
        let lasts = Duration::from_secs(u64::try_from(lasts).unwrap_or_default());
        let free = holder.is_empty() || holder == self.identity;
        if !free && now.duration_since(since) < lasts.max(self.timing.lasts) {
            return Ok(false);
        }
        let transitions = found.spec.lease_transitions.saturating_add(1);
        self.write(version, self.taken(transitions)).await
    }

    /// Renews the lease until it is lost, or may be lost.
    pub async fn hold(&self) {
        let mut renewed = Instant::now();
        loop {
            sleep(self.timing.each).await;
            let left = (renewed + self.timing.lasts * 2 / 3).duration_since(Instant::now());
            match timeout(left, self.renew()).await {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => return,
                Ok(Err(error)) => {
                    let error = hearth_api::chain(&error);
                    tracing::debug!("cannot renew the lease: {error}");
                }
                Err(_) => return,
            }
            if renewed.elapsed() >= self.timing.lasts * 2 / 3 {
                return;
            }
        }
    }

    async fn renew(&self) -> Result<bool, ApiError> {
        let Some(found) = self.leases.get::<Lease>(self.name).await? else {
            return Ok(false);
        };
        if found.spec.holder_identity != self.identity {
            return Ok(false);
        }
        let renewed = json!({ "renewTime": now() });
        self.write(&found.metadata.resource_version, renewed).await
    }

    /// The specification of the lease with this candidate as holder.
    fn taken(&self, transitions: i32) -> Value {
        let now = now();
        json!({
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.timing.lasts.as_secs().max(1),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        })
    }

    /// Changes the lease if it still has the observed version; returns whether it had.
    async fn write(&self, seen: &str, spec: Value) -> Result<bool, ApiError> {
        let patch = json!({ "metadata": { "resourceVersion": seen }, "spec": spec });
        won(self.leases.merge(self.name, &patch).await)
    }
}

/// Maps a conflict to `false`: another candidate was faster.
fn won(written: Result<(), ApiError>) -> Result<bool, ApiError> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.is(StatusCode::CONFLICT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The current time in the format `MicroTime` of leases.
fn now() -> String {
    let now = OffsetDateTime::now_utc();
    let (date, micros) = (now.date(), now.microsecond());
    let (hour, minute, second) = now.to_hms();
    format!("{date}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}
