//! The README's way from a stick to a cluster of three machines, with the commands that it prints and no others.
//!
//! The machines are as people have them: an empty NVMe disk, an e1000e card, UEFI, and nothing that only QEMU has. What a person
//! does beside the commands is done by the test: it puts the stick in and takes it out, presses the power button, and reads
//! screens. Two things stand in for what this host does not have: the stick is a file, and because the machines have a network
//! of their own, hearthctl is told where their ports are.

use std::collections::VecDeque;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use hearth_api::console::{Milestone, Report};
use hearth_api::names;
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::tool;
use hearth_qemu::hardware::{Card, DiskBus, MediumKind};
use hearth_tests::cluster::{Machines, Member};
use hearth_tests::{Outcome, TestCtx, bounds, here};
use tokio::process::Command;

const README: &str = include_str!("../../../README.md");
const SECTION: &str = "\n## Three machines and a stick\n";
/// What the README calls the stick, the address of the first node, a public key, and a node.
const STICK: &str = "/dev/sdX";
const ADDRESS: &str = "ADDRESS";
const PUBLIC_KEY: &str = "PUBLIC-KEY";
const NODE: &str = "NODE";
/// Where the README has the medium.
const MEDIUM: &str = "target/hearth/release/hearth-installer.img";

/// A person who follows the README.
struct Reader {
    /// The commands that are left, in their order, without comments.
    commands: VecDeque<String>,
    hearthctl: Hearthctl,
    /// Where commands run.
    folder: PathBuf,
    /// Placeholders, and what is meant here.
    meanings: Vec<(&'static str, String)>,
}

impl Reader {
    fn begin(test: &TestCtx, medium: &Path) -> anyhow::Result<Self> {
        let folder = test.folder().to_owned();
        let (_, section) = README.split_once(SECTION).context("no such section")?;
        let section = section.split("\n## ").next().unwrap_or_default();
        let blocks = section.split("```").skip(1).step_by(2);
        let commands = blocks.flat_map(|block| {
            let block = block.replace("\\\n", " ");
            let lines = block.lines().map(|line| match line.split_once('#') {
                Some((command, _)) => command.trim().to_owned(),
                None => line.trim().to_owned(),
            });
            lines.collect::<Vec<_>>()
        });
        let is_command = |line: &String| !line.is_empty();
        Ok(Self {
            commands: commands.filter(is_command).collect(),
            hearthctl: Hearthctl {
                program: test.artifacts().hearthctl.clone(),
                config: folder.join("hearthctl.json"),
            },
            meanings: vec![
                (STICK, path(&folder.join("stick.img"))?),
                (MEDIUM, path(medium)?),
            ],
            folder,
        })
    }

    /// The next command, which has to begin like this.
    fn reads(&mut self, beginning: &str) -> anyhow::Result<String> {
        match self.commands.pop_front() {
            Some(command) if command.starts_with(beginning) => Ok(command),
            other => bail!("expected `{beginning} …` in the README, got {other:?}"),
        }
    }

    /// Runs the next command, which has to begin like this; returns what it prints.
    async fn types(&mut self, beginning: &str) -> anyhow::Result<String> {
        let command = self.reads(beginning)?;
        self.runs(&command).await
    }

    /// The same once for each of these values of a placeholder: all of what it prints.
    async fn types_for_each(
        &mut self,
        beginning: &str,
        placeholder: &str,
        values: &[String],
    ) -> Outcome {
        let command = self.reads(beginning)?;
        ensure!(command.contains(placeholder), "`{command}`");
        for value in values {
            self.runs(&command.replace(placeholder, value)).await?;
        }
        Ok(())
    }

    /// Runs a command with everything in the place of what stands for it.
    async fn runs(&self, command: &str) -> anyhow::Result<String> {
        let mut words = command.split_whitespace();
        ensure!(words.next() == Some("hearthctl"), "`{command}`");
        let words = words.map(|word| {
            let meant = self.meanings.iter().find(|(name, _)| *name == word);
            meant.map_or(word, |(_, meaning)| meaning)
        });
        let mut child = Command::new(&self.hearthctl.program);
        child
            .args(words)
            .env("HEARTH_CONFIG", &self.hearthctl.config);
        child.current_dir(&self.folder).kill_on_drop(true);
        let ended = child.output();
        let ended = tokio::time::timeout(bounds::FORMED, ended).await;
        let ended = ended.with_context(|| format!("`{command}` does not end"))??;
        let printed = String::from_utf8_lossy(&ended.stdout).into_owned();
        let errors = String::from_utf8_lossy(&ended.stderr);
        ensure!(
            ended.status.success(),
            "`{command}`: {}\n{printed}{errors}",
            ended.status
        );
        Ok(printed)
    }

