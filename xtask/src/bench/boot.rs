//! Boot benchmark: the node from power-on to HOME, compared with a bare init and with a machine that only powers off.
//!
//! A node counts as HOME here when its owner, on the host, has got its list of nodes: GetNodes, answered over mutual
//! TLS with the owner's certificate. First contact and the exchange of the owner key for that certificate come before
//! it and are included. The bare init ([`image::BARE_INIT`]) does the minimum for etcd to serve from a disk on the same
//! kernel. All three run on identical machines, one at a time and in alternation, and every other round in the opposite
//! order, so that neither a slow moment of the host nor the cache contents left by the previous one affect only one of
//! them.

use std::time::Duration;

use anyhow::Result;
use hearth_lab::LabError;
use hearth_lab::measure::{CPUS, Lab, MEMORY, Measured, Way};
use hearth_qemu::accel;
use hearth_qemu::artifacts::Image;
use hearth_qemu::phases::Phase;

use super::{Records, ratio, until_interrupted};
use crate::image::{self, Artifacts};
use crate::setup::{self, Needs};
use crate::target;
use crate::ui::{Task, Ui};

/// The least memory in which a node must become HOME, in MiB.
const LEAST_MEMORY: u32 = 256;

/// The images and their machines.
struct Machines {
    node: Image,
    /// The image that the node is compared with.
    bare: Image,
    lab: Lab,
}

/// Measures `rounds` of each boot method; None: the default number.
pub(super) fn measure(
    ui: &Ui,
    node: &Artifacts,
    rounds: Option<u32>,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::RUN)?;
    let accel = accel::choose(accel)?;
    let machines = Machines {
        node: image::to_boot(node),
        bare: image::to_boot(&image::ensure_example(ui, image::BARE_INIT)?),
        lab: Lab {
            accel: accel.accel,
            folder: target::folder("bench")?,
        },
    };
    ui.say(format_args!(
        "machines: {CPUS} CPUs, {MEMORY} MiB, {accel}; logs in {}",
        target::shown(&machines.lab.folder)
    ));
    until_interrupted(all(ui, &machines, rounds, records))
}

async fn all(
    ui: &Ui,
    machines: &Machines,
    rounds: Option<u32>,
    records: &mut Records,
) -> Result<()> {
    for (way, usual) in [(Way::Direct, 5), (Way::Uefi, 3)] {
        let rounds = rounds.unwrap_or(usual);
        let length = u64::from(rounds + 1) * 3;
        let task = ui.counted_task(format!("measuring boots ({})", way.word()), length);
        let mut samples = Samples::default();
        // The first round warms the host's caches and is not counted.
        samples.round(machines, way, false, &task).await?;
        let mut samples = Samples::default();
        for round in 0..rounds {
            let swapped = round % 2 == 1;
            samples.round(machines, way, swapped, &task).await?;
        }
        task.done();
        samples.record(way, records);
    }
    let task = ui.task(format!("booting a node in {LEAST_MEMORY} MiB"));
    let small = comes_home(ui, machines).await?;
    task.done();
    let reached = f64::from(u8::from(small.is_some()));
    let name = format!("boot.direct.home_{LEAST_MEMORY}mib");
    records.add(name, "boolean", &[reached]);
    if let Some(small) = small {
        let name = format!("memory.qemu_peak_bytes_direct_{LEAST_MEMORY}mib");
        records.add(name, "bytes", &[small.peak as f64]);
    }
    Ok(())
}

/// The boot in the least memory. A machine that does not become HOME is a result, too; a failure to try is an error.
async fn comes_home(ui: &Ui, machines: &Machines) -> Result<Option<Measured>> {
    let (lab, node) = (&machines.lab, &machines.node);
    match lab.node(node, Way::Direct, LEAST_MEMORY).await {
        Ok(boot) => Ok(Some(boot)),
        Err(LabError::Wait(error)) => {
            ui.say(format_args!("in {LEAST_MEMORY} MiB: {error}"));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// The measurements of one boot method, round by round.
#[derive(Default)]
struct Samples {
    node: Vec<Measured>,
    bare: Vec<Measured>,
    floor: Vec<f64>,
}

impl Samples {
    /// Measures one boot of each image.
    async fn round(
        &mut self,
        machines: &Machines,
        way: Way,
        swapped: bool,
        task: &Task,
    ) -> Result<()> {
        let order = match swapped {
            false => [Kind::Node, Kind::Bare, Kind::Floor],
            true => [Kind::Floor, Kind::Bare, Kind::Node],
        };
        let Machines { node, bare, lab } = machines;
        for kind in order {
            match kind {
                Kind::Node => {
                    task.now("node");
                    self.node.push(lab.node(node, way, MEMORY).await?);
                }
                Kind::Bare => {
                    task.now("bare init");
                    self.bare.push(lab.bare(bare, way).await?);
                }
                Kind::Floor => {
                    task.now("floor");
                    let floor = lab.floor(bare, way).await?;
                    self.floor.push(floor.as_secs_f64());
                }
            }
            task.step();
        }
        Ok(())
    }

    fn record(&self, way: Way, records: &mut Records) {
        let way = way.word();
        let name = |what: &str| format!("boot.{way}.{what}");
        let home = wholes(&self.node);
        let bare = wholes(&self.bare);
        records.add(name("home_seconds"), "s", &home);
        for (phase, seconds) in phases(&self.node) {
            records.add(name(&format!("phase.{phase}_seconds")), "s", &seconds);
        }
        records.add(name("bare_first_put_seconds"), "s", &bare);
        for (phase, seconds) in phases(&self.bare) {
            records.add(name(&format!("bare_phase.{phase}_seconds")), "s", &seconds);
        }
        records.add(name("floor_seconds"), "s", &self.floor);
        let mut against = |what, theirs: &[f64]| {
            let name = name(&format!("home_ratio_{what}"));
            records.add(name, "ratio", &ratio(&home, theirs));
        };
        against("bare", &bare);
        against("floor", &self.floor);
        let peaks = |boots: &[Measured]| boots.iter().map(|b| b.peak as f64).collect::<Vec<_>>();
        for (name, boots) in [
            (format!("memory.qemu_peak_bytes_{way}"), &self.node),
            (format!("memory.qemu_peak_bytes_{way}_bare"), &self.bare),
        ] {
            records.add(name, "bytes", &peaks(boots));
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Node,
    Bare,
    Floor,
}

fn wholes(boots: &[Measured]) -> Vec<f64> {
    boots.iter().map(|boot| boot.whole.as_secs_f64()).collect()
}

/// Seconds by phase, for phases that every boot reported. The time after the last one, from the node's report that it
/// is HOME to the owner's answer, is `answer`.
fn phases(boots: &[Measured]) -> Vec<(&'static str, Vec<f64>)> {
    let took = |phase: Phase| {
        let took = |boot: &Measured| Some(boot.timeline.get(phase)?.took.as_secs_f64());
        let seconds = boots.iter().map(took).collect::<Option<Vec<_>>>()?;
        Some((phase.word(), seconds))
    };
    let rest = |boot: &Measured| {
        let last = boot.timeline.passed().last();
        let told = last.map_or(Duration::ZERO, |passed| passed.at);
        boot.whole.saturating_sub(told).as_secs_f64()
    };
    let answers: Vec<f64> = boots.iter().map(rest).collect();
    // A boot that ends with its last phase has none.
    let answer = answers
        .iter()
        .any(|rest| *rest > 0.0)
        .then_some(("answer", answers));
    Phase::ALL
        .into_iter()
        .filter_map(took)
        .chain(answer)
        .collect()
}
