//! A machine and its disk.
//!
//! [`Plan`] configures a machine, [`Node`] is installed and powered off, [`Running`] is powered on. Several boots of
//! one [`Node`] use the same disk.

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
use hearth_api::v1::{ClusterConfiguration, NodeParameters, StorageSecurityPolicy};
use hearth_lab::formation::shown_key;
use hearth_lab::owner::with_storage;
use hearth_lab::{Owner, tool};
use hearth_qemu::accel::Accel;
use hearth_qemu::artifacts::Image;
use hearth_qemu::command::{Boot, CommandLine, Machine, Rtc, TpmInterface};
use hearth_qemu::disk::{Disk, Format, make_overlay};
use hearth_qemu::firmware::Firmware;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::hardware::{Card, DiskBus};
use hearth_qemu::network::{Forward, Link, Mac, Nic, PortForward, UserNetwork};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::vm::{Cause, Exit, Lifetime, Shutdown, Vm, WaitError};
use prost::Message;

use crate::debug::Debug;
use crate::disk::RawDisk;
use crate::owner::Operator;
use crate::places::Occupant;
use crate::{Outcome, TestCtx, bounds};

/// The configuration of a machine. The usual one: the test image, booted directly, 512 MiB, one CPU (two with KVM), an
/// overlay as its disk, a network without a gateway, and parameters that found a cluster with insecure storage.
#[derive(Debug)]
pub struct Plan<'a> {
    test: &'a TestCtx,
    name: String,
    image: Image,
    uefi: bool,
    machine: Machine,
    disk: Kind,
    sector_bytes: u32,
    has_twin: bool,
    larger_by: u64,
    configuration: ClusterConfiguration,
    manifests: Vec<String>,
    forwards: Vec<PortForward>,
    runs_kubernetes: bool,
}

/// The disk of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An overlay on the image.
    Overlay,
    /// A copy of the image, which the test can read and change.
    Raw,
}

impl TestCtx {
    /// A machine of this name, to be configured and then installed.
    pub fn node(&self, name: &str) -> Plan<'_> {
        Plan::new(self, name)
    }
}

impl<'a> Plan<'a> {
    pub(crate) fn new(test: &'a TestCtx, name: &str) -> Self {
        let ports = [
            names::PORT_CURATOR,
            names::PORT_NODE_MANAGEMENT,
            names::PORT_UNLOCK,
            names::PORT_DEBUG,
            names::PORT_KUBERNETES,
        ];
        let forwards = ports.map(Forward::any);
        let machine = Machine {
            // A second emulated CPU takes more time from the host's than it saves.
            cpus: match test.accel() {
                Accel::Tcg => 1,
                Accel::Kvm => 2,
            },
            nics: vec![Nic {
                mac: Mac::of_machine(1),
                link: Link::User(UserNetwork {
                    restricted: true,
                    forwards: forwards.into(),
                }),
            }],
            ..Machine::new(name, test.accel())
        };
        Self {
            test,
            name: name.to_owned(),
            image: test.artifacts().test.clone(),
            uefi: false,
            machine,
            disk: Kind::Overlay,
            sector_bytes: 512,
            has_twin: false,
            larger_by: 0,
            configuration: with_storage(StorageSecurityPolicy::NeedsInsecure),
            manifests: Vec::new(),
            forwards: Vec::new(),
            runs_kubernetes: false,
        }
    }

    /// Connected to a network of several machines, which forwards these of its ports to the host.
    pub fn plugged(mut self, nic: Nic, forwards: Vec<PortForward>) -> Self {
        self.machine.nics = vec![nic];
        self.forwards = forwards;
        self
    }

    /// With the release image.
    pub fn release(self) -> Self {
        let image = self.test.artifacts().release.clone();
        self.image(image)
    }

    /// With the test image with Kubernetes, and the memory that it needs. Waits for its turn.
    ///
    /// # Errors
    /// If it was not built.
    pub fn kubernetes(self) -> anyhow::Result<Self> {
        let image = self.test.kubernetes()?.image.clone();
        self.test.turn(Occupant::Kubernetes)?;
        let plan = Self {
            runs_kubernetes: true,
            ..self.image(image).cpus(2)
        };
        Ok(plan.memory_mib(2048).larger_by(4 << 30))
    }

    /// Whether [`Self::kubernetes`] was called.
    pub(crate) fn runs_kubernetes(&self) -> bool {
        self.runs_kubernetes
    }

    /// With this image.
    pub fn image(mut self, image: Image) -> Self {
        self.image = image;
        self
    }

    /// Booted from its disk, by firmware.
    pub fn uefi(mut self) -> Self {
        self.uefi = true;
        self
    }

    /// With a TPM.
    pub fn tpm(mut self) -> Self {
        self.machine.tpm = Some(TpmInterface::Tis);
        self
    }

