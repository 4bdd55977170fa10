//! Power cuts of a whole cluster while its second machine registers, joins, and becomes a consensus member.
//!
//! Both disks are recorded. The first machine keeps all that it had written at the moment of the cut; of the second, the cut
//! decides ([`super::moments`] has why both are cut). Then both are booted: the second continues by what is on its disk, is
//! approved if it asks for that, and becomes HOME; and what had been said holds.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use hearth_api::console::{Milestone, Report};
use hearth_lab::Owner;
use hearth_lab::formation::shown_key;
use hearth_lab::owner::{key_file, recovery_key_file, secret_file};
use hearth_write_log::{Cut, Log, Pick};
use serde::{Deserialize, Serialize};

use super::left::Left;
use super::moments::{Clock, Moment};
use super::recording::digest_of;
use super::results::{After, Results};
use super::{NO_PARAMETERS, Part, Sweep, forget_logs, keep_logs};
use crate::node::copy;
use crate::owner::retry_unavailable;
use crate::{Cluster, Outcome, TestCtx, bounds};

const RECORD: &str = "recording.json";
const BASE: &str = "base.img";
const LOGS: [&str; 2] = ["first.log", "second.log"];

/// What was said about the second machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Statement {
    /// It waits for its approval: it has registered.
    Registered,
    /// It was approved.
    Approved,
    /// It is HOME.
    Home,
    /// It will be a consensus member.
    Wanted,
    /// It is one.
    Votes,
}

/// What is known of a recording besides its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    image: String,
    /// The IDs of both nodes.
    nodes: [String; 2],
    moments: Vec<Moment>,
    /// Each with the first moment after it.
    said: Vec<(Statement, usize)>,
}

/// A recording of two machines.
struct Recording {
    folder: PathBuf,
    record: Record,
    logs: [Log; 2],
    /// The last moment at which the second machine had been promised so much.
    last_moments: BTreeMap<usize, usize>,
}

impl Recording {
    fn find(folder: &Path) -> anyhow::Result<Option<Self>> {
        let path = folder.join(RECORD);
        if !path.exists() {
            return Ok(None);
        }
        let context = || format!("cannot read {}", path.display());
        let text = fs::read(&path).with_context(context)?;
        let record: Record = serde_json::from_slice(&text).with_context(context)?;
        let disk_bytes = fs::metadata(folder.join(BASE))?.len();
        let parse = |name| -> anyhow::Result<Log> {
            let log = fs::File::open(folder.join(name))?;
            Log::parse(&log, disk_bytes).with_context(|| folder.join(name).display().to_string())
        };
        let logs = [parse(LOGS[0])?, parse(LOGS[1])?];
        let moments = record.moments.iter().enumerate().map(|(index, moment)| {
            let entries = logs[1].entries_before(moment.second);
            (logs[1].promises_before(entries), index)
        });
        Ok(Some(Self {
            folder: folder.to_owned(),
            last_moments: moments.collect(),
            record,
            logs,
        }))
    }

