//! A machine and its disk.
//!
//! [`Plan`] configures a machine, [`Node`] is installed and powered off, [`Running`] is powered on. Several boots of
//! one [`Node`] use the same disk.

mod plan;

use std::fs;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hearth_api::client::{Channel, Endpoint};
use hearth_api::console::{Milestone, Report};
use hearth_api::names;
use hearth_api::v1::node_management_client::NodeManagementClient;
use hearth_api::v1::{NetworkConfig, NodeParameters};
use hearth_lab::Owner;
use hearth_lab::formation::shown_key;
use hearth_qemu::command::{Boot, Machine, Rtc};
use hearth_qemu::disk::{Disk, Format, Medium};
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::hardware::MediumKind;
use hearth_qemu::network::{Link, Mac, Nic, PortForward};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::smbios::Smbios;
use hearth_qemu::vm::{Cause, Exit, Lifetime, Shutdown, Vm, WaitError};
use prost::Message;

pub(crate) use plan::copy;
pub use plan::{Plan, SECOND_DISK};

use crate::debug::Debug;
use crate::disk::RawDisk;
use crate::owner::Operator;
use crate::{Outcome, bounds};

/// A machine that is installed and powered off.
#[derive(Debug)]
pub struct Node {
    /// Its serialised parameters in fw_cfg at the next boot; `None`: no such item.
    pub parameters: Option<Vec<u8>>,
    /// The failpoint that is armed at the next boot.
    pub failpoint: Option<&'static str>,
    /// Other fw_cfg items.
    pub more_fw_cfg: Vec<Item>,
    /// What firmware says of it at the next boot.
    pub smbios: Smbios,
    /// The owner of the cluster, which its original parameters found.
    pub owner: Owner,
    /// Its addresses, in all of its parameters; `None`: by DHCP.
    network_config: Option<NetworkConfig>,
    machine: Machine,
    run_dir: RunDir,
    forwards: Vec<PortForward>,
}

impl Node {
    /// Replaces a word of the kernel's command line, for a direct boot.
    ///
    /// # Errors
    /// If there is no such word.
    pub fn change_word(&mut self, word: &str, other: &str) -> Outcome {
        match &mut self.machine.boot {
            Boot::Direct { append, .. } if append.contains(word) => {
                *append = append.replace(word, other);
                Ok(())
            }
            _ => bail!("{word:?} is not in its command line"),
        }
    }

    /// Gives it this disk instead of its own.
    pub(crate) fn insert(&mut self, disk: Disk) {
        self.machine.disks = vec![disk];
    }

    /// The log of what it writes to its disk.
    ///
    /// # Errors
    /// If it has none: see [`Plan::logged`].
    pub fn log_path(&self) -> anyhow::Result<&Path> {
        let mut disks = self.machine.disks.iter();
        let log = disks.find_map(|disk| disk.log.as_deref());
        log.context("what this node writes is not logged")
    }

