//! Timeouts of the tests, and the repetition of what may fail at first.
//!
//! On a quiet host with two cores and no KVM a direct boot reaches HOME in seven seconds. These are bounds for a host
//! that is busy with other work, so that they only expire if something hangs.

use std::time::Duration;

use anyhow::bail;

/// From the start of QEMU to HOME.
pub const HOME: Duration = Duration::from_secs(300);
/// From the start of QEMU until enrolment has examined the disk.
pub const DECISION: Duration = Duration::from_secs(120);
/// The difference between the clocks of a machine and of the host: a report takes as long to arrive.
pub const SAME_TIME: Duration = Duration::from_secs(20);
/// From the power button to the end of the machine.
pub const POWER_OFF: Duration = Duration::from_secs(90);
/// For one call.
pub const CALL: Duration = Duration::from_secs(30);
/// Between two attempts at something that is expected within seconds.
pub const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Between two runs of hearthctl or kubectl, which takes a new certificate each time: seconds of a host's CPU.
pub const RUN_AGAIN: Duration = Duration::from_secs(2);
/// For what follows by itself within seconds.
pub const SOON: Duration = Duration::from_secs(60);
/// From the moment the core hangs until the watchdog resets the machine: its own timeout is 30 seconds.
pub const WATCHDOG: Duration = Duration::from_secs(240);
/// From one machine that is HOME to a cluster of three voters: two boots at once, two learners one after the other.
pub const FORMED: Duration = Duration::from_secs(600);
/// From the assignment of a node's Kubernetes roles to Ready: a minute and a half on a quiet host, because an API
/// server takes half of that to start.
pub const KUBERNETES: Duration = Duration::from_secs(900);
/// For an effect in Kubernetes: a pod runs, a service is reachable, a lost node is removed.
pub const WORKLOAD: Duration = Duration::from_secs(600);
/// Until a cluster has noticed a fault, or its end: leases, elections, a machine that restarts.
pub const SETTLED: Duration = Duration::from_secs(300);
/// For the next output of Kubernetes' own tests: the longest of them wait for minutes, on faster hosts.
pub const CASE: Duration = Duration::from_secs(1800);

/// Repeats an attempt until it succeeds.
///
/// # Errors
/// If it does not within the bound; with the error of the last attempt.
pub async fn until_ok<T, F>(
    wanted: &str,
    bound: Duration,
    attempt: impl Fn() -> F,
) -> anyhow::Result<T>
where
    F: Future<Output = anyhow::Result<T>>,
{
    let mut last = None;
    let tries = async {
        loop {
            match attempt().await {
                Ok(value) => return value,
                Err(error) => last = Some(error),
            }
            tokio::time::sleep(RUN_AGAIN).await;
        }
    };
    match tokio::time::timeout(bound, tries).await {
        Ok(value) => Ok(value),
        Err(_) => match last {
            Some(error) => Err(error.context(format!("{wanted}: timed out after {bound:?}"))),
            None => bail!("{wanted}: no answer within {bound:?}"),
        },
    }
}
