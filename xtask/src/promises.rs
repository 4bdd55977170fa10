//! The numbers that Hearth promises, by the record that measures them. They are defined only here; `docs/bench.md`
//! explains them.

use anyhow::Result;
use hearth_lab::measure::records::Records;

use crate::image::revision;
use crate::ui::Ui;

/// The bound of a measured number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    /// At most this.
    AtMost(f64),
    /// At least this.
    AtLeast(f64),
}

/// On a quiet machine with two cores, under TCG; sizes in millions of bytes.
const PROMISES: &[(&str, Bound)] = &[
    ("image.cpu_ratio_genimage", Bound::AtMost(1.0)),
    ("image.wall_ratio_genimage", Bound::AtMost(0.6)),
    ("image.write_ratio_cp", Bound::AtMost(1.1)),
    ("boot.direct.home_ratio_bare", Bound::AtMost(1.3)),
    ("boot.uefi.home_ratio_bare", Bound::AtMost(1.15)),
    ("boot.direct.home_256mib", Bound::AtLeast(1.0)),
    ("cluster.three_voters_ratio_one_node", Bound::AtMost(6.0)),
    ("curator.hostile_p99_ratio_quiet", Bound::AtMost(1.5)),
    ("curator.update_rate_ratio_etcd", Bound::AtLeast(0.5)),
    ("curator.read_rate_ratio_etcd", Bound::AtLeast(0.5)),
    ("curator.cached_read_ratio_etcd", Bound::AtLeast(2.0)),
    ("curator.handshake_ratio_etcd", Bound::AtLeast(0.95)),
    ("curator.fanout_p99_seconds_1000", Bound::AtMost(1.0)),
    ("curator.fanout_p99_seconds_5000", Bound::AtMost(1.0)),
    ("curator.all_healthy_1000", Bound::AtLeast(1.0)),
    ("curator.cpu_1000", Bound::AtMost(1.0)),
    ("curator.cpu_growth_5000_over_1000", Bound::AtMost(6.0)),
    ("curator.death_seen_seconds_1000", Bound::AtMost(12.0)),
    ("storage.seal_ratio_clevis", Bound::AtMost(0.3)),
    ("storage.unseal_ratio_clevis", Bound::AtMost(0.3)),
    ("storage.seal_ratio_systemd", Bound::AtMost(1.0)),
    ("storage.unseal_ratio_systemd", Bound::AtMost(1.0)),
    ("storage.attestation_node_cpu_seconds", Bound::AtMost(0.3)),
    (
        "storage.attestation_verification_cpu_seconds",
        Bound::AtMost(0.002),
    ),
    ("storage.cold_start_ratio", Bound::AtMost(1.5)),
    ("storage.reboot_ratio", Bound::AtMost(1.3)),
    ("storage.power_cut_extra_seconds", Bound::AtMost(10.0)),
    ("switch.download_ratio_slirp", Bound::AtLeast(1.0)),
    ("switch.upload_ratio_slirp", Bound::AtLeast(1.0)),
    ("kubernetes.image_allocated_bytes", Bound::AtMost(95e6)),
    ("kubernetes.hearth_resident_bytes", Bound::AtMost(40e6)),
    ("kubernetes.memory_used_bytes", Bound::AtMost(700e6)),
    ("kubernetes.pod_ratio_script", Bound::AtMost(1.2)),
    ("kubernetes.pull_ratio_script", Bound::AtMost(1.25)),
    ("kubernetes.failover_ratio_lease", Bound::AtMost(3.0)),
    ("size.init_bytes", Bound::AtMost(12.48e6)),
    ("size.uki_bytes", Bound::AtMost(27e6)),
    ("size.image_allocated_bytes", Bound::AtMost(30e6)),
];

impl Bound {
    /// The promise for this record, if there is one.
    pub(crate) fn of(record: &str) -> Option<Bound> {
        let promise = PROMISES.iter().find(|(name, _)| *name == record);
        promise.map(|(_, bound)| *bound)
    }

    /// Whether a number keeps the promise.
    pub(crate) fn is_met(self, value: f64) -> bool {
        match self {
            Bound::AtMost(most) => value <= most,
            Bound::AtLeast(least) => value >= least,
        }
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bound::AtMost(most) => write!(f, "≤ {most}"),
            Bound::AtLeast(least) => write!(f, "≥ {least}"),
        }
    }
}

/// An empty collection for this checkout's revision.
pub(crate) fn records(ui: &Ui) -> Result<Records> {
    Ok(Records::new(revision(ui)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_still_within() {
        assert!(Bound::AtMost(1.5).is_met(1.5) && !Bound::AtMost(1.5).is_met(1.501));
        assert!(Bound::AtLeast(1.0).is_met(1.0) && !Bound::AtLeast(1.0).is_met(0.0));
        assert_eq!(Bound::of("size.init_bytes"), Some(Bound::AtMost(12.48e6)));
        assert_eq!(Bound::of("size.kernel_bytes"), None);
        assert_eq!(Bound::AtMost(10e6).to_string(), "≤ 10000000");
    }

    #[test]
    fn every_promise_is_explained() {
        let path = crate::checkout::root().join("docs/bench.md");
        let text = std::fs::read_to_string(path).unwrap();
        for (name, _) in PROMISES {
            assert!(text.contains(&format!("`{name}`")), "{name}");
        }
    }
}