    /// With this much memory.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.machine.memory_mib = memory_mib;
        self
    }

    /// With this many CPUs.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.machine.cpus = cpus;
        self
    }

    /// Without a random number generator except the CPU's.
    pub fn without_rng(mut self) -> Self {
        self.machine.rng = false;
        self
    }

    /// With another disk controller and another network card. Without virtio in either, there is none in the machine.
    pub fn hardware(mut self, disk_bus: DiskBus, card: Card) -> Self {
        self.machine.disk_bus = disk_bus;
        self.machine.card = card;
        self.machine.rng = disk_bus.is_virtio() || card.is_virtio();
        self
    }

    /// With a further device, as QEMU's `-device` takes it.
    pub fn device(mut self, device: &str) -> Self {
        self.machine.more_devices.push(device.to_owned());
        self
    }

    /// Without a network card.
    pub fn without_card(mut self) -> Self {
        self.machine.nics.clear();
        self
    }

    /// With another clock.
    pub fn clock(mut self, clock: Rtc) -> Self {
        self.machine.rtc = clock;
        self
    }

    /// In a network with a gateway: without one, DNS and time servers are unreachable.
    pub fn online(mut self) -> Self {
        for nic in &mut self.machine.nics {
            if let Link::User(network) = &mut nic.link {
                network.restricted = false;
            }
        }
        self
    }

    /// With a disk that the test can read while the machine is off.
    pub fn raw_disk(mut self) -> Self {
        self.disk = Kind::Raw;
        self
    }

    /// With a disk of large logical sectors; the image must be for such a disk.
    pub fn sector_bytes(mut self, sector_bytes: u32) -> Self {
        self.sector_bytes = sector_bytes;
        self
    }

    /// With a second disk, a copy of the first; both can be read while the machine is off.
    pub fn twin_disks(self) -> Self {
        Self {
            has_twin: true,
            ..self.raw_disk()
        }
    }

    /// With a disk that is this many bytes larger than the image.
    pub fn larger_by(mut self, bytes: u64) -> Self {
        self.larger_by = bytes;
        self
    }

    /// With other settings of the cluster that it founds.
    pub fn configured(mut self, change: impl FnOnce(&mut ClusterConfiguration)) -> Self {
        change(&mut self.configuration);
        self
    }

    /// With these Kubernetes objects in the cluster that it founds, each in JSON.
    pub fn with_manifests(mut self, manifests: Vec<String>) -> Self {
        self.manifests = manifests;
        self
    }

    /// Creates its folder and its disk.
    ///
    /// # Errors
    /// If one of them cannot be created.
    pub async fn install(mut self) -> anyhow::Result<Node> {
        self.test.place()?;
        let run_dir = RunDir::create(self.test.folder().join(&self.name))?;
        let base = &self.image.disk;
        let image_bytes = fs::metadata(base)
            .with_context(|| format!("cannot read the metadata of {}", base.display()))?
            .len();
        let bytes = match self.machine.disk_bus {
            // QEMU insists on it for SD cards.
            DiskBus::Sdhci => (image_bytes + self.larger_by).next_power_of_two(),
            _ => image_bytes + self.larger_by,
        };
        let disk = match self.disk {
            Kind::Overlay => {
                let path = run_dir.file("disk.qcow2");
                make_overlay(base, &path, Some(bytes)).await?;
                Disk::new(path, Format::Qcow2)
            }
            Kind::Raw => {
                let path = run_dir.file("disk.img");
                copy(base, &path).await?;
                fs::File::options()
                    .write(true)
                    .open(&path)?
                    .set_len(bytes)?;
                Disk::new(path, Format::Raw)
            }
        };
        self.machine.boot = match self.uefi {
            true => Boot::Uefi(Firmware::locate()?),
            false => self.image.direct(),
        };
        self.machine.disks = vec![Disk {
            sector_bytes: self.sector_bytes,
            ..disk
        }];
        if self.has_twin {
            let path = run_dir.file("twin.img");
            copy(&self.machine.disks[0].path, &path).await?;
            self.machine.disks.push(Disk::new(path, Format::Raw));
        }
        let owner = Owner::create(run_dir.path())?;
        let parameters = owner.founding(self.configuration, self.manifests);
        Ok(Node {
            parameters: Some(parameters.encode_to_vec()),
            failpoint: None,
            more_fw_cfg: Vec::new(),
            machine: self.machine,
            forwards: self.forwards,
            run_dir,
            owner,
        })
    }
}

/// Copies a sparse file sparsely.
async fn copy(from: &Path, to: &Path) -> Outcome {
    let mut command = CommandLine::new("cp");
    command
        .arg("--sparse=always")
        .arg("--reflink=auto")
        .arg("--no-preserve=all")
        .arg(from)
        .arg(to);
    tool::run(&command).await?;
    Ok(())
}

/// A machine that is installed and powered off.
#[derive(Debug)]
pub struct Node {
    /// Its serialised parameters in fw_cfg at the next boot; `None`: no such item.
    pub parameters: Option<Vec<u8>>,
    /// The failpoint that is armed at the next boot.
    pub failpoint: Option<&'static str>,
    /// Other fw_cfg items.
    pub more_fw_cfg: Vec<Item>,
    /// The owner of the cluster, which its original parameters found.
    pub owner: Owner,
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

    /// Takes its disk out.
    pub fn remove_disk(&mut self) {
        self.machine.disks.clear();
    }

    /// Sets the clock of the next boot.
    pub fn clock(&mut self, rtc: Rtc) {
        self.machine.rtc = rtc;
    }

    /// Sets the parameters for the next boot.
    pub fn tell(&mut self, parameters: &NodeParameters) {
        self.parameters = Some(parameters.encode_to_vec());
    }

    /// Powers it on.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub async fn power_on(&self) -> anyhow::Result<Running> {
        let mut machine = self.machine.clone();
        machine.fw_cfg.clone_from(&self.more_fw_cfg);
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
    pub(crate) fn restore(&mut self, disk: &Path, owner: &Path) -> Outcome {
        let own = self.disk_path();
        fs::copy(disk, own).with_context(|| format!("cannot copy {}", disk.display()))?;
        self.owner = Owner::load(owner)?;
        self.parameters = None;
        Ok(())
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
        let lines = self.console().last(usize::MAX);
        let state = |line: &hearth_qemu::console::Line| match Report::parse(&line.text)? {
            Report::State(state) => Some(state),
            _ => None,
        };
        lines.iter().filter_map(state).collect()
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