    async fn make(test: &TestCtx, folder: &Path) -> anyhow::Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        let mut cluster = Cluster::founded_as(test, 2, |_, plan| Ok(plan.logged())).await?;
        let paths = cluster.nodes().iter().map(|member| member.node.log_path());
        let paths: Vec<PathBuf> = paths
            .map(|path| path.map(Path::to_owned))
            .collect::<anyhow::Result<_>>()?;
        let clock = Clock::start(&paths[0], &paths[1]);
        let mut said = Vec::new();
        cluster.register(&[2]).await?;
        cluster.node(2).vm()?.shows_its_key().await?;
        said.push((Statement::Registered, clock.count()));
        cluster.approve(2).await?;
        said.push((Statement::Approved, clock.count()));
        cluster.node(2).home().await?;
        said.push((Statement::Home, clock.count()));
        cluster.all_healthy().await?;
        cluster.set_consensus_member(2, true).await?;
        said.push((Statement::Wanted, clock.count()));
        cluster.voters_with(&[1, 2]).await?;
        said.push((Statement::Votes, clock.count()));
        cluster.all_healthy().await?;
        // Paused, QEMU completes what it has begun: the logs have no gaps.
        for number in [2, 1] {
            cluster.node(number).vm()?.pause().await?;
        }
        let moments = clock.stop()?;
        cluster.cut_all().await?;

        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let image = &test.artifacts().test;
        copy(&image.disk, &folder.join(BASE)).await?;
        for (from, name) in paths.iter().zip(LOGS) {
            fs::rename(from, folder.join(name)).context("cannot keep a log")?;
        }
        let founder = cluster.node(1).node.folder().to_owned();
        for file in [key_file, secret_file, recovery_key_file] {
            fs::rename(file(&founder), file(folder)).context("cannot keep the owner")?;
        }
        let record = Record {
            image: digest_of(image)?,
            nodes: [1, 2].map(|number| cluster.node(number).id().to_owned()),
            moments,
            said,
        };
        let members = cluster.nodes().iter();
        let folders: Vec<PathBuf> = members
            .map(|member| member.node.folder().to_owned())
            .collect();
        drop(cluster);
        // The machines that boot after the cuts have the same names.
        for machine in folders {
            fs::remove_dir_all(&machine)?;
        }
        let text = serde_json::to_string_pretty(&record)? + "\n";
        fs::write(folder.join(RECORD), text).context("cannot write what was recorded")?;
        Self::find(folder)?.context("the recording is not there")
    }

    /// The second machine's log at the moment of this cut, and the first's.
    fn at(&self, cut: Cut) -> anyhow::Result<[Log; 2]> {
        let moment = self.last_moments.get(&cut.after);
        let moment = moment.with_context(|| format!("cut {cut}: no moment was recorded for it"))?;
        let Moment { first, second } = self.record.moments[*moment];
        let until = |log: &Log, bytes| log.until(log.entries_before(bytes));
        Ok([until(&self.logs[0], first), until(&self.logs[1], second)])
    }

    /// The cuts of a sweep: at each moment after which the second machine was promised something.
    fn cuts(&self, choices: usize) -> anyhow::Result<Vec<Cut>> {
        let mut cuts = Vec::new();
        for &after in self.last_moments.keys() {
            let cut = |pick| Cut { after, pick };
            let [_, second] = self.at(cut(Pick::None))?;
            let of_moment = second.cuts(choices).into_iter();
            cuts.extend(of_moment.filter(|cut| cut.after == after));
        }
        Ok(cuts)
    }

    fn said_at(&self, cut: Cut) -> Vec<Statement> {
        let moment = self.last_moments.get(&cut.after).copied().unwrap_or(0);
        let said = self.record.said.iter().filter(|(_, from)| *from <= moment);
        said.map(|(statement, _)| *statement).collect()
    }
}

impl Sweep<'_> {
    pub(super) async fn join(&self) -> Outcome {
        let image = digest_of(&self.test.artifacts().test)?;
        let recording = match Recording::find(&self.folder)? {
            Some(found) if found.record.image == image || matches!(self.part, Part::One(_)) => {
                found
            }
            _ => Recording::make(self.test, &self.folder).await?,
        };
        let all = recording.cuts(self.choices)?;
        let mut results = Results::open(&self.folder, &image)?;
        let cuts = self.selected(&all);
        let left = self.left(&cuts, &results);
        let [first, second] = &recording.logs;
        eprintln!(
            "{} and {} entries, {} moments, {} cuts; {} are left",
            first.entries().len(),
            second.entries().len(),
            recording.record.moments.len(),
            all.len(),
            left.len()
        );
        if !left.is_empty() {
            self.boot_both(&recording, &left, &mut results).await?;
        }
        eprint!("{}", results.summary(&cuts)?);
        results.verify(&cuts)
    }

    async fn boot_both(
        &self,
        recording: &Recording,
        cuts: &[Cut],
        results: &mut Results,
    ) -> Outcome {
        let owner = Owner::load(&recording.folder)?;
        let base = recording.folder.join(BASE);
        let mut disks = Vec::new();
        for (name, number) in LOGS.iter().zip(1..) {
            let disk = self.test.folder().join(format!("left-{number}.img"));
            disks.push(Left::of(&base, &recording.folder.join(name), disk).await?);
        }
        let mut cluster = None;
        for &cut in cuts {
            let logs = recording.at(cut)?;
            let whole = Cut {
                after: logs[0].promise_count(),
                pick: Pick::All,
            };
            let mut inserted = Vec::new();
            for ((disk, log), cut) in disks.iter_mut().zip(&logs).zip([whole, cut]) {
                inserted.push(disk.by(log, cut).await?);
            }
            let cluster = match &mut cluster {
                Some(cluster) => cluster,
                none => {
                    let nodes = &recording.record.nodes;
                    let cluster = Cluster::recorded(self.test, nodes, &owner, inserted).await?;
                    inserted = vec![disks[0].overlay().await?, disks[1].overlay().await?];
                    none.insert(cluster)
                }
            };
            for member in cluster.nodes() {
                forget_logs(member.node.folder())?;
            }
            let begun = Instant::now();
            cluster.boot_from(inserted).await?;
            let result = comes_back(cluster, recording, cut).await;
            let seconds = begun.elapsed().as_secs_f64();
            let result = result.map_err(|error| format!("{error:#}"));
            cluster.cut_all().await?;
            if result.is_err() {
                for number in [1, 2] {
                    let member = cluster.node(number);
                    keep_logs(
                        member.node.folder(),
                        &self.folder_of(cut).join(member.name()),
                    )?;
                }
            }
            self.tell(cut, seconds, &result);
            results.add(cut, seconds, result)?;
        }
        Ok(())
    }
}

