//! Who of several controllers works: the holder of a lease in Kubernetes.
//!
//! Why in Kubernetes and not by the curators' election: who cannot reach the
//! API server cannot work either, and must not hold up one who can.
//!
//! Clocks are not compared. Whoever wants the lease watches it and takes it
//! when it has not moved for its whole length by its own clock; whoever holds
//! it stops before that, when it could not renew it. All that is done under the
//! lease can be done twice, so that two who believe to hold it for a moment are
//! a waste and no harm.

use std::time::Duration;

use hearth_kubernetes_api::fields::Lease;
use hearth_kubernetes_api::{ApiError, Client, Objects, kinds};
use http::StatusCode;
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::time::{Instant, sleep, timeout};

/// How long it lasts when nobody renews it.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Without a renewal.
    pub lasts: Duration,
    /// Between two renewals, and two looks at another's.
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

/// The lease, as one who competes for it.
pub struct Competitor {
    leases: Objects,
    name: &'static str,
    identity: String,
    timing: Timing,
}

impl Competitor {
    /// `identity` is unlike that of all others.
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

    /// Waits until the lease is ours, and tells when it is seen to be another's.
    /// Errors of the API server are waited out: it may start later than this.
    pub async fn win(&self, others: impl Fn()) {
        let mut seen = None;
        loop {
            match timeout(self.timing.each, self.attempt(&mut seen)).await {
                Ok(Ok(true)) => return,
                Ok(Ok(false)) => others(),
                Ok(Err(error)) => {
                    let error = hearth_api::chain(&error);
                    tracing::debug!("no lease: {error}");
                }
                Err(_) => tracing::debug!("no lease: the API server does not answer"),
            }
            sleep(self.timing.each).await;
        }
    }

    /// `seen` is the version that was seen, and when it was for the first time.
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
        // Given back, left from our last life, or abandoned.
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

    /// Renews the lease for as long as that works; ends when it is lost, or
    /// may be.
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
                    tracing::debug!("the lease is not renewed: {error}");
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

    /// The lease as ours from now on.
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

    /// Changes the lease if it is as it was seen; tells whether it was.
    async fn write(&self, seen: &str, spec: Value) -> Result<bool, ApiError> {
        let patch = json!({ "metadata": { "resourceVersion": seen }, "spec": spec });
        won(self.leases.merge(self.name, &patch).await)
    }
}

/// Another was quicker: that is no error.
fn won(written: Result<(), ApiError>) -> Result<bool, ApiError> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.is(StatusCode::CONFLICT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// As a lease has it: to the microsecond.
fn now() -> String {
    let now = OffsetDateTime::now_utc();
    let (date, micros) = (now.date(), now.microsecond());
    let (hour, minute, second) = now.to_hms();
    format!("{date}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}
