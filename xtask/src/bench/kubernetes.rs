//! Kubernetes benchmark: one node from power-on until a pod runs that a user has created and the scheduler has
//! assigned.
//!
//! The node is the image with the debug service and the bundle, in a direct boot, and has both Kubernetes roles from
//! its founding. Meanwhile a user on the host takes ownership and generates a kubeconfig. As soon as the node logs that
//! its API server is ready, the user waits for the default service account, creates a pod of the
//! bundled image, and watches it until it runs. There the clock stops. All of this uses hearthctl and kubectl, with
//! kubectl's raw requests: further requests that only add convenience are not part of a pod's start. Then the memory of
//! the idle node's own processes is measured: PID 1 and the core, not etcd and not the Kubernetes programs. Last, the
//! user creates a second pod, whose image of 50 MB the node pulls from a registry on the host, and watches it as well.
//!
//! In alternation with it, on an identical machine, a script starts the same programs and pods ([`script`]).

mod script;

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result};
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::measure::Lab;
use hearth_lab::measure::kubernetes::{Measured, Round, Step, registry};
use hearth_qemu::accel;

use super::{Records, ratio, until_interrupted};
use crate::image::{self, Flavour};
use crate::run::kubectl;
use crate::setup::{self, Needs};
use crate::ui::{Task, Ui};
use crate::{bundle, hearthctl, programs, target};

/// Measures.
pub(super) fn measure(
    ui: &Ui,
    rounds: Option<u32>,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::RUN | Needs::BENCH)?;
    let bundle = bundle::ensure(ui, None)?;
    let extension = [image::of_bundle(&bundle)?];
    weigh_on_disk(ui, &extension, records)?;
    let folder = target::folder("bench")?;
    // The image with the debug service is booted, because its memory can be queried.
    let node = image::to_boot(&image::ensure_extended(ui, Flavour::Debug, &extension)?);
    let tree = script::tree(ui)?;
    let (image, program) = (bundle::large_probe(ui)?, programs::registry(ui)?);
    let hearthctl = Hearthctl {
        program: hearthctl::build(ui)?,
        config: folder.join("kubernetes/hearthctl.json"),
    };
    let kubectl = kubectl(&bundle)?;
    let accel = accel::choose(accel)?.accel;
    let rounds = rounds.unwrap_or(3);
    let task = ui.counted_task("measuring Kubernetes", u64::from(rounds) * 5);
    let mut all = Vec::new();
    let runs = async {
        let registry = registry(&program, &folder.join("kubernetes-registry"), &image).await?;
        let round = Round {
            node,
            script: script::initramfs(tree, &registry)?,
            registry,
            hearthctl,
            kubectl,
            lab: Lab { accel, folder },
        };
        for number in 0..rounds {
            let told = |step: Step<'_>| show(ui, &task, step);
            all.push(round.run(number % 2 == 1, &told).await?);
        }
        anyhow::Ok(())
    };
    until_interrupted(runs)?;
    task.done();
    record(&all, records);
    Ok(())
}

fn show(ui: &Ui, task: &Task, step: Step<'_>) {
    match step {
        Step::Begins(what) => task.now(what),
        Step::Done => task.step(),
        Step::AskingAgain(error) => {
            let why = hearth_api::chain(error);
            ui.detail(format_args!("retrying: {why}"));
        }
    }
}

fn record(all: &[Measured], records: &mut Records) {
    let of = |part: fn(&Measured) -> f64| all.iter().map(part).collect::<Vec<_>>();
    records.add("kubernetes.home_seconds", "s", &of(|m| m.node.home));
    let (api, script) = (of(|m| m.node.times.api), of(|m| m.script.api));
    records.add("kubernetes.api_seconds", "s", &api);
    records.add("kubernetes.api_seconds_script", "s", &script);
    let (pod, script) = (of(|m| m.node.times.pod), of(|m| m.script.pod));
    records.add("kubernetes.pod_seconds", "s", &pod);
    records.add("kubernetes.pod_seconds_script", "s", &script);
    let ratios = ratio(&pod, &script);
    records.add("kubernetes.pod_ratio_script", "ratio", &ratios);
    let (pull, script) = (of(|m| m.node.times.pull), of(|m| m.script.pull));
    records.add("kubernetes.pull_seconds", "s", &pull);
    records.add("kubernetes.pull_seconds_script", "s", &script);
    let ratios = ratio(&pull, &script);
    records.add("kubernetes.pull_ratio_script", "ratio", &ratios);
    let samples = || all.iter().flat_map(|m| &m.node.memory);
    let resident: Vec<f64> = samples().map(|memory| memory.resident).collect();
    records.add("kubernetes.hearth_resident_bytes", "bytes", &resident);
    let used: Vec<f64> = samples().map(|memory| memory.used).collect();
    records.add("kubernetes.memory_used_bytes", "bytes", &used);
}

/// The size on disk is that of the release image.
fn weigh_on_disk(ui: &Ui, extension: &[image::Request], records: &mut Records) -> Result<()> {
    let release = image::ensure_extended(ui, Flavour::Release, extension)?;
    let bytes = fs::metadata(&release.image).context("the image")?.blocks() * 512;
    records.add("kubernetes.image_allocated_bytes", "bytes", &[bytes as f64]);
    for extension in &release.extensions {
        let bytes = fs::metadata(extension).context("the extension")?.len();
        records.add("kubernetes.extension_bytes", "bytes", &[bytes as f64]);
    }
    Ok(())
}
