//! Power cuts at the flushes of recorded machines, with a part of the writes after them: lost, torn, or all on the disk.
//!
//! A sample is run by default. `cargo xtask test e2e power_cut_sweep --long` runs all of a first bootstrap, and goes on where
//! it was interrupted; `cargo xtask power-cuts` runs a part, or repeats one.

use hearth_tests::sweep::{Scenario, Sweep};
use hearth_tests::{Outcome, TestCtx, here};

/// A few of the cuts of a first bootstrap; and what is lost after a flush is found out.
#[tokio::test]
async fn a_few_cuts_of_a_founding() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let sweep = Sweep::sample(&test, Scenario::FirstBootstrap);
    sweep.run().await?;
    sweep.finds_a_loss().await?;
    test.passed()
}

/// All of them.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn first_bootstrap() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let asked = Sweep::asked_for(&test, Scenario::FirstBootstrap)?;
    let sweep = asked.unwrap_or_else(|| Sweep::whole(&test, Scenario::FirstBootstrap));
    sweep.run().await?;
    test.passed()
}

/// Cuts of a cluster while its second machine registers, joins and becomes a consensus member: those that `cargo xtask
/// power-cuts join` asks for, which takes hours, or else a few.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn join() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let asked = Sweep::asked_for(&test, Scenario::Join)?;
    let sweep = asked.unwrap_or_else(|| Sweep::sample(&test, Scenario::Join));
    sweep.run().await?;
    test.passed()
}