    /// A file in its folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.run_dir.file(name)
    }

    /// Attaches a further disk, as it is in this file.
    pub fn attach(&mut self, path: &Path) {
        self.machine.disks.push(Disk::new(path, Format::Raw));
    }

    /// Puts a medium in, the copy of a stick or the disc itself. Firmware boots from it before its disk.
    ///
    /// # Errors
    /// If the stick cannot be copied.
    pub async fn insert_medium(&mut self, kind: MediumKind, path: &Path) -> Outcome {
        let path = match kind {
            MediumKind::Stick => {
                let own = self.file("stick.img");
                copy(path, &own).await?;
                own
            }
            MediumKind::Disc => path.to_owned(),
        };
        self.machine.media.push(Medium { path, kind });
        Ok(())
    }

    /// Takes all media out.
    pub fn eject_media(&mut self) {
        self.machine.media.clear();
    }

    /// Takes the second disk out.
    pub fn remove_second_disk(&mut self) {
        self.machine.disks.truncate(1);
    }

    /// Takes its disk out.
    pub fn remove_disk(&mut self) {
        self.machine.disks.clear();
    }

    /// Puts another network card in, the one with this number, without a cable.
    pub fn add_card(&mut self, number: u16) {
        self.machine.nics.push(Nic {
            mac: Mac::of_machine(number),
            link: Link::Unplugged,
        });
    }

    /// Sets the clock of the next boot.
    pub fn clock(&mut self, rtc: Rtc) {
        self.machine.rtc = rtc;
    }

    /// Sets the parameters for the next boot.
    pub fn tell(&mut self, parameters: &NodeParameters) {
        let mut parameters = parameters.clone();
        if let Some(config) = &self.network_config {
            parameters.network_config = Some(config.clone());
        }
        self.parameters = Some(parameters.encode_to_vec());
    }

    /// Powers it on.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub async fn power_on(&self) -> anyhow::Result<Running> {
        let mut machine = self.machine.clone();
        machine.fw_cfg.clone_from(&self.more_fw_cfg);
        machine.smbios.clone_from(&self.smbios);
        if let Some(bytes) = &self.parameters {
            let item = Item::bytes(names::FW_CFG_PARAMETERS, bytes.clone())?;
            machine.fw_cfg.push(item);
        }
        if let Some(name) = self.failpoint {
            let item = Item::text(names::FW_CFG_FAILPOINT, name)?;
            machine.fw_cfg.push(item);
        }
        Ok(Running {
            vm: Vm::start(&machine, &self.run_dir, Lifetime::KillWithParent).await?,
            owner: self.owner.clone(),
            forwards: self.forwards.clone(),
        })
    }

    /// Its first disk, which must be raw; only while it is powered off.
    ///
    /// # Errors
    /// If it is not raw, or has no partition table.
    pub async fn disk(&self) -> anyhow::Result<RawDisk> {
        match self.machine.disks.first() {
            Some(disk) if disk.format == Format::Raw => RawDisk::open(&disk.path).await,
            _ => bail!("this node's disk is not raw"),
        }
    }

    /// The path of the second disk, a copy of the first before the first boot.
    ///
    /// # Errors
    /// If it has only one.
    pub fn twin_path(&self) -> anyhow::Result<&Path> {
        let twin = self.machine.disks.get(1);
        Ok(&twin.context("this node has one disk")?.path)
    }

    /// The path of its raw disk.
    pub fn disk_path(&self) -> &Path {
        &self.machine.disks[0].path
    }

    /// Gives it the disk and the owner of a machine that was saved.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(crate) async fn restore(&mut self, disk: &Path, owner: &Path) -> Outcome {
        self.restore_disk(disk).await?;
        self.owner = Owner::load(owner)?;
        Ok(())
    }

    /// Copies its disk to a file of this name in its folder; only while it is powered off.
    ///
    /// # Errors
    /// If it cannot be copied.
    pub async fn copy_disk(&self, name: &str) -> anyhow::Result<PathBuf> {
        let to = self.run_dir.file(name);
        copy(self.disk_path(), &to).await?;
        Ok(to)
    }

    /// Gives its disk the content of such a copy, of its own disk or of another node's on the same image; only while it is
    /// powered off. It gets no parameters any more.
    ///
    /// # Errors
    /// If it cannot be copied.
    pub async fn restore_disk(&mut self, from: &Path) -> Outcome {
        copy(from, self.disk_path()).await?;
        self.parameters = None;
        Ok(())
    }

    /// Takes its TPM away: its next start makes another one.
    ///
    /// # Errors
    /// If it has none.
    pub fn replace_tpm(&self) -> Outcome {
        fs::remove_dir_all(self.run_dir.tpm()).context("cannot remove the TPM")
    }

    /// Its folder, which also has its owner's files.
    pub fn folder(&self) -> &Path {
        self.run_dir.path()
    }

    /// All its serial logs, the newest first.
    ///
    /// # Errors
    /// If one cannot be read.
    pub fn serial_logs(&self) -> anyhow::Result<Vec<(PathBuf, Vec<u8>)>> {
        let older = (1..).map(|number| self.run_dir.file(&format!("serial.{number}.log")));
        let paths = std::iter::once(self.run_dir.serial_log()).chain(older);
        paths
            .take_while(|path| path.exists())
            .map(|path| {
                let text =
                    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
                Ok((path, text))
            })
            .collect()
    }
}

