//! Power cuts at each flush of a recorded boot, with any of the writes after it.
//!
//! Failpoints ([`mod@crate::cuts`]) are where somebody expected that a cut could matter. Here a machine is recorded
//! ([`recording`]) whose disk is behind QEMU's `blklogwrites`; `hearth_write_log` says which disks a cut may leave; each is
//! booted, and what had been said to the outside before the cut must still hold ([`said`]).
//!
//! After a cut the node is booted without parameters first: it must continue by what is on its disk and become HOME as the
//! same node. Only where nothing had been said yet may it refuse that for want of parameters; it then has to found a
//! cluster with them. No other refusal is right after a power cut, and none of them is accepted.
//!
//! A machine of a sweep writes to an overlay, and two run at once. A sample has its recording in the test's folder; a whole
//! sweep has a folder of its own, in which the recording and the results are kept ([`results`]): it goes on where it was
//! interrupted, and a cut that failed can be repeated.

mod joining;
mod left;
mod moments;
mod recording;
mod results;
mod said;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, anyhow, bail, ensure};
use futures::future::try_join_all;
use hearth_api::console::{Milestone, Report};
use hearth_api::v1::{Node, StorageSecurityPolicy};
use hearth_lab::formation::is_well;
use hearth_lab::owner::with_storage;
pub use hearth_lab::power_cuts::Scenario;
use hearth_lab::power_cuts::{CHOICES, CUT, DEFAULT_CHOICES, FOLDER, SHARD};
use hearth_lab::shard::Shard;
use hearth_write_log::Cut;

use crate::node::{self, Running};
use crate::owner::Operator;
use crate::{Outcome, TestCtx, bounds};
use left::Left;
use recording::Recording;
use results::{After, Results};
use said::Statement;

/// Machines of a whole sweep that run at once.
const AT_ONCE: usize = 2;
/// Cuts of a sample.
const SAMPLE: usize = 5;
/// What a node says that knows nothing.
const NO_PARAMETERS: &str = "no parameters";

/// A sweep.
#[derive(Debug)]
pub struct Sweep<'a> {
    test: &'a TestCtx,
    scenario: Scenario,
    folder: PathBuf,
    at_once: usize,
    choices: usize,
    part: Part,
}

/// The cuts that are tried.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// A few of all.
    Sample,
    /// A part of all.
    Shard(Shard),
    /// One.
    One(Cut),
}

impl<'a> Sweep<'a> {
    /// A few cuts of a recording that is not kept.
    pub fn sample(test: &'a TestCtx, scenario: Scenario) -> Self {
        Self {
            test,
            scenario,
            folder: test.folder().join("recording"),
            at_once: 1,
            choices: DEFAULT_CHOICES,
            part: Part::Sample,
        }
    }

    /// All cuts, in a folder that is kept.
    pub fn whole(test: &'a TestCtx, scenario: Scenario) -> Self {
        let folder = test.artifacts().logs.with_file_name("power-cuts");
        Self {
            folder: folder.join(scenario.word()),
            at_once: AT_ONCE,
            part: Part::Shard(Shard::ALL),
            ..Self::sample(test, scenario)
        }
    }

    /// What `cargo xtask power-cuts` asks for, if it does.
    ///
    /// # Errors
    /// If it asks for something that does not exist.
    pub fn asked_for(test: &'a TestCtx, scenario: Scenario) -> anyhow::Result<Option<Self>> {
        let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else {
            return Ok(None);
        };
        let variable = |name| env::var(name).ok();
        let shard = variable(SHARD).map(|text| text.parse().context(SHARD));
        let cut = variable(CUT).map(|text| text.parse().context(CUT));
        let choices = variable(CHOICES).map(|text| text.parse().context(CHOICES));
        Ok(Some(Self {
            folder,
            choices: choices.transpose()?.unwrap_or(DEFAULT_CHOICES),
            part: match cut.transpose()? {
                Some(cut) => Part::One(cut),
                None => Part::Shard(shard.transpose()?.unwrap_or(Shard::ALL)),
            },
            ..Self::whole(test, scenario)
        }))
    }

    /// Runs it.
    ///
    /// # Errors
    /// If a cut is not survived, or something that was said is lost.
    pub async fn run(&self) -> Outcome {
        match self.scenario {
            Scenario::FirstBootstrap => self.first_bootstrap().await,
            Scenario::Join => self.join().await,
        }
    }

