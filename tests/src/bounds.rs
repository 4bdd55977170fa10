//! How long what may take.
//!
//! On a quiet host with two cores and no KVM a direct boot is home in seven
//! seconds. These are bounds for a host that is busy with other things, so
//! that only what is stuck runs into them.

use std::time::Duration;

/// From the start of QEMU to HOME.
pub const HOME: Duration = Duration::from_secs(300);
/// From the start of QEMU until enrolment has looked at the disk.
pub const DECISION: Duration = Duration::from_secs(120);
/// From the power button to the end.
pub const POWER_OFF: Duration = Duration::from_secs(90);
/// For the answer to one call.
pub const CALL: Duration = Duration::from_secs(30);
/// For what follows by itself within seconds.
pub const SOON: Duration = Duration::from_secs(60);
/// From the moment the core hangs until the watchdog bites: its own time-out
/// is 30 seconds.
pub const WATCHDOG: Duration = Duration::from_secs(240);
/// From one machine that is HOME to a cluster of three voters: two boots at
/// once, two learners one after the other.
pub const FORMED: Duration = Duration::from_secs(600);
/// From the moment a node gets its Kubernetes roles to Ready: a minute and a
/// half on a quiet host, for an API server takes half of that to start.
pub const KUBERNETES: Duration = Duration::from_secs(900);
/// Until Kubernetes has done what it was told: a pod runs, a service is
/// reached, a node that is gone is forgotten.
pub const WORKLOAD: Duration = Duration::from_secs(600);
/// Until a cluster has noticed a fault, or that it is over: leases, elections,
/// a machine that comes back.
pub const SETTLED: Duration = Duration::from_secs(300);
/// Until Kubernetes' own tests say something: the longest of them wait for
/// minutes, on hosts that are faster.
pub const CASE: Duration = Duration::from_secs(1800);
