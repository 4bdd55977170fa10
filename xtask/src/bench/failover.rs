//! Failover benchmark: from the loss of the controller that has the virtual address of the API servers until the API
//! answers there again, compared with the lifetime of the lease by which the address is held.

use anyhow::Result;
use hearth_api::names;
use hearth_api::v1::StorageSecurityPolicy;
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::measure::cluster::Plan;
use hearth_lab::measure::failover::{self, Failover};
use hearth_lab::measure::{Lab, Way};
use hearth_lab::owner::with_storage;
use hearth_qemu::accel;
use hearth_qemu::command::OnReset;

use super::{Records, until_interrupted};
use crate::image::{self, Flavour};
use crate::run::kubectl;
use crate::setup::{self, Needs};
use crate::ui::Ui;
use crate::{bundle, hearthctl, program, target};

/// Number of nodes: two may be lost only if a third votes.
const NODES: u16 = 3;
/// A controller without pods.
const MEMORY: u32 = 1536;

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
    let node = image::to_boot(&image::ensure_extended(ui, Flavour::Release, &extension)?);
    let switch = program::switch(ui)?;
    let folder = target::folder("bench")?.join("failover");
    let mut configuration = with_storage(StorageSecurityPolicy::NeedsInsecure);
    let kubernetes = configuration.kubernetes.get_or_insert_default();
    kubernetes.api_address = failover::api_address().to_string();
    let failover = Failover {
        hearthctl: Hearthctl {
            program: hearthctl::build(ui)?,
            config: folder.join("hearthctl.json"),
        },
        kubectl: kubectl(&bundle)?,
        plan: Plan {
            lab: Lab {
                accel: accel::choose(accel)?.accel,
                folder,
            },
            node: &node,
            way: Way::Direct,
            memory_mib: MEMORY,
            has_tpm: false,
            on_reset: OnReset::Exit,
            switch: &switch,
            nodes: NODES,
            configuration,
        },
    };
    let rounds = rounds.unwrap_or(1);
    let task = ui.counted_task("measuring failover", u64::from(rounds));
    let (mut moved, mut answered) = (Vec::new(), Vec::new());
    until_interrupted(async {
        for _ in 0..rounds {
            let round = failover.run(&|what| task.now(what)).await?;
            moved.push(round.moved);
            answered.push(round.answered);
            task.step();
        }
        anyhow::Ok(())
    })?;
    task.done();
    records.add("kubernetes.failover_moved_seconds", "s", &moved);
    records.add("kubernetes.failover_answered_seconds", "s", &answered);
    let lease = names::API_ADDRESS_LEASE.as_secs_f64();
    let ratios: Vec<f64> = answered.iter().map(|seconds| seconds / lease).collect();
    records.add("kubernetes.failover_ratio_lease", "ratio", &ratios);
    Ok(())
}
