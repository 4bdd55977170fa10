//! What enrolment does not begin while the machine's clock is past the end of certificates.
//!
//! A cluster that is founded with such a clock would be unusable from the start, so that is refused. A
//! member waits instead: its clock may become right.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_api::certificates::ClusterCa;
use hearth_host::clock::date;
use hearth_host::pki::Lifetime;
use rustls_pki_types::CertificateDer;

use super::{Failure, refuse};

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