    async fn first_bootstrap(&self) -> Outcome {
        self.test.place()?;
        let image = recording::digest_of(&self.test.artifacts().test)?;
        let recording = match Recording::find(&self.folder)? {
            Some(found) if found.is_of(&image) || matches!(self.part, Part::One(_)) => found,
            _ => Recording::of_first_bootstrap(self.test, &self.folder).await?,
        };
        let log = &recording.log;
        let all = log.cuts(self.choices);
        let cuts = self.selected(&all);
        let mut results = Results::open(&self.folder, &image)?;
        let left = self.left(&cuts, &results);
        eprintln!(
            "{} entries, {} flushes, {} cuts; {} are left",
            log.entries().len(),
            log.promise_count(),
            all.len(),
            left.len()
        );
        let found = Mutex::new(&mut results);
        let machines = (0..self.at_once).map(|number| {
            let own: Vec<Cut> = left
                .iter()
                .copied()
                .skip(number)
                .step_by(self.at_once)
                .collect();
            self.machine(number + 1, &recording, own, &found)
        });
        try_join_all(machines).await?;
        eprint!("{}", results.summary(&cuts)?);
        results.verify(&cuts)
    }

    /// Checks that a loss would be found: boots from a cut before the owner had changed anything, as if that had been said.
    ///
    /// # Errors
    /// If it is not found, or the sweep has no recording of a first bootstrap.
    pub async fn finds_a_loss(&self) -> Outcome {
        let recording = Recording::find(&self.folder)?.context("nothing was recorded")?;
        let all = recording.log.cuts(0);
        let last = all.last().context("no cut")?;
        let said = recording.said_at(*last);
        let is_owned = |said: &Statement| matches!(said, Statement::Owned { .. });
        let mut cuts = all.iter();
        let cut = cuts.rfind(|cut| !recording.said_at(**cut).iter().any(is_owned));
        let cut = *cut.context("the owner was there from the beginning")?;
        let (mut node, mut left) = self.after("loss", &recording).await?;
        node.insert(left.by(&recording.log, cut).await?);
        match boots(&mut node, recording.node(), &said).await {
            Err(error) if format!("{error:#}").contains(said::LOST) => Ok(()),
            other => bail!("cut {cut}, as if all had been said: expected a loss, found {other:?}"),
        }
    }

    /// Boots from what each of these cuts leaves.
    async fn machine(
        &self,
        number: usize,
        recording: &Recording,
        cuts: Vec<Cut>,
        results: &Mutex<&mut Results>,
    ) -> Outcome {
        if cuts.is_empty() {
            return Ok(());
        }
        let (mut node, mut left) = self.after(&format!("after-{number}"), recording).await?;
        let folder = node.folder().to_owned();
        for cut in cuts {
            forget_logs(&folder)?;
            node.insert(left.by(&recording.log, cut).await?);
            let begun = Instant::now();
            let said = recording.said_at(cut);
            let result = boots(&mut node, recording.node(), &said).await;
            let seconds = begun.elapsed().as_secs_f64();
            let result = result.map_err(|error| format!("{error:#}"));
            if result.is_err() {
                keep_logs(&folder, &self.folder_of(cut))?;
            }
            self.tell(cut, seconds, &result);
            let mut results = results
                .lock()
                .map_err(|_| anyhow!("another machine has panicked"))?;
            results.add(cut, seconds, result)?;
        }
        Ok(())
    }

    /// A machine for the disks that cuts leave.
    async fn after(&self, name: &str, recording: &Recording) -> anyhow::Result<(node::Node, Left)> {
        let mut node = self.test.node(name).install().await?;
        node.owner = recording.owner()?;
        let disk = node.folder().join("left.img");
        let left = Left::of(&recording.base(), &recording.log_path(), disk).await?;
        Ok((node, left))
    }

    fn selected(&self, all: &[Cut]) -> Vec<Cut> {
        match self.part {
            Part::Sample => spread(all, SAMPLE),
            Part::Shard(shard) => shard.select(all),
            Part::One(cut) => vec![cut],
        }
    }

    /// Those of the cuts that have not passed yet. One that was asked for is always tried.
    fn left(&self, cuts: &[Cut], results: &Results) -> Vec<Cut> {
        let is_left = |cut: &&Cut| matches!(self.part, Part::One(_)) || !results.has_passed(**cut);
        cuts.iter().filter(is_left).copied().collect()
    }

    /// The folder for the logs of a cut that failed.
    fn folder_of(&self, cut: Cut) -> PathBuf {
        self.folder.join("failed").join(cut.to_string())
    }