    /// Boots a machine from the stick, as it is now, and waits until it is installed.
    async fn installs(&self, machine: &mut Member) -> Outcome {
        let stick = self.folder.join("stick.img");
        machine
            .node
            .insert_medium(MediumKind::Stick, &stick)
            .await?;
        machine.start().await?;
        let is_installed = |report: &Report| matches!(report, Report::Installed(_));
        let vm = machine.vm()?;
        vm.wait_for_report("an installation", bounds::HOME, is_installed)
            .await?;
        Ok(())
    }
}

fn path(path: &Path) -> anyhow::Result<String> {
    let text = path.to_str();
    Ok(text.context("not UTF-8")?.to_owned())
}

/// The IDs of nodes in what `hearthctl node list` prints.
fn ids(listed: &str) -> Vec<String> {
    let words = listed.lines().filter_map(|line| line.split(' ').next());
    let ids = words.filter(|word| word.starts_with("hearth-"));
    ids.map(str::to_owned).collect()
}

#[tokio::test]
#[ignore = "long: --long runs it"]
async fn usb_stick_to_three_nodes() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let media = test.artifacts().installer.clone();
    let medium = media.context("the media were not built")?.stick;
    let mut machines = Machines::install(&test, 3, |_, plan| {
        let plan = plan.release().uefi().blank_disk().larger_by(1 << 30);
        let plan = plan.hardware(DiskBus::Nvme, Card::E1000e);
        Ok(plan)
    })
    .await?;
    for machine in &mut machines.members {
        machine.node.parameters = None;
    }
    let mut reader = Reader::begin(&test, &medium)?;

    // These two were done before the tests were started.
    reader.reads("cargo install")?;
    reader.reads("cargo xtask image --installer")?;
    reader.types("hearthctl owner init").await?;
    reader.types("hearthctl parameters bootstrap").await?;
    reader.types("hearthctl image write").await?;
    let [first, others @ ..] = &mut machines.members[..] else {
        bail!("no machines");
    };
    reader.installs(first).await?;
    let vm = first.vm()?;
    vm.home_in_boot(2).await?;
    let reached = vm.reached(Milestone::Network, bounds::SOON).await?;
    let shown = reached.report.to_string();
    ensure!(shown.contains(&first.address().to_string()), "{shown}");

    let curator = vm.forwarded(names::PORT_CURATOR);
    let curator = curator.context("no port for the curator")?.to_string();
    reader.meanings.push((ADDRESS, curator));
    reader.types("hearthctl cluster take-ownership").await?;
    for machine in std::iter::once(&*first).chain(&*others) {
        let ports = [
            names::PORT_CURATOR,
            names::PORT_NODE_MANAGEMENT,
            names::PORT_UNLOCK,
        ];
        for port in ports {
            let host = machines.network.forward(machine.name(), port).await?;
            let address = SocketAddrV4::new(machine.address(), port);
            let mut route = reader.hearthctl.call(["context", "route"]);
            route.arg(address.to_string()).arg(host.to_string());
            tool::run(&route).await?;
        }
    }
    reader.types("hearthctl parameters register").await?;
    reader.types("hearthctl image set-parameters").await?;
    let mut keys = Vec::new();
    for machine in &mut *others {
        reader.installs(machine).await?;
        keys.push(hex::encode(machine.vm()?.shows_its_key().await?));
    }
    reader
        .types_for_each("hearthctl node approve", PUBLIC_KEY, &keys)
        .await?;
    for machine in &*others {
        machine.vm()?.home_in_boot(2).await?;
    }
    let listed = reader.types("hearthctl node list").await?;
    let nodes = ids(&listed);
    ensure!(nodes.len() == 3, "{listed}");
    let without: Vec<String> = listed
        .lines()
        .filter(|line| !line.contains("consensus-member"))
        .flat_map(ids)
        .collect();
    ensure!(without.len() == 2, "{listed}");
    reader
        .types_for_each("hearthctl node role add", NODE, &without)
        .await?;
    let members = reader.types("hearthctl etcd members").await?;
    ensure!(nodes.iter().all(|id| members.contains(id)), "{members}");

    // All of them are switched off, without the stick switched on again, and locked.
    for machine in &mut machines.members {
        machine.power_off().await?;
        machine.node.eject_media();
    }
    for machine in &mut machines.members {
        machine.start().await?;
    }
    for machine in &machines.members {
        let what = machine.vm()?.waits_in_the_end().await?;
        ensure!(what.contains("unlock"), "{what}");
    }
    reader.types("hearthctl cluster unlock").await?;
    for machine in &machines.members {
        machine.home().await?;
    }
    ensure!(reader.commands.is_empty(), "left: {:?}", reader.commands);
    test.passed()
}
