//! Cluster benchmark: from the start of the first machine to three voters, compared with one node.
//!
//! One round forms one cluster, like `cargo xtask run --nodes 3`: the first node founds it, then the other two boot
//! together, are approved by the keys on their consoles, and are made consensus members. When the first node's owner
//! has got the answer to GetNodes, one node is HOME; the whole is compared with that time, from the same round and on
//! the same machine.

use anyhow::Result;
use hearth_lab::measure::{Lab, Progress, form};
use hearth_qemu::accel;

use super::{Records, ratio, until_interrupted};
use crate::image::{self, Artifacts};
use crate::setup::{self, Needs};
use crate::ui::Ui;
use crate::{program, target};

/// Number of nodes, all of them voters.
const NODES: u16 = 3;

/// Measures.
pub(super) fn measure(
    ui: &Ui,
    node: &Artifacts,
    rounds: Option<u32>,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::RUN)?;
    let lab = Lab {
        accel: accel::choose(accel)?.accel,
        folder: target::folder("bench")?.join("cluster"),
    };
    let (node, switch) = (image::to_boot(node), program::switch(ui)?);
    let rounds = rounds.unwrap_or(3);
    let task = ui.counted_task("measuring clusters", u64::from(rounds) * 2);
    let (mut one, mut all) = (Vec::new(), Vec::new());
    let forms = async {
        for _ in 0..rounds {
            let told = |progress: Progress<'_>| match progress {
                Progress::First => task.now("one node"),
                Progress::Others => {
                    task.step();
                    task.now("three voters");
                }
                Progress::NotYet(error) => {
                    let why = hearth_api::chain(error);
                    task.now(format!("three voters ({why})"));
                }
            };
            let formed = form(&lab, &node, &switch, NODES, told).await?;
            task.step();
            one.push(formed.one.as_secs_f64());
            all.push(formed.all.as_secs_f64());
        }
        anyhow::Ok(())
    };
    until_interrupted(forms)?;
    task.done();
    records.add("cluster.one_node_seconds", "s", &one);
    records.add("cluster.three_voters_seconds", "s", &all);
    let ratios = ratio(&all, &one);
    records.add("cluster.three_voters_ratio_one_node", "ratio", &ratios);
    Ok(())
}