    /// Prints a result, with the command that repeats it if the cut failed.
    fn tell(&self, cut: Cut, seconds: f64, result: &Result<After, String>) {
        let name = cut.to_string();
        match result {
            Ok(After::Continues) => eprintln!("{name:<14}{seconds:>6.1} s  continues"),
            Ok(_) => eprintln!("{name:<14}{seconds:>6.1} s  starts a new enrolment"),
            Err(why) => eprintln!(
                "{name:<14}{seconds:>6.1} s  FAILED: {why}\nrepeat: cargo xtask power-cuts {} --cut {cut} --folder {}",
                self.scenario,
                self.folder.display()
            ),
        }
    }
}

/// Boots the node with this ID and checks that what was said holds.
async fn boots(node: &mut node::Node, id: &str, said: &[Statement]) -> anyhow::Result<After> {
    node.parameters = None;
    let vm = node.power_on().await?;
    let refusal = home_or_refusal(&vm).await?;
    let Some(why) = refusal else {
        holds(&vm, said, Some(id)).await?;
        return Ok(After::Continues);
    };
    ensure!(
        why.starts_with(NO_PARAMETERS),
        "the node refuses to continue: {why}\n{}",
        vm.tail()
    );
    ensure!(
        said.is_empty(),
        "the node knows nothing, and has said {said:?} before\n{}",
        vm.tail()
    );
    vm.cut().await?;
    let owner = &node.owner;
    let policy = StorageSecurityPolicy::NeedsInsecure;
    let parameters = owner.parameters(with_storage(policy));
    node.tell(&parameters);
    let vm = node.power_on().await?;
    if let Some(why) = home_or_refusal(&vm).await? {
        bail!("the node refuses to begin: {why}\n{}", vm.tail());
    }
    holds(&vm, said, None).await?;
    Ok(After::Begins)
}

/// Waits until the node is HOME, or refuses its parameters or its disk; returns why.
async fn home_or_refusal(vm: &Running) -> anyhow::Result<Option<String>> {
    let mut refusal = None;
    vm.wait_for_report("HOME or a refusal", bounds::HOME, |report| match report {
        Report::Reached(Milestone::Home, _) => true,
        Report::Refused(why) => {
            refusal = Some(why.clone());
            true
        }
        _ => false,
    })
    .await?;
    Ok(refusal)
}

/// Checks that the cluster of this node is well, and that what was said holds.
async fn holds(vm: &Running, said: &[Statement], node: Option<&str>) -> Outcome {
    let check = async {
        let owner = vm.owned().await?;
        let listed = one_healthy_node(&owner).await?;
        if let Some(node) = node {
            ensure!(listed.id == node, "expected node {node}, got {}", listed.id);
        }
        said::hold(said, &owner, &listed.id).await
    };
    check.await.with_context(|| vm.tail().to_string())
}

/// Waits until the only node is healthy and HOME. Repeated where a call fails: on a busy host a curator may lose etcd for a
/// moment.
async fn one_healthy_node(owner: &Operator) -> anyhow::Result<Node> {
    let mut last = None;
    let look = async {
        loop {
            match owner.once().nodes().await {
                Ok(nodes) if nodes.len() == 1 && is_well(&nodes[0]) => return nodes,
                other => last = Some(other),
            }
            tokio::time::sleep(bounds::LOOK_AGAIN).await;
        }
    };
    let nodes = tokio::time::timeout(bounds::SETTLED, look).await;
    let nodes = nodes.map_err(|_| anyhow!("no healthy node: {last:?}"))?;
    nodes.into_iter().next().context("no node")
}

/// This many of a list, evenly spread, with the first and the last.
fn spread<T: Copy>(all: &[T], count: usize) -> Vec<T> {
    let Some(last) = all.len().checked_sub(1) else {
        return Vec::new();
    };
    let gaps = (count.min(all.len()) - 1).max(1);
    let mut places: Vec<usize> = (0..=gaps).map(|number| number * last / gaps).collect();
    places.dedup();
    places.into_iter().map(|place| all[place]).collect()
}

/// Keeps the logs of a boot that has failed.
fn keep_logs(machine: &Path, to: &Path) -> Outcome {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(machine)? {
        let path = entry?.path();
        if let Some(name) = path.file_name().filter(|_| is_log(&path)) {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// Removes the logs of the boots after the previous cut.
fn forget_logs(machine: &Path) -> Outcome {
    for entry in fs::read_dir(machine)? {
        let path = entry?.path();
        if is_log(&path) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn is_log(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "log")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_spread_over_all() {
        let all: Vec<usize> = (0..100).collect();
        assert_eq!(spread(&all, 4), [0, 33, 66, 99]);
        assert_eq!(spread(&all[..3], 7), [0, 1, 2]);
        assert_eq!(spread(&all[..1], 7), [0]);
        assert_eq!(spread(&all[..0], 7), [0; 0]);
        assert_eq!(spread(&all, 1).len(), 2);
    }
}