/// A machine that is powered on. Killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    vm: Vm,
    owner: Owner,
    forwards: Vec<PortForward>,
}

impl Deref for Running {
    type Target = Vm;

    fn deref(&self) -> &Vm {
        &self.vm
    }
}

impl Running {
    /// Waits until it reports that it is HOME.
    ///
    /// # Errors
    /// If it does not become HOME.
    pub async fn home(&self) -> Outcome {
        self.reached(Milestone::Home, bounds::HOME).await?;
        Ok(())
    }

    /// The cluster states that its console has shown so far, in order.
    pub fn states(&self) -> Vec<String> {
        let state = |report| match report {
            Report::State(state) => Some(state),
            _ => None,
        };
        self.reports().filter_map(state).collect()
    }

    /// What its console has reported so far, in order.
    fn reports(&self) -> impl Iterator<Item = Report> {
        let lines = self.console().last(usize::MAX).into_iter();
        lines.filter_map(|line| Report::parse(&line.text))
    }

    /// Whether its console has shown this milestone so far.
    pub fn has_reached(&self, milestone: Milestone) -> bool {
        self.reports()
            .any(|report| matches!(report, Report::Reached(this, _) if this == milestone))
    }

    /// Waits until it reports HOME in the boot of this number, the first of this start being 1: a machine that resets
    /// itself boots again in the same QEMU.
    ///
    /// # Errors
    /// If it does not become HOME, or rejects its parameters or disk.
    pub async fn home_in_boot(&self, number: u32) -> Outcome {
        let (mut boot, mut refused) = (0, None);
        let wanted = format!("home in boot {number}");
        self.wait_for_report(&wanted, bounds::HOME, |report| {
            match report {
                Report::Reached(Milestone::Kernel, _) => boot += 1,
                Report::Refused(why) => refused = Some(why.clone()),
                Report::Reached(Milestone::Home, _) => return boot == number,
                _ => {}
            }
            refused.is_some()
        })
        .await?;
        match refused {
            None => Ok(()),
            Some(why) => bail!(
                "the node rejected its parameters or disk: {why}\n{}",
                self.tail()
            ),
        }
    }

    /// Waits until it has mounted an extension, or rejected it; returns the reason.
    ///
    /// # Errors
    /// If it reports neither.
    pub async fn extension(&self, name: &str) -> anyhow::Result<Option<String>> {
        let wanted = format!("extension {name}");
        self.reported(&wanted, bounds::DECISION, |report| match report {
            Report::Extension(this, why) if this == name => Some(why.clone()),
            _ => None,
        })
        .await
    }

    /// Waits until enrolment rejects parameters or disk; returns the reason.
    ///
    /// # Errors
    /// If it continues instead.
    pub async fn refusal(&self) -> anyhow::Result<String> {
        self.decision("a refusal", |report| match report {
            Report::Refused(why) => Some(why.clone()),
            _ => None,
        })
        .await
    }

    /// Waits until enrolment waits; returns what for.
    ///
    /// # Errors
    /// If it continues, or rejects parameters or disk.
    pub async fn waiting(&self) -> anyhow::Result<String> {
        self.decision("a wait", awaited).await
    }

    /// Waits until it waits, whatever it does before; returns what for.
    ///
    /// # Errors
    /// If it does not wait in the end.
    pub async fn waits_in_the_end(&self) -> anyhow::Result<String> {
        self.reported("a wait", bounds::SETTLED, awaited).await
    }

    /// Waits for a decision of enrolment. A report of another decision is an error at once.
    async fn decision<T>(
        &self,
        wanted: &str,
        find: impl Fn(&Report) -> Option<T>,
    ) -> anyhow::Result<T> {
        let decided = self.reported(wanted, bounds::DECISION, |report| {
            let other = match report {
                Report::Reached(Milestone::Storage | Milestone::Home, _)
                | Report::Refused(_)
                | Report::Waiting(_)
                | Report::CoreEnded(_) => Some(Err(report.to_string())),
                _ => None,
            };
            find(report).map(Ok).or(other)
        });
        match decided.await? {
            Ok(found) => Ok(found),
            Err(other) => bail!("expected {wanted}, got {other:?}\n{}", self.tail()),
        }
    }

