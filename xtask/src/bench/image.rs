//! Image assembly benchmark: ours compared with the other ways of [`hearth_image_bench`].

use std::time::Instant;

use anyhow::{Context, Result};
use hearth_image_bench::{Bench, WAYS};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use super::{Records, ratio};
use crate::image::{self, Artifacts};
use crate::setup::{self, Needs};
use crate::target;
use crate::ui::Ui;

/// Wall and CPU seconds of each round of one method.
#[derive(Default)]
struct Samples {
    wall: Vec<f64>,
    cpu: Vec<f64>,
}

/// Measures `rounds` rounds; None: the default number.
pub(super) fn measure(
    ui: &Ui,
    node: &Artifacts,
    rounds: Option<u32>,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::BENCH)?;
    let rounds = rounds.unwrap_or(7);
    let bench = Bench::new(&target::folder("")?, node.uki.clone(), image::VERSION)?;
    let task = ui.counted_task("measuring image assembly", u64::from(rounds) + 1);
    let mut samples: [Samples; 4] = Default::default();
    // The first round warms the caches and is not counted.
    for round in 0..=rounds {
        for ((name, way), samples) in WAYS.iter().zip(&mut samples) {
            task.now(*name);
            bench.clear()?;
            let (wall, cpu) = timed(|| way(&bench, ui))?;
            bench.verify(name, ui)?;
            if round > 0 {
                samples.wall.push(wall);
                samples.cpu.push(cpu);
            }
        }
        task.step();
    }
    task.done();
    let [ours, others @ ..] = &samples;
    records.add("image.wall", "s", &ours.wall);
    records.add("image.cpu", "s", &ours.cpu);
    for ((name, _), theirs) in WAYS[1..].iter().zip(others) {
        records.add(format!("image.wall_{name}"), "s", &theirs.wall);
        records.add(format!("image.cpu_{name}"), "s", &theirs.cpu);
        records.add(
            format!("image.wall_ratio_{name}"),
            "ratio",
            &ratio(&ours.wall, &theirs.wall),
        );
        records.add(
            format!("image.cpu_ratio_{name}"),
            "ratio",
            &ratio(&ours.cpu, &theirs.cpu),
        );
    }
    Ok(())
}

/// Wall and CPU seconds of the processes that `work` runs. The CPU time is that of children that have ended; no others
/// are running.
fn timed(work: impl FnOnce() -> Result<()>) -> Result<(f64, f64)> {
    let cpu = || -> Result<f64> {
        let usage =
            getrusage(UsageWho::RUSAGE_CHILDREN).context("cannot read the children's CPU time")?;
        let total = usage.user_time() + usage.system_time();
        Ok(total.num_microseconds() as f64 / 1e6)
    };
    let (before, started) = (cpu()?, Instant::now());
    work()?;
    Ok((started.elapsed().as_secs_f64(), cpu()? - before))
}
