//! Whether another machine uses the address of the lease.
//!
//! The address is used at once, and probed while it is: a server that grants an address twice is told within seconds. Later
//! claims are only reported, since to give up an address that others know would cost more than it mends.

use std::net::IpAddr;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::Lease;
use crate::conflict::{Detector, PROBE_INTERVAL, PROBES};

/// How often a claim is reported.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Watches the address of a lease.
#[derive(Default)]
pub(super) struct Duplicates {
    watched: Option<Watched>,
}

struct Watched {
    detector: Detector,
    /// Including the interval after the last one.
    probes_left: u32,
    next_probe: Instant,
    /// No report before.
    quiet_until: Instant,
}

/// Another machine claims the address.
pub(super) struct Claim {
    /// Its hardware address.
    pub by: [u8; 6],
    /// The address has just been granted.
    pub is_new: bool,
}

impl Duplicates {
    /// Watches the address of this lease from now on. Without permission to do so, nothing is noticed.
    pub(super) fn watch(&mut self, interface: u32, mac: [u8; 6], lease: &Lease) {
        let address = lease.address.address();
        let is_of = |watched: &Watched| watched.detector.address() == address;
        if self.watched.as_ref().is_some_and(is_of) {
            return;
        }
        self.stop();
        let IpAddr::V4(v4) = address else { return };
        let now = Instant::now();
        match Detector::open(interface, mac, v4) {
            Ok(detector) => {
                self.watched = Some(Watched {
                    detector,
                    probes_left: PROBES + 1,
                    next_probe: now,
                    quiet_until: now,
                });
            }
            Err(error) => tracing::debug!(%address, %error, "cannot watch for duplicates"),
        }
    }

    pub(super) fn stop(&mut self) {
        self.watched = None;
    }

    /// The next claim that is to be reported. Cancel safe.
    pub(super) async fn next(&mut self) -> Claim {
        let Some(watched) = &mut self.watched else {
            return std::future::pending().await;
        };
        loop {
            let is_new = watched.probes_left > 0;
            tokio::select! {
                heard = watched.detector.next() => match heard {
                    Ok(by) if Instant::now() >= watched.quiet_until => {
                        watched.quiet_until = Instant::now() + REPORT_INTERVAL;
                        return Claim { by, is_new };
                    }
                    Ok(_) => {}
                    Err(error) => {
                        tracing::debug!(%error, "cannot watch for duplicates");
                        return std::future::pending().await;
                    }
                },
                () = sleep_until(watched.next_probe), if is_new => {
                    watched.probes_left -= 1;
                    // After the last one there is an interval for its answer.
                    if watched.probes_left > 0 {
                        watched.detector.probe();
                        watched.next_probe += PROBE_INTERVAL;
                    }
                }
            }
        }
    }
}
