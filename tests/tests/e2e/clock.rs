//! Machines with a wrong clock.
//!
//! One is not run by default; `cargo xtask test e2e clock --long` runs all of them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::ensure;
use hearth_api::v1::{Node, TimeSource, TimeStatus};
use hearth_qemu::command::Rtc;
use hearth_tests::chrony::Chrony;
use hearth_tests::{Outcome, TestCtx, bounds, here};
use time::OffsetDateTime;

/// What the wrong clocks below are ahead by.
const HOUR: Duration = Duration::from_secs(3600);

/// A clock that is ahead of the host's.
pub(crate) fn ahead(by: Duration) -> Rtc {
    let then = OffsetDateTime::now_utc() + by;
    let (hour, minute, second) = then.to_hms();
    Rtc::From(format!("{}T{hour:02}:{minute:02}:{second:02}", then.date()))
}

/// What a node reports about its clock.
fn time(node: &Node) -> Option<&TimeStatus> {
    node.status.as_ref()?.time.as_ref()
}

/// Whether the clock of a node was set once, and it has reported the right time since. A status is sent when it changes,
/// so it may be a while ago.
fn is_corrected(node: &Node) -> bool {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let sent = node.status.as_ref().map_or(0, |status| status.sent_at);
    let sent = Duration::from_secs(sent.unsigned_abs());
    time(node).is_some_and(|time| time.synchronized && time.steps == 1)
        && sent <= now + bounds::SAME_TIME
        && now <= sent + bounds::SETTLED
}

async fn comes_home_at(place: &str, date: &str) -> Outcome {
    let test = TestCtx::begin(place)?;
    let clock = Rtc::From(date.to_owned());
    // The owner's own clock is right, so the certificates have to be valid for longer than the image is old.
    let plan = test.node("node").clock(clock);
    let plan = plan.configured(|configuration| {
        configuration.certificate_lifetime_seconds = 365 * 24 * 3600;
    });
    let node = plan.install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.owned().await?.one_healthy_node().await?;
    vm.cut().await?;
    // Back to the same date: before the time at which the cluster was founded.
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.owned().await?.one_healthy_node().await?;
    vm.cut().await?;
    test.passed()
}

/// An empty clock battery.
#[tokio::test]
async fn a_node_comes_home_in_1970() -> Outcome {
    comes_home_at(here!(), "1970-01-01T00:00:00").await
}

/// The last seconds that fit into 32 bits.
#[tokio::test]
async fn a_node_comes_home_in_2038() -> Outcome {
    comes_home_at(here!(), "2038-01-19T03:14:04").await
}

/// A clock that is years ahead in the first boots does no harm to a later one. While it is after the end of all
/// certificates, the node says so and waits.
#[tokio::test]
async fn a_clock_that_is_years_ahead_is_forgotten() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let at = |date: &str| Rtc::From(date.to_owned());
    let plan = test.node("node").clock(at("2036-01-01T00:00:00"));
    let mut node = plan.install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.cut().await?;

    node.clock(at("2060-01-01T00:00:00"));
    let vm = node.power_on().await?;
    let why = vm.waits_in_the_end().await?;
    ensure!(
        why.contains("the clock of this machine says 2060-01-01"),
        "{why}"
    );
    vm.cut().await?;

    node.clock(Rtc::Host);
    let vm = node.power_on().await?;
    vm.says(&["the saved time, 2036-01-01, is more than a year ahead"])
        .await?;
    vm.home().await?;
    vm.owned().await?.one_healthy_node().await?;
    vm.cut().await?;
    test.passed()
}

#[tokio::test]
async fn a_first_boot_after_the_end_of_certificates_makes_nothing() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let date = Rtc::From("2066-01-01T00:00:00".to_owned());
    let node = test.node("node").clock(date).raw_disk().install().await?;
    let disk = node.disk().await?;
    let before = disk.data_digest()?;
    let vm = node.power_on().await?;
    let why = vm.refusal().await?;
    ensure!(
        why.contains("the clock of this machine says 2066-01-01"),
        "{why}"
    );
    vm.cut().await?;
    ensure!(disk.data_digest()? == before, "the disk has changed");
    test.passed()
}

/// The parameters name a real server: the first boot founds with the right time, though the hardware's clock is past the
/// end of all certificates.
#[tokio::test]
async fn a_first_boot_in_2066_founds_with_the_time_of_a_server() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let chrony = Chrony::start(&test)?;
    let date = Rtc::From("2066-01-01T00:00:00".to_owned());
    let plan = test.node("node").clock(date).online();
    let mut node = plan.install().await?;
    node.time_servers(vec![chrony.at_gateway()])?;
    let vm = node.power_on().await?;
    vm.says(&["the clock has been set from 2066-01-01"]).await?;
    vm.home().await?;
    let operator = vm.owned().await?;
    let found = operator.one_healthy_node_that(is_corrected).await?;
    let source = time(&found).map(TimeStatus::source);
    ensure!(source == Some(TimeSource::Parameters), "{source:?}");
    vm.cut().await?;
    test.passed()
}

/// By the cluster's setting, which the node gets from its curator once that runs.
#[tokio::test]
async fn a_server_corrects_a_clock_that_is_an_hour_ahead() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let chrony = Chrony::start(&test)?;
    let server = chrony.at_gateway();
    let plan = test.node("node").clock(ahead(HOUR)).online();
    let plan = plan.configured(|configuration| configuration.time_servers = vec![server.clone()]);
    let node = plan.install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let operator = vm.owned().await?;
    let found = operator.one_healthy_node_that(is_corrected).await?;
    let time = time(&found).cloned().unwrap_or_default();
    ensure!(time.source() == TimeSource::ClusterSetting, "{time:?}");
    ensure!(time.servers == [server], "{time:?}");
    vm.cut().await?;
    test.passed()
}

/// Without any server the members follow the median of their clocks.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_member_that_is_an_hour_ahead_follows_the_others() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    let writer = cluster.writer(1).await?;
    let third = cluster.node(3);
    third.cut().await?;
    third.node.clock(ahead(HOUR));
    third.comes_back().await?;
    let id = third.id().to_owned();
    // Their clocks differ by a little from each other's, too.
    let others = |time: &TimeStatus| {
        let offset = Duration::from_micros(time.offset_us.unsigned_abs());
        time.source() == TimeSource::ConsensusMembers && offset < bounds::SAME_TIME
    };
    cluster
        .until(
            "node-3 has the time of the others",
            bounds::SETTLED,
            |status| {
                status.nodes.iter().all(|node| match node.id == id {
                    true => is_corrected(node),
                    false => time(node).is_some_and(others),
                })
            },
        )
        .await?;
    cluster.all_healthy().await?;
    writer.goes_on().await?;
    drop(cluster);
    test.passed()
}
