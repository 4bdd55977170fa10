//! Boot benchmark: the node from power-on to HOME, compared with a bare init and with a machine that only powers off.
//!
//! [`hearth_lab::measure::boots`] says when a boot ends, and what it is compared with.

use anyhow::Result;
use hearth_lab::LabError;
use hearth_lab::measure::boots::{Kind, Machines, Samples};
use hearth_lab::measure::{CPUS, Lab, MEMORY, Measured, Way};
use hearth_qemu::accel;

use super::{Records, until_interrupted};
use crate::image::{self, Artifacts};
use crate::setup::{self, Needs};
use crate::target;
use crate::ui::Ui;

/// The least memory in which a node must become HOME, in MiB.
const LEAST_MEMORY: u32 = 256;

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
        let (began, done) = (|kind: Kind| task.now(kind.word()), || task.step());
        let mut samples = Samples::default();
        // The first round warms the host's caches and is not counted.
        samples.round(machines, way, false, began, done).await?;
        let mut samples = Samples::default();
        for round in 0..rounds {
            let swapped = round % 2 == 1;
            samples.round(machines, way, swapped, began, done).await?;
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
