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

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use kube::{Client, Error};
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
    api: Api<Lease>,
    name: &'static str,
    identity: String,
    timing: Timing,
}

impl Competitor {
    /// `identity` is unlike that of all others.
    pub fn new(
        client: Client,
        namespace: &str,
        name: &'static str,
        identity: String,
        timing: Timing,
    ) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name,
            identity,
            timing,
        }
    }

    /// Waits until the lease is ours. Errors of the API server are waited out:
    /// it may start later than this.
    pub async fn win(&self) {
        // What was seen, and since when it has been like that.
        let mut seen: Option<(Option<String>, Instant)> = None;
        loop {
            match timeout(self.timing.each, self.attempt(&mut seen)).await {
                Ok(Ok(true)) => return,
                Ok(Ok(false)) => {}
                Ok(Err(error)) => {
                    let error = hearth_api::chain(&error);
                    tracing::debug!("no lease: {error}");
                }
                Err(_) => tracing::debug!("no lease: the API server does not answer"),
            }
            sleep(self.timing.each).await;
        }
    }

    async fn attempt(&self, seen: &mut Option<(Option<String>, Instant)>) -> Result<bool, Error> {
        let Some(found) = self.api.get_opt(self.name).await? else {
            let lease = self.mine(ObjectMeta::default(), 0);
            return won(self.api.create(&PostParams::default(), &lease).await);
        };
        let spec = found.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.unwrap_or_default();
        let version = found.metadata.resource_version.clone();
        let now = Instant::now();
        let since = match seen {
            Some((known, since)) if *known == version => *since,
            _ => {
                *seen = Some((version, now));
                now
            }
        };
        // Given back, left from our last life, or abandoned.
        let lasts = spec.lease_duration_seconds.unwrap_or_default();
        let lasts = Duration::from_secs(u64::try_from(lasts).unwrap_or_default());
        let free = holder.is_empty() || holder == self.identity;
        if !free && now.duration_since(since) < lasts.max(self.timing.lasts) {
            return Ok(false);
        }
        let transitions = spec.lease_transitions.unwrap_or_default();
        let lease = self.mine(found.metadata, transitions.saturating_add(1));
        let params = PostParams::default();
        won(self.api.replace(self.name, &params, &lease).await)
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

    async fn renew(&self) -> Result<bool, Error> {
        let Some(found) = self.api.get_opt(self.name).await? else {
            return Ok(false);
        };
        let spec = found.spec.unwrap_or_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            return Ok(false);
        }
        let transitions = spec.lease_transitions.unwrap_or_default();
        let mut lease = self.mine(found.metadata, transitions);
        if let Some(renewed) = &mut lease.spec {
            renewed.acquire_time = spec.acquire_time;
        }
        let params = PostParams::default();
        won(self.api.replace(self.name, &params, &lease).await)
    }

    /// Of these metadata, whose version says what it replaces.
    fn mine(&self, metadata: ObjectMeta, transitions: i32) -> Lease {
        let now = MicroTime(Timestamp::now());
        let seconds = self.timing.lasts.as_secs().max(1);
        Lease {
            metadata: ObjectMeta {
                name: Some(self.name.to_owned()),
                ..metadata
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: i32::try_from(seconds).ok(),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
                lease_transitions: Some(transitions),
                ..LeaseSpec::default()
            }),
        }
    }
}

/// Another was quicker: that is no error.
fn won(written: Result<Lease, Error>) -> Result<bool, Error> {
    match written {
        Ok(_) => Ok(true),
        Err(Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}
