//! Machines with a wrong clock.

use anyhow::ensure;
use hearth_qemu::command::Rtc;
use hearth_tests::{Outcome, TestCtx, here};

async fn comes_home_at(place: &str, date: &str) -> Outcome {
    let test = TestCtx::begin(place)?;
    let clock = Rtc::From(date.to_owned());
    let node = test.node("node").clock(clock).install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    // The owner's own clock is right.
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
