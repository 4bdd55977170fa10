//! The commands at the beginning of the README, as a developer types them:
//! `cargo xtask run`, `stop`, `power` and `link`.
//!
//! Each test has a folder of its own for the state, so that the developer's own cluster is not touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hearth_lab::hearthctl::Node;
use hearth_qemu::cluster;
use hearth_tests::{Outcome, TestCtx, bounds, here};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

/// The environment variable with the state folder of `cargo xtask run`.
const FOLDER: &str = "HEARTH_RUN_FOLDER";
/// Between two checks of a file.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Exit code after an interrupt, as in shells.
const INTERRUPTED: i32 = 130;
/// Exit code of hearthctl if too few nodes can be reached.
const TOO_FEW: i32 = 3;

/// A developer, with a folder for the state of a run. Machines that are left running are ended with it.
struct Developer {
    xtask: PathBuf,
    folder: PathBuf,
    accel: &'static str,
}

/// The result of a command.
#[derive(Debug)]
struct Ended {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl Developer {
    fn of(test: &TestCtx) -> Self {
        Self {
            xtask: test.artifacts().xtask.clone(),
            folder: test.folder().join("run"),
            accel: match test.accel() {
                hearth_qemu::accel::Accel::Kvm => "kvm",
                hearth_qemu::accel::Accel::Tcg => "tcg",
            },
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.xtask);
        command
            .args(words)
            .env(FOLDER, &self.folder)
            // By this variable cargo names the package that it runs.
            .env_remove("CARGO_MANIFEST_DIR")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        command
    }

