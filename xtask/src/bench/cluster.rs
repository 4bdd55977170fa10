//! Cluster: from the start of the first machine to three voters, beside one node.
//!
//! One round forms one cluster, as `cargo xtask run --nodes 3` does it: the first node founds it, then the other two boot at
//! once, are approved by the keys on their consoles, and are made consensus members. On the way, when the first node's
//! owner has been answered GetNodes, one node has come HOME: that is what the whole is held against, in the same round
//! and on the same machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hearth_api::client::Endpoint;
use hearth_api::console::{Milestone, Report};
use hearth_api::names;
use hearth_qemu::accel::{self, Accel};
use hearth_qemu::cluster::{Cluster, Member, NetworkSpec, Place};
use hearth_qemu::command::{Boot, Machine, OnReset};
use hearth_qemu::disk::Cache;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::switch::NetworkOptions;
use hearth_qemu::vm::Lifetime;
use prost::Message;
use tokio::task::JoinSet;

use super::boot::machines::{CPUS, MEMORY};
use super::boot::owner::Owner;
use super::{Records, ratio, remove, until_interrupted};
use crate::formation::{Candidate, look_once, shown_key};
use crate::image::Artifacts;
use crate::operator::Operator;
use crate::program;
use crate::setup::{self, Needs};
use crate::target;
use crate::ui::{Task, Ui};

/// How many nodes, all of them voters.
const NODES: u16 = 3;
/// For a whole formation; it takes less than a minute.
const BOUND: Duration = Duration::from_secs(600);
/// Between two looks at the cluster.
const PAUSE: Duration = Duration::from_millis(200);

/// What a formation took, in seconds.
struct Times {
    one: f64,
    all: f64,
}

/// Forms clusters.
struct Forming {
    node: Artifacts,
    switch: PathBuf,
    accel: Accel,
    folder: PathBuf,
}

/// Measures.
pub fn measure(
    ui: &Ui,
    node: &Artifacts,
    rounds: Option<u32>,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::RUN)?;
    let accel = accel::choose(accel)?;
    let forming = Forming {
        node: node.clone(),
        switch: program::switch(ui)?,
        accel: accel.accel,
        folder: target::folder("bench")?.join("cluster"),
    };
    let rounds = rounds.unwrap_or(3);
    let task = ui.counted_task("measuring clusters", u64::from(rounds) * 2);
    let (mut one, mut all) = (Vec::new(), Vec::new());
    let forms = async {
        for _ in 0..rounds {
            let times = tokio::time::timeout(BOUND, forming.form(&task)).await;
            let times = times.with_context(|| format!("no cluster within {BOUND:?}"))??;
            one.push(times.one);
            all.push(times.all);
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

impl Forming {
    async fn form(&self, task: &Task) -> Result<Times> {
        remove(&self.folder)?;
        let network = self.network();
        let cluster = Cluster::open(&self.folder, Some(&network), Lifetime::Tied);
        let mut cluster = cluster.await?;
        let owner = Owner::new();
        task.now("one node");
        cluster.add(&self.member(1, owner.parameters())?).await?;
        let vm = &cluster.machines()[0];
        let started = vm.started();
        vm.reached(Milestone::Home, BOUND).await?;
        let forwarded = |number| cluster.forwarded(&name(number), names::PORT_CURATOR);
        let curators: Vec<Endpoint> = (1..=NODES)
            .filter_map(forwarded)
            .map(Endpoint::from)
            .collect();
        let operator = Operator::take_ownership(&owner.key, &owner.secret, &curators).await?;
        operator.nodes().await?;
        let one = started.elapsed().as_secs_f64();
        task.step();

        task.now("three voters");
        // The node has just come, and prepares for company when it is first asked for a ticket.
        let register = loop {
            match operator.register_parameters().await {
                Ok(parameters) => break parameters.encode_to_vec(),
                Err(error) => task.now(format!("three voters ({error:#})")),
            }
            tokio::time::sleep(PAUSE).await;
        };
        for number in 2..=NODES {
            cluster.add(&self.member(number, register.clone())?).await?;
        }
        complete(&cluster, &operator).await?;
        let all = started.elapsed().as_secs_f64();
        task.step();
        drop(cluster);
        for number in 1..=NODES {
            // The logs stay.
            remove_file(&self.folder.join(name(number)).join("disk.qcow2"))?;
        }
        Ok(Times { one, all })
    }

    fn network(&self) -> NetworkSpec {
        let place = |number| Place {
            machine: name(number),
            number,
            forwards: vec![names::PORT_CURATOR],
        };
        NetworkSpec {
            switch: self.switch.clone(),
            options: NetworkOptions::default(),
            places: (1..=NODES).map(place).collect(),
        }
    }

    fn member(&self, number: u16, parameters: Vec<u8>) -> Result<Member> {
        let machine = Machine {
            cpus: CPUS,
            memory_mib: MEMORY,
            boot: Boot::Direct {
                kernel: self.node.kernel.clone(),
                initrd: Some(self.node.initramfs.clone()),
                append: self.node.cmdline.clone(),
            },
            fw_cfg: vec![Item::bytes(names::FW_CFG_PARAMETERS, parameters)?],
            // A kernel that panics must not boot again until the time is up.
            on_reset: OnReset::Exit,
            ..Machine::new(name(number), self.accel)
        };
        Ok(Member {
            machine,
            image: self.node.image.clone(),
            disk_bytes: Some(4 << 30),
            cache: Cache::Writeback,
        })
    }
}

fn name(number: u16) -> String {
    format!("node-{number}")
}

/// Until nothing is missing: looks at the cluster, and does what that calls for.
async fn complete(cluster: &Cluster, operator: &Operator) -> Result<()> {
    let mut candidates = Vec::new();
    let mut keys = JoinSet::new();
    for (index, vm) in cluster.machines().iter().enumerate() {
        let address = cluster.address(vm.name());
        candidates.push(Candidate {
            machine: vm.name().to_owned(),
            address: address.context("a machine without an address")?,
            public_key: None,
            id: None,
            approve: true,
            votes: true,
        });
        let mut reports = vm.console().reports();
        keys.spawn(async move {
            while let Some(reported) = reports.next().await {
                if let Report::Waiting(why) = &reported.report
                    && let Some(key) = shown_key(why)
                {
                    return Some((index, key));
                }
            }
            None
        });
    }
    loop {
        while let Some(key) = keys.try_join_next() {
            if let Some((index, key)) = key? {
                candidates[index].public_key = Some(key);
            }
        }
        for vm in cluster.machines() {
            if let Some(exit) = vm.exit() {
                bail!("{} ended: {exit}\n{}", vm.name(), vm.tail());
            }
        }
        // A curator that restarts its etcd answers again soon.
        if let Ok(look) = look_once(operator, &candidates).await
            && look.plan.missing.is_empty()
        {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
}
