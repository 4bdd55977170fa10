//! FAULTS 40: a machine with a wrong clock.

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