    /// Waits for a report in which `find` finds something; returns that.
    async fn reported<T>(
        &self,
        wanted: &str,
        bound: Duration,
        find: impl Fn(&Report) -> Option<T>,
    ) -> anyhow::Result<T> {
        let mut found = None;
        self.wait_for_report(wanted, bound, |report| {
            found = find(report);
            found.is_some()
        })
        .await?;
        found.context("no report")
    }

    /// Waits until at least this share of what it wipes is wiped; returns the first report of that. Both in percent.
    ///
    /// # Errors
    /// If it does not get there.
    pub async fn wiped(&self, least: u64) -> anyhow::Result<u64> {
        let wanted = format!("{least} % wiped");
        self.reported(&wanted, bounds::HOME, |report| match report {
            Report::Wiping(progress) => {
                let percent = progress.split(' ').next()?.parse().ok()?;
                (percent >= least).then_some(percent)
            }
            _ => None,
        })
        .await
    }

    /// Waits until it stops at the failpoint.
    ///
    /// # Errors
    /// If it does not reach it.
    pub async fn failpoint(&self, name: &str) -> Outcome {
        let wanted = format!("failpoint {name}");
        let report = Report::Failpoint(name.to_owned());
        self.wait_for_report(&wanted, bounds::HOME, |found| *found == report)
            .await?;
        Ok(())
    }

    /// The ID of the node that founds a cluster, from the line that is logged before anything of it is durable.
    ///
    /// # Errors
    /// If there is no such line.
    pub async fn founding_node(&self) -> anyhow::Result<String> {
        self.makes_keys_of("a new cluster").await
    }

    /// The ID of the node that begins to register, once it is logged.
    ///
    /// # Errors
    /// If it is not logged.
    pub async fn registering_node(&self) -> anyhow::Result<String> {
        self.makes_keys_of("a new node").await
    }

    async fn makes_keys_of(&self, what: &str) -> anyhow::Result<String> {
        let line = self.says(&[what, "node="]).await?;
        let id = line.split_once("node=").map(|(_, rest)| rest);
        let id = id.and_then(|rest| rest.split_whitespace().next());
        id.map(str::to_owned).context(line)
    }

    /// Waits for a console line with all of these parts, in any order.
    ///
    /// # Errors
    /// If it does not appear.
    pub async fn says(&self, parts: &[&str]) -> Result<String, WaitError> {
        let wanted = format!("a line with {parts:?}");
        let line = self
            .wait_for(&wanted, bounds::SOON, |text| {
                parts.iter().all(|part| text.contains(part))
            })
            .await?;
        Ok(line.text.to_string())
    }

    /// The host address of this port, forwarded by QEMU or by its network.
    pub fn forwarded(&self, guest: u16) -> Option<SocketAddr> {
        let mut forwards = self.forwards.iter();
        let forwarded = forwards.find(|forwarded| forwarded.guest == guest);
        let host = forwarded.map(|forwarded| forwarded.host);
        host.or_else(|| self.vm.forwarded(guest))
    }

    /// Waits until it shows its public key for approval.
    ///
    /// # Errors
    /// If that times out, or it rejects its parameters or disk.
    pub async fn shows_its_key(&self) -> anyhow::Result<Vec<u8>> {
        let (mut key, mut refused) = (None, None);
        self.wait_for_report("its public key", bounds::HOME, |report| {
            match report {
                Report::Waiting(what) => key = shown_key(what),
                Report::Refused(why) => refused = Some(why.clone()),
                _ => {}
            }
            key.is_some() || refused.is_some()
        })
        .await?;
        key.with_context(|| {
            format!(
                "the node rejected its parameters or disk: {refused:?}\n{}",
                self.tail()
            )
        })
    }

