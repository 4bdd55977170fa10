//! Cluster benchmark: from the start of the first machine to three voters, compared with one node.
//!
//! One round forms one cluster, like `cargo xtask run --nodes 3`: the first node founds it, then the other two boot
//! together, are approved by the keys on their consoles, and are made consensus members. When the first node's owner
//! has got the answer to GetNodes, one node is HOME; the whole is compared with that time, from the same round and on
//! the same machine.

use anyhow::Result;
use hearth_api::v1::StorageSecurityPolicy;
use hearth_lab::measure::cluster::{Plan, Progress};
use hearth_lab::measure::{Lab, MEMORY, Way};
use hearth_lab::owner::with_storage;
use hearth_qemu::accel;
use hearth_qemu::command::OnReset;

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
    let (node, switch) = (image::to_boot(node), program::switch(ui)?);
    let plan = Plan {
        lab: Lab {
            accel: accel::choose(accel)?.accel,
            folder: target::folder("bench")?.join("cluster"),
        },
        node: &node,
        way: Way::Direct,
        memory_mib: MEMORY,
        has_tpm: false,
        // A kernel that panics must not reboot before the timeout.
        on_reset: OnReset::Exit,
        switch: &switch,
        nodes: NODES,
        configuration: with_storage(StorageSecurityPolicy::NeedsInsecure),
    };
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
            let formed = plan.form(told).await?;
            task.step();
            one.push(formed.one.as_secs_f64());
            all.push(formed.all.as_secs_f64());
            plan.end(formed.cluster)?;
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