    async fn types(&self, words: &[&str]) -> anyhow::Result<Ended> {
        let output = self.command(words).output();
        let output = tokio::time::timeout(bounds::FORMED, output).await;
        let output = output.with_context(|| format!("{words:?} does not end"))??;
        Ok(Ended {
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs a command that succeeds; returns its output.
    async fn does(&self, words: &[&str]) -> anyhow::Result<Ended> {
        let ended = self.types(words).await?;
        ensure!(ended.status.success(), "{words:?}: {ended:#?}");
        Ok(ended)
    }

    /// A command succeeds, with this line for its user.
    async fn is_told(&self, words: &[&str], line: &str) -> Outcome {
        let ended = self.does(words).await?;
        ensure!(ended.stderr.contains(line), "{words:?}: {ended:#?}");
        Ok(())
    }

    /// A command fails, with this reason.
    async fn is_refused(&self, words: &[&str], why: &str) -> Outcome {
        let ended = self.types(words).await?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains(why),
            "{words:?}: {ended:#?}"
        );
        Ok(())
    }

    /// The words of a run as tests need it, and further ones.
    fn run<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        let usual = ["run", "--direct", "--offline", "--accel", self.accel];
        [&usual, words].concat()
    }

    /// Starts a run in the foreground.
    fn runs(&self, words: &[&str]) -> anyhow::Result<Child> {
        let words = self.run(words);
        let child = self.command(&words).spawn();
        child.with_context(|| format!("start {words:?}"))
    }

    fn console(&self, machine: &str) -> PathBuf {
        self.folder.join(machine).join("serial.log")
    }

    /// Waits until a machine's console has this line.
    async fn console_says(&self, machine: &str, line: &str) -> Outcome {
        let path = self.console(machine);
        let look = async {
            while !fs::read_to_string(&path).is_ok_and(|text| text.contains(line)) {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let said = tokio::time::timeout(bounds::HOME, look).await;
        said.with_context(|| format!("no line {line:?} on the console of {machine}"))
    }

    /// `cluster unlock` with the owner's keys in the state folder, repeated until enough machines have booted for a quorum;
    /// its last result.
    async fn unlocks(&self) -> anyhow::Result<Value> {
        let file = |name: &str| self.folder.join(name).display().to_string();
        let (owner, recovery) = (file("owner-key.pem"), file("recovery-key"));
        let words = [
            &["ctl", "--", "cluster", "unlock", "-o", "json"][..],
            &["--owner-key", &owner, "--recovery-key", &recovery],
        ];
        let words = words.concat();
        let unlock = async {
            loop {
                let ended = self.types(&words).await?;
                if ended.status.code() != Some(TOO_FEW) {
                    return anyhow::Ok(ended);
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let ended = tokio::time::timeout(bounds::SETTLED, unlock).await;
        let ended = ended.context("no quorum was found")??;
        ensure!(ended.status.success(), "{ended:#?}");
        serde_json::from_str(&ended.stdout).with_context(|| format!("{ended:#?}"))
    }

    /// Waits until etcd has this many members, all of them voters that have started.
    async fn has_voters(&self, count: usize) -> Outcome {
        let members = async {
            loop {
                let listed = self
                    .types(&["ctl", "--", "etcd", "members", "-o", "json"])
                    .await?;
                let listed: Value = serde_json::from_str(&listed.stdout).unwrap_or_default();
                let members = listed["members"].as_array().cloned().unwrap_or_default();
                let votes = |m: &Value| m["learner"] == false && m["started"] == true;
                if members.len() == count && members.iter().all(votes) {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let settled = tokio::time::timeout(bounds::SETTLED, members).await;
        settled.with_context(|| format!("not {count} voters"))?
    }

    /// Waits until all nodes of the cluster are healthy.
    async fn has_healthy_nodes(&self, count: usize) -> Outcome {
        let nodes = async {
            loop {
                let listed = self
                    .types(&["ctl", "--", "node", "list", "-o", "json"])
                    .await?;
                let nodes = Node::list(&listed.stdout).unwrap_or_default();
                if nodes.len() == count && nodes.iter().all(Node::is_well) {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let settled = tokio::time::timeout(bounds::SETTLED, nodes).await;
        settled.with_context(|| format!("not {count} healthy nodes"))?
    }

    fn running(&self) -> anyhow::Result<Vec<String>> {
        let running = cluster::running(&self.folder)?.into_iter();
        Ok(running.map(|machine| machine.name).collect())
    }

    /// Nothing of the cluster is running, according to its own records and to the kernel: no QEMU, no switch.
    async fn has_nothing_left(&self) -> Outcome {
        let running = self.running()?;
        ensure!(running.is_empty(), "still running: {running:?}");
        ensure!(
            cluster::network(&self.folder).await?.is_none(),
            "the network is still running"
        );
        for entry in fs::read_dir("/proc")? {
            let process = entry?.path();
            if belongs_to(&process, &self.folder) {
                let line = fs::read(process.join("cmdline")).unwrap_or_default();
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                bail!("{} is still running: {line}", process.display());
            }
        }
        Ok(())
    }
}

/// Whether a process works in this folder, or has it on its command line.
fn belongs_to(process: &Path, folder: &Path) -> bool {
    let works_there = fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
    let line = fs::read(process.join("cmdline")).unwrap_or_default();
    works_there || String::from_utf8_lossy(&line).contains(&*folder.to_string_lossy())
}

impl Drop for Developer {
    /// A failed test leaves no machine running.
    fn drop(&mut self) {
        let _ = std::process::Command::new(&self.xtask)
            .args(["stop", "--force"])
            .env(FOLDER, &self.folder)
            .env_remove("CARGO_MANIFEST_DIR")
            .stderr(Stdio::null())
            .status();
    }
}

/// The output of a run until this line.
async fn prints(run: &mut Child, last: &str) -> anyhow::Result<String> {
    read_until(run.stdout.as_mut().context("no output")?, last).await
}

/// The messages of a run until this line.
async fn says(run: &mut Child, last: &str) -> anyhow::Result<String> {
    read_until(run.stderr.as_mut().context("no messages")?, last).await
}

async fn read_until(from: impl AsyncRead + Unpin, last: &str) -> anyhow::Result<String> {
    let mut lines = BufReader::new(from).lines();
    let mut text = String::new();
    let read = async {
        while let Some(line) = lines.next_line().await? {
            text.push_str(&line);
            text.push('\n');
            if line.contains(last) {
                return Ok(());
            }
        }
        bail!("it has ended")
    };
    let read = tokio::time::timeout(bounds::FORMED, read).await;
    let read = read.unwrap_or_else(|_| bail!("timed out"));
    read.with_context(|| format!("{last:?} after {text}"))?;
    Ok(text)
}

/// Ctrl-C, and its effect.
async fn interrupted(mut run: Child) -> anyhow::Result<(Option<i32>, String)> {
    let id = run
        .id()
        .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    kill_process(id.context("it has ended")?, Signal::INT)?;
    let status = tokio::time::timeout(bounds::POWER_OFF, run.wait()).await;
    let status = status.context("it does not end")??;
    let mut said = String::new();
    if let Some(mut stderr) = run.stderr.take() {
        stderr.read_to_string(&mut said).await?;
    }
    Ok((status.code(), said))
}

/// Two nodes that are left running; one of them loses its power, its network link, and gets both back. Then everything
/// is stopped.
#[tokio::test]
async fn a_cluster_in_the_background_is_cut_mended_and_stopped() -> Outcome {
    let test = TestCtx::begin(here!())?;
    test.place()?;
    let developer = Developer::of(&test);
    developer
        .is_refused(&["power", "cut", "2"], "no cluster exists")
        .await?;
    developer.is_told(&["stop"], "nothing is running").await?;

    let run = developer.run(&["--detach", "--storage", "insecure", "--nodes", "2"]);
    let told = developer.does(&run).await?;
    for machine in ["node-1 is HOME", "node-2 is HOME"] {
        ensure!(told.stdout.contains(machine), "{told:#?}");
    }
    ensure!(developer.running()? == ["node-1", "node-2"]);
    let listed = developer
        .does(&["ctl", "--", "node", "list", "-o", "json"])
        .await?;
    let nodes = Node::list(&listed.stdout)?;
    ensure!(
        nodes.len() == 2 && nodes.iter().all(Node::is_well),
        "{nodes:?}"
    );
    developer
        .is_refused(&["run", "--direct"], "is already running")
        .await?;

    developer
        .is_told(&["link", "cut", "node-2"], "link of node-2: cut")
        .await?;
    developer
        .is_told(&["link", "restore", "2"], "link of node-2: no faults")
        .await?;
    developer
        .is_refused(&["link", "cut", "node-3"], "node-1 to node-2")
        .await?;

    developer
        .is_told(&["power", "cut", "node-2"], "node-2 is off: power cut")
        .await?;
    ensure!(developer.running()? == ["node-1"]);
    developer
        .is_refused(&["power", "cut", "2"], "node-2 is not running")
        .await?;
    developer
        .is_told(&["power", "start", "node-2"], "node-2 is on")
        .await?;
    developer
        .is_refused(&["power", "start", "2"], "node-2 is already running")
        .await?;
    developer
        .console_says("node-2", "hearth: state HOME")
        .await?;

    let stopped = developer.does(&["stop"]).await?;
    for machine in ["node-1 is down", "node-2 is down"] {
        ensure!(stopped.stderr.contains(machine), "{stopped:#?}");
    }
    developer.has_nothing_left().await?;
    developer.is_told(&["stop"], "nothing is running").await?;
    test.passed()
}

/// One node in the foreground: Ctrl-C powers it off, once it is HOME and before.
#[tokio::test]
async fn a_run_in_the_foreground_ends_with_an_interrupt() -> Outcome {
    let test = TestCtx::begin(here!())?;
    test.place()?;
    let developer = Developer::of(&test);
    let mut run = developer.runs(&["--storage", "insecure"])?;
    let text = prints(&mut run, "Ctrl-C").await?;
    ensure!(text.contains("node-1 is HOME"), "{text}");
    ensure!(developer.running()? == ["node-1"]);
    let (code, said) = interrupted(run).await?;
    ensure!(
        code == Some(0) && said.contains("node-1 is down"),
        "{code:?}: {said}"
    );
    developer.has_nothing_left().await?;

    // The same cluster again, interrupted early. The console log of the first run is removed, because it already has
    // the line.
    fs::remove_file(developer.console("node-1"))?;
    let run = developer.runs(&[])?;
    developer
        .console_says("node-1", "hearth: reached kernel")
        .await?;
    let (code, said) = interrupted(run).await?;
    ensure!(
        code == Some(INTERRUPTED) && said.contains("the last run's cluster"),
        "{code:?}: {said}"
    );
    developer.has_nothing_left().await?;
    test.passed()
}

/// Three encrypted nodes, as `run` makes them by default. Each time they have lost their power together, the owner
/// unlocks as many as a quorum needs: by the next run itself, by a command beside it, and while one of them is running.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn an_encrypted_cluster_that_was_off_is_unlocked() -> Outcome {
    let test = TestCtx::begin(here!())?;
    test.place()?;
    let developer = Developer::of(&test);
    let run = developer.run(&["--detach"]);
    let founded = [&run[..], &["--nodes", "3"]].concat();
    let founded = developer.does(&founded).await?;
    ensure!(founded.stderr.contains("storage encrypted"), "{founded:#?}");
    developer.has_voters(3).await?;

    developer.does(&["stop", "--force"]).await?;
    let again = developer.does(&run).await?;
    let unlocked = again.stderr.matches("unlocked with the recovery key");
    ensure!(unlocked.count() == 2, "{again:#?}");
    developer.has_voters(3).await?;
    developer.has_healthy_nodes(3).await?;

    developer.does(&["stop", "--force"]).await?;
    let mut waits = developer.runs(&["--detach", "--no-unlock"])?;
    says(&mut waits, "cluster unlock").await?;
    let unlocked = developer.unlocks().await?;
    ensure!(unlocked["answer"]["nodes"] == 3, "{unlocked}");
    let ended = tokio::time::timeout(bounds::FORMED, waits.wait()).await;
    ensure!(ended.context("the run does not end")??.success());
    developer.has_voters(3).await?;
    developer.has_healthy_nodes(3).await?;

    // One is left, which is no quorum.
    for node in ["node-2", "node-3"] {
        developer.does(&["power", "cut", node]).await?;
    }
    for node in ["node-2", "node-3"] {
        developer.does(&["power", "start", node]).await?;
    }
    let unlocked = developer.unlocks().await?;
    let states = unlocked["nodes"].as_array().context("no nodes")?.iter();
    let states: Vec<&str> = states.filter_map(|node| node["state"].as_str()).collect();
    let running = states.iter().filter(|state| **state == "RUNNING");
    ensure!(
        running.count() == 1 && states.contains(&"UNLOCKED"),
        "{unlocked}"
    );
    developer.has_healthy_nodes(3).await?;
    developer.does(&["stop", "--force"]).await?;
    developer.has_nothing_left().await?;
    test.passed()
}
