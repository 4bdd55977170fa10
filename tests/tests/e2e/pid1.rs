//! PID 1 and the supervisor when processes or services fail (FAULTS 68).

use std::time::Duration;

use anyhow::{Context, ensure};
use hearth_api::console::Report;
use hearth_api::v1::provoke_request::Kind;
use hearth_api::v1::{ClusterState, GetStateResponse, RunnableState};
use hearth_tests::debug::runnable;
use hearth_tests::node::Running;
use hearth_tests::{Outcome, TestCtx, bounds, here};

/// The service that panics on request.
const VICTIM: &str = "root.debug.victim";

#[tokio::test]
async fn orphans_are_reaped() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let debug = vm.debug().await?;
    let before = debug
        .until("no zombies", |state| state.zombies == 0)
        .await?;
    for _ in 0..3 {
        debug.inject_fault(Kind::Orphan).await?;
    }
    // All orphans have ended and have been reaped.
    let gone = |state: &GetStateResponse| state.zombies == 0 && state.processes <= before.processes;
    debug.until("the orphans are gone", gone).await?;
    ensure!(before.processes > 2, "only {} processes", before.processes);
    vm.power_off().await?;
    test.passed()
}

#[tokio::test]
async fn a_panic_restarts_one_service_and_a_crash_loop_backs_off() -> Outcome {
    const PANICS: usize = 4;
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let operator = vm.owned().await?;
    let listed = operator.one_healthy_node().await?;
    let debug = vm.debug().await?;
    let before = debug.state().await?;

    for panic in 1..=PANICS {
        debug.inject_fault(Kind::ServicePanic).await?;
        let again = |state: &GetStateResponse| {
            runnable(state, VICTIM).is_some_and(|victim| victim.restarts == panic as u64)
        };
        debug.until("the service is restarted", again).await?;
    }
    let after = debug.state().await?;
    ensure!(after.cluster_state() == ClusterState::Home, "{after:#?}");
    ensure!(
        restarts_of_others(&after) == restarts_of_others(&before),
        "others were restarted: {after:#?}, before {before:#?}"
    );
    let victim = runnable(&after, VICTIM).context("no victim")?;
    ensure!(victim.last_error.contains("injected panic"), "{victim:?}");

    let log = debug.log(VICTIM).await?;
    let delays: Vec<f64> = log.iter().filter_map(|line| delay(line)).collect();
    ensure!(delays.len() == PANICS, "{log:#?}");
    // Each is longer by half, plus or minus the jitter.
    ensure!(
        delays.windows(2).all(|pair| pair[1] > pair[0] * 1.1),
        "the delays do not increase: {delays:?}"
    );
    ensure!(
        operator.one_healthy_node().await?.id == listed.id,
        "another node"
    );
    vm.power_off().await?;
    test.passed()
}

fn restarts_of_others(state: &GetStateResponse) -> Vec<(&str, u64)> {
    let others = state.runnables.iter().filter(|other| other.name != VICTIM);
    others
        .map(|RunnableState { name, restarts, .. }| (name.as_str(), *restarts))
        .collect()
}

/// "… restarts in 500.0ms", "… restarts in 1.1s": in seconds.
fn delay(line: &str) -> Option<f64> {
    let (_, delay) = line.split_once("restarts in ")?;
    let delay = delay.trim();
    match delay.strip_suffix("ms") {
        Some(milliseconds) => Some(milliseconds.parse::<f64>().ok()? / 1000.0),
        None => delay.strip_suffix('s')?.parse().ok(),
    }
}

#[tokio::test]
async fn the_death_of_the_core_is_reported_and_reboots() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let id = vm.owned().await?.one_healthy_node().await?.id;

    vm.debug().await?.provoke_end(Kind::CoreAbort).await;
    vm.wait_for_report("its death", bounds::SOON, |report| {
        *report == Report::CoreEnded("killed by SIGABRT".to_owned())
    })
    .await?;
    vm.home_in_boot(2).await?;
    resets(&vm, 1).await?;

    vm.debug().await?.provoke_end(Kind::RootError).await;
    vm.says(&["injected error"]).await?;
    vm.wait_for_report("its end", bounds::SOON, |report| {
        *report == Report::CoreEnded("exit code 1".to_owned())
    })
    .await?;
    vm.home_in_boot(3).await?;
    resets(&vm, 2).await?;
    let again = vm.owned().await?.one_healthy_node().await?.id;
    ensure!(again == id, "{again} was {id}");
    vm.power_off().await?;
    test.passed()
}

#[tokio::test]
async fn a_core_that_hangs_is_reset_by_the_watchdog() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let id = vm.owned().await?.one_healthy_node().await?.id;
    vm.debug().await?.provoke_end(Kind::CoreHang).await;
    event(&vm, "WATCHDOG", 1, bounds::WATCHDOG).await?;
    vm.home_in_boot(2).await?;
    let again = vm.owned().await?.one_healthy_node().await?.id;
    ensure!(again == id, "{again} was {id}");
    vm.power_off().await?;
    test.passed()
}

/// Waits until the guest has reset the machine this many times.
async fn resets(vm: &Running, count: usize) -> Outcome {
    event(vm, "RESET", count, bounds::SOON).await
}

/// Waits until QEMU has sent this event this many times.
async fn event(vm: &Running, name: &str, count: usize, bound: Duration) -> Outcome {
    let mut events = vm.qmp().events();
    let mut seen = 0;
    let wanted = format!("event {name}");
    let find = async {
        while let Some(event) = events.next().await {
            seen += usize::from(event.name == name);
            if seen == count {
                return true;
            }
        }
        false
    };
    ensure!(
        vm.while_running(&wanted, bound, find).await?,
        "{seen} of {count} times {name}"
    );
    Ok(())
}