    /// The host endpoint of its curator.
    ///
    /// # Errors
    /// If the port is not forwarded.
    pub fn curator(&self) -> anyhow::Result<Endpoint> {
        let address = self.forwarded(names::PORT_CURATOR);
        Ok(address
            .context("the curator's port is not forwarded")?
            .into())
    }

    /// Takes ownership as its owner.
    ///
    /// # Errors
    /// If that fails.
    pub async fn owned(&self) -> anyhow::Result<Operator> {
        let take = Operator::take_ownership(&self.owner, self.curator()?);
        self.while_running("ownership", bounds::SOON, take).await?
    }

    /// Pauses it, unnoticed by the guest, until [`Self::resume`].
    ///
    /// # Errors
    /// If the command fails.
    pub async fn pause(&self) -> Outcome {
        Ok(self.vm.pause().await?)
    }

    /// Resumes it.
    ///
    /// # Errors
    /// If the command fails.
    pub async fn resume(&self) -> Outcome {
        Ok(self.vm.resume().await?)
    }

    /// A client of its debug service, which only test images have.
    ///
    /// # Errors
    /// If the debug service does not answer.
    pub async fn debug(&self) -> anyhow::Result<Debug> {
        let address = self.forwarded(names::PORT_DEBUG);
        let address = address.context("the debug port is not forwarded")?;
        Debug::connect(address).await
    }

    /// Cuts its power.
    ///
    /// # Errors
    /// If QEMU cannot be killed, or had ended before.
    pub async fn cut(self) -> anyhow::Result<Exit> {
        let exit = self.vm.power_cut().await?;
        ensure!(
            exit.cause == Cause::PowerCut,
            "it ended before the power cut: {exit}\n{}",
            self.tail()
        );
        Ok(exit)
    }

    /// A client of this node's management service, for its cluster's operator; by its ID, so that no other node can
    /// answer.
    ///
    /// # Errors
    /// If the port is not forwarded, or the ID is invalid.
    pub fn management(
        &self,
        operator: &Operator,
        id: &str,
    ) -> anyhow::Result<NodeManagementClient<Channel>> {
        let address = self.forwarded(names::PORT_NODE_MANAGEMENT);
        let address = address.context("the node's port is not forwarded")?;
        let operator = operator.once();
        Ok(operator.node_management(id.parse()?, address.into())?)
    }

    /// Presses its power button and waits until it has shut down cleanly.
    ///
    /// # Errors
    /// If it ends in another way.
    pub async fn power_off(self) -> Outcome {
        let (shutdown, exit) = self.vm.shutdown(bounds::POWER_OFF).await?;
        ensure!(
            shutdown == Shutdown::Clean,
            "expected a clean shutdown by the power button, got {shutdown:?}: {exit}\n{}",
            self.tail()
        );
        self.has_gone_down(&exit).await
    }

    /// Waits until it has shut down cleanly, after a request.
    ///
    /// # Errors
    /// If it ends in another way.
    pub async fn goes_down(self) -> Outcome {
        let exit = self.exited(bounds::POWER_OFF).await?;
        self.has_gone_down(&exit).await
    }

    async fn has_gone_down(&self, exit: &Exit) -> Outcome {
        ensure!(
            exit.cause == Cause::GuestShutdown,
            "it did not power itself off: {exit}\n{}",
            self.tail()
        );
        let down = Report::Down("power off".to_owned());
        self.wait_for_report("an orderly end", bounds::SOON, |report| *report == down)
            .await?;
        // What the supervisor logs of a runnable that was still running when the bound of the
        // shutdown was over. That one took long is no failure: on a machine that does many
        // things at once, processes are killed after their bound and are reaped late.
        let lines = self.console().last(usize::MAX);
        let straggler = lines
            .iter()
            .find(|line| line.text.contains("did not stop within"));
        ensure!(
            straggler.is_none(),
            "a runnable did not stop within the bound of the shutdown: {straggler:?}"
        );
        Ok(())
    }
}

/// What a report says that a node waits for.
fn awaited(report: &Report) -> Option<String> {
    match report {
        Report::Waiting(what) => Some(what.clone()),
        _ => None,
    }
}
