//! The minimum memory of a node (FAULTS 67, in part).

use hearth_tests::node::Plan;
use hearth_tests::{Outcome, TestCtx, here};

/// The release image, booted directly, with a quarter of a GiB and one CPU, as promised.
#[tokio::test]
async fn a_node_comes_home_in_256_mib() -> Outcome {
    let test = TestCtx::begin(here!())?;
    comes_home_twice(test.node("node").memory_mib(256).cpus(2)).await?;
    test.passed()
}

/// Half of that, and only the CPU as source of random numbers.
#[tokio::test]
async fn a_node_comes_home_in_128_mib_without_a_random_number_generator() -> Outcome {
    let test = TestCtx::begin(here!())?;
    comes_home_twice(test.node("node").memory_mib(128).cpus(2).without_rng()).await?;
    test.passed()
}

async fn comes_home_twice(plan: Plan<'_>) -> Outcome {
    let node = plan.release().cpus(1).install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.owned().await?.one_healthy_node().await?;
    vm.power_off().await?;
    // The second boot also has to read a database.
    let vm = node.power_on().await?;
    vm.home().await?;
    vm.owned().await?.one_healthy_node().await?;
    vm.cut().await?;
    Ok(())
}

/// If there is not even memory for the programs, the console shows it.
#[tokio::test]
async fn far_too_little_memory_is_told() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").release().memory_mib(64).cpus(1);
    let node = node.install().await?;
    let vm = node.power_on().await?;
    vm.says(&["Initramfs unpacking failed"]).await?;
    vm.cut().await?;
    test.passed()
}
