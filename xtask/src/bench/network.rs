//! Network benchmark: throughput of the switch's way out, compared with QEMU's own user-mode network.
//!
//! [`hearth_lab::measure::traffic`] says what is transferred, and how.

use anyhow::Result;
use hearth_lab::measure::Lab;
use hearth_lab::measure::traffic::{Direction, Rates, Stations};
use hearth_qemu::accel;

use super::{Records, ratio, until_interrupted};
use crate::setup::{self, Needs};
use crate::ui::Ui;
use crate::{image, program, target};

/// Measures `rounds` transfers in each direction; None: the default number.
pub(super) fn measure(
    ui: &Ui,
    rounds: Option<u32>,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::RUN)?;
    let switch = program::switch(ui)?;
    let image = image::to_boot(&image::ensure_example(ui, image::TRAFFIC_INIT)?);
    let lab = Lab {
        accel: accel::choose(accel)?.accel,
        folder: target::folder("bench")?.join("network"),
    };
    let rounds = rounds.unwrap_or(9);
    let task = ui.counted_task("measuring transfers", u64::from(rounds) * 2);
    let measured = async {
        let stations = Stations::start(&lab, &image, &switch).await?;
        for direction in Direction::ALL {
            let mut all = Vec::new();
            for round in 0..rounds {
                task.now(direction.word());
                all.push(stations.round(direction, round % 2 == 1).await?);
                task.step();
            }
            record(direction, &all, records);
        }
        anyhow::Ok(())
    };
    until_interrupted(measured)?;
    task.done();
    Ok(())
}

fn record(direction: Direction, rates: &[Rates], records: &mut Records) {
    let of = |rate: fn(&Rates) -> f64| rates.iter().map(rate).collect::<Vec<_>>();
    let (switch, slirp) = (of(|rates| rates.switch), of(|rates| rates.slirp));
    let name = |what: &str| format!("switch.{}_{what}", direction.word());
    records.add(name("rate"), "bytes/s", &switch);
    records.add(name("rate_slirp"), "bytes/s", &slirp);
    records.add(name("ratio_slirp"), "ratio", &ratio(&switch, &slirp));
}