/// Checks that both machines come back, and that what was said before this cut holds.
async fn comes_back(
    cluster: &mut Cluster,
    recording: &Recording,
    cut: Cut,
) -> anyhow::Result<After> {
    let said = recording.said_at(cut);
    let has_said = |statement| said.contains(&statement);
    let own = &recording.record.nodes[1];
    cluster.node(2).identify(own.clone());
    let mut after = After::Continues;
    let mut step = next(cluster).await?;
    if let Step::Refused(why) = &step {
        let told = cluster.node(2).vm()?.tail();
        ensure!(
            why.starts_with(NO_PARAMETERS),
            "it refuses to continue: {why}\n{told}"
        );
        ensure!(
            said.is_empty(),
            "it knows nothing, and has said {said:?} before\n{told}"
        );
        cluster.node(2).cut().await?;
        log_in(cluster).await?;
        cluster.register(&[2]).await?;
        after = After::Begins;
        step = next(cluster).await?;
    }
    match step {
        Step::IsHome => {}
        Step::Waits(key) => {
            ensure!(!has_said(Statement::Home), "it was HOME, and registers");
            log_in(cluster).await?;
            // Also if it was approved: it may ask for that before it has heard so.
            let operator = cluster.owner().once();
            let approved = retry_unavailable(|| operator.approve(key.clone())).await;
            let id = approved.context("ApproveNode")?.id;
            ensure!(
                (id == *own) == (after == After::Continues),
                "it was {own}, and is {id}"
            );
            cluster.node(2).identify(id);
        }
        Step::Refused(why) => {
            let told = cluster.node(2).vm()?.tail();
            bail!("it refuses to register: {why}\n{told}");
        }
    }
    cluster.node(2).home().await?;
    cluster.all_healthy().await?;
    let nodes = cluster.owner().nodes().await?;
    ensure!(nodes.len() == 2, "expected two nodes, found {nodes:#?}");
    if has_said(Statement::Wanted) {
        cluster.voters_with(&[1, 2]).await?;
    }
    Ok(after)
}

/// Connects to the first machine, which was powered on with the second: it may not serve yet, and earlier connections are
/// to the machine before the cut.
async fn log_in(cluster: &mut Cluster) -> Outcome {
    cluster.node(1).serves().await?;
    cluster.log_in().await
}

/// What the second machine does first.
enum Step {
    IsHome,
    Waits(Vec<u8>),
    Refused(String),
}

async fn next(cluster: &mut Cluster) -> anyhow::Result<Step> {
    let mut step = None;
    let vm = cluster.node(2).vm()?;
    vm.wait_for_report("HOME, a key or a refusal", bounds::HOME, |report| {
        step = match report {
            Report::Reached(Milestone::Home, _) => Some(Step::IsHome),
            Report::Waiting(what) => shown_key(what).map(Step::Waits),
            Report::Refused(why) => Some(Step::Refused(why.clone())),
            _ => None,
        };
        step.is_some()
    })
    .await?;
    step.context("no report")
}
