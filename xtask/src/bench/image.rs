//! Image assembly benchmark: ours compared with the other ways of [`hearth_image_bench`]. And what `hearthctl image write`
//! takes for a file, compared with `cp` and `sync`.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};
use hearth_image_bench::{Bench, WAYS};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use super::{Records, ratio};
use crate::command::Cmd;
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
    written(ui, node, rounds, records)
}

/// Writes an image with parameters to a file.
fn written(ui: &Ui, node: &Artifacts, rounds: u32, records: &mut Records) -> Result<()> {
    let folder = target::folder("bench")?.join("written");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(folder.join("owner"))?;
    let hearthctl = image::build_hearthctl(ui, &folder.join("hearthctl"))?;
    let of = |name| folder.join(name);
    let (owner, parameters) = (of("owner"), of("node.pb"));
    let run = |cmd: Cmd| -> Result<()> { Ok(cmd.output(ui).map(drop)?) };
    run(Cmd::new(&hearthctl).args(["owner", "init"]).arg(&owner))?;
    run(Cmd::new(&hearthctl)
        .args(["parameters", "bootstrap", "--owner"])
        .arg(&owner)
        .arg("--output-file")
        .arg(&parameters))?;
    let (ours, copy) = (of("ours.img"), of("copy.img"));
    let write = || {
        run(Cmd::new(&hearthctl)
            .args(["image", "write"])
            .args([&node.image, &ours])
            .arg("--parameters")
            .arg(&parameters))
    };
    let copied = || {
        run(Cmd::new("cp")
            .args(["--reflink=never", "--sparse=always"])
            .args([&node.image, &copy]))?;
        run(Cmd::new("sync").arg(&copy))
    };
    let task = ui.counted_task("measuring written images", u64::from(rounds) + 1);
    let mut seconds: [Vec<f64>; 2] = Default::default();
    for round in 0..=rounds {
        let mut order: [(usize, &dyn Fn() -> Result<()>); 2] = [(0, &write), (1, &copied)];
        // Every other round runs in the opposite order.
        order.rotate_left((round % 2) as usize);
        for (index, way) in order {
            let started = Instant::now();
            way()?;
            if round > 0 {
                seconds[index].push(started.elapsed().as_secs_f64());
            }
        }
        for path in [&ours, &copy] {
            fs::remove_file(path)?;
        }
        task.step();
    }
    task.done();
    let [ours, copy] = &seconds;
    records.add("image.write_wall", "s", ours);
    records.add("image.write_wall_cp", "s", copy);
    records.add("image.write_ratio_cp", "ratio", &ratio(ours, copy));
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
