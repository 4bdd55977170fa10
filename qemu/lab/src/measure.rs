//! Boots and formations, timed.
//!
//! The measured machines differ in nothing but what boots: [`Lab`] makes machines of one kind, each with a new disk and
//! new firmware variables, and keeps their logs. Order, number of repetitions and comparisons are up to the benchmark.
//! The owner makes calls from this process and not through hearthctl: the clock runs until the answer arrives, and the
//! time to start a program on the host is not part of a boot.

pub mod boots;
pub mod cluster;
pub mod failover;
pub mod kubernetes;
pub mod records;
pub mod storage;
pub mod traffic;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_api::client::Endpoint;
use hearth_api::console::Milestone;
use hearth_api::names;
use hearth_api::v1::{NodeParameters, StorageSecurityPolicy};
use hearth_qemu::accel::Accel;
use hearth_qemu::artifacts::Image;
use hearth_qemu::command::{Boot, Machine, OnReset};
use hearth_qemu::disk::{Disk, Format, make_overlay};
use hearth_qemu::firmware::Firmware;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::network::{Forward, Link, Mac, Nic, UserNetwork};
use hearth_qemu::phases::{Phase, Timeline};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::vm::{Cause, Lifetime, Vm};
use prost::Message;

use crate::owner::{Owner, with_storage};
use crate::{LabError, Result};

/// Memory of measured machines in MiB, unless stated otherwise.
pub const MEMORY: u32 = 512;
/// Virtual CPUs of measured machines.
pub const CPUS: u32 = 2;
/// The size that `cargo xtask run` uses: the data partition grows to the disk's end at the first boot.
const DISK_BYTES: u64 = 4 << 30;
/// File name of the disk in a machine's folder.
const DISK: &str = "disk.qcow2";
/// Bound for a whole boot, which takes seconds.
const BOOT_BOUND: Duration = Duration::from_secs(300);
/// Bound for each call. None of them waits for an event, but a loaded host is slow.
const CALL: Duration = Duration::from_secs(60);
/// The bare init's fw_cfg item, and the value that makes it power off.
const BARE_MODE: (&str, &str) = ("opt/dev.hearth/bare-init", "off");

/// How machines boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// QEMU loads the kernel.
    Direct,
    /// The firmware loads the UKI from the disk.
    Uefi,
}

impl Way {
    /// Its name in records.
    pub fn word(self) -> &'static str {
        match self {
            Way::Direct => "direct",
            Way::Uefi => "uefi",
        }
    }

    fn boot(self, image: &Image) -> Result<Boot> {
        Ok(match self {
            Way::Direct => image.direct(),
            Way::Uefi => Boot::Uefi(Firmware::locate()?),
        })
    }
}

/// A measured boot.
pub struct Measured {
    /// Its phases, from the console.
    pub timeline: Timeline,
    /// Time from QEMU's start to the goal of the boot.
    pub whole: Duration,
    /// QEMU's peak resident memory, in bytes.
    pub peak: u64,
}

/// The specification of a machine.
pub struct Build<'a> {
    /// Its name, and that of its folder.
    pub name: String,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// What it boots, and how.
    pub boot: Boot,
    /// The image that its disk is a copy of.
    pub disk: &'a Path,
    /// Size of its disk.
    pub disk_bytes: u64,
    /// Its ports that are forwarded to the host.
    pub ports: &'a [u16],
    /// Its fw_cfg items.
    pub fw_cfg: Vec<Item>,
}

/// Makes machines to be measured.
pub struct Lab {
    /// Their accelerator.
    pub accel: Accel,
    /// The folder of their logs.
    pub folder: PathBuf,
}

impl Lab {
    /// Starts a machine with a new disk. Its folder is cleared first.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start(&self, build: Build<'_>) -> Result<Vm> {
        let folder = self.folder.join(&build.name);
        clear(&folder)?;
        let run_dir = RunDir::create(&folder)?;
        let overlay = run_dir.file(DISK);
        make_overlay(build.disk, &overlay, Some(build.disk_bytes)).await?;
        let network = UserNetwork {
            restricted: false,
            forwards: build.ports.iter().copied().map(Forward::any).collect(),
        };
        let machine = Machine {
            disks: vec![Disk::new(overlay, Format::Qcow2)],
            nics: vec![Nic {
                mac: Mac::of_machine(1),
                link: Link::User(network),
            }],
            ..self.machine(build.name, build.memory_mib, build.boot, build.fw_cfg)
        };
        Ok(Vm::start(&machine, &run_dir, Lifetime::KillWithParent).await?)
    }

    /// Boots a node until its owner has got the list of nodes.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn node(&self, node: &Image, way: Way, memory_mib: u32) -> Result<Measured> {
        let owner = Owner::generate();
        let told = parameters(&insecure(&owner))?;
        let vm = self.boot("node", node, way, memory_mib, vec![told]).await?;
        self.founded(&owner, vm).await
    }

    /// The same directly, with another kind of storage. The data partition has 1 GiB.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn node_with(
        &self,
        node: &Image,
        what: &str,
        storage: StorageSecurityPolicy,
    ) -> Result<Measured> {
        let owner = Owner::generate();
        let told = parameters(&owner.parameters(with_storage(storage)))?;
        let vm = self.boot(what, node, Way::Direct, MEMORY, vec![told]);
        self.founded(&owner, vm.await?).await
    }

    /// Waits until the owner of the node that boots has got the list of nodes.
    async fn founded(&self, owner: &Owner, vm: Vm) -> Result<Measured> {
        let curator = forwarded(&vm, names::PORT_CURATOR)?;
        vm.reached(Milestone::Home, BOOT_BOUND).await?;
        let nodes = async {
            let operator = owner.take_ownership(vec![curator], CALL).await?;
            let nodes = operator.nodes().await;
            nodes.map_err(LabError::call("GetNodes"))
        };
        let nodes = vm.while_running("an answer to GetNodes", BOOT_BOUND, nodes);
        let nodes = nodes.await?;
        let whole = vm.started().elapsed();
        let unexpected = |found| LabError::Unexpected {
            wanted: "one node in the list",
            found,
            tail: vm.tail().to_string(),
        };
        match nodes {
            Ok(nodes) if nodes.len() == 1 => {}
            Ok(nodes) => return Err(unexpected(format!("{}", nodes.len()))),
            Err(error) => return Err(unexpected(hearth_api::chain(&error))),
        }
        self.measured(vm, Phase::Home, whole).await
    }

    /// Boots the bare init until etcd has acknowledged its put.
    ///
    /// # Errors
    /// If that fails or times out.
    pub async fn bare(&self, bare: &Image, way: Way) -> Result<Measured> {
        let vm = self.boot("bare", bare, way, MEMORY, Vec::new()).await?;
        let put = vm.reached(Milestone::Consensus, BOOT_BOUND).await?;
        self.measured(vm, Phase::Consensus, put.at).await
    }

    /// Boots the bare init, which powers off; returns the time from QEMU's start to its end.
    ///
    /// # Errors
    /// If it ends in another way.
    pub async fn floor(&self, bare: &Image, way: Way) -> Result<Duration> {
        let (item, off) = BARE_MODE;
        let told = Item::text(item, off)?;
        let vm = self.boot("floor", bare, way, MEMORY, vec![told]).await?;
        let exit = vm.exited(BOOT_BOUND).await?;
        if exit.cause != Cause::GuestShutdown {
            return Err(LabError::Unexpected {
                wanted: "the machine to power off",
                found: exit.to_string(),
                tail: vm.tail().to_string(),
            });
        }
        remove_disk(&vm)?;
        Ok(exit.at)
    }

    async fn boot(
        &self,
        what: &str,
        image: &Image,
        way: Way,
        memory_mib: u32,
        fw_cfg: Vec<Item>,
    ) -> Result<Vm> {
        self.start(Build {
            name: format!("{what}-{}", way.word()),
            memory_mib,
            boot: way.boot(image)?,
            disk: &image.disk,
            disk_bytes: DISK_BYTES,
            ports: &[names::PORT_CURATOR],
            fw_cfg,
        })
        .await
    }

    /// Reads the measurements of a boot that has completed phase `last`, and cuts the power.
    async fn measured(&self, vm: Vm, last: Phase, whole: Duration) -> Result<Measured> {
        let mut timeline = Timeline::new();
        let mut lines = vm.console().lines();
        while timeline.get(last).is_none() {
            let Some(line) = lines.next().await else {
                return Err(LabError::Unexpected {
                    wanted: "all phases of the boot on the console",
                    found: "the end of the console".to_owned(),
                    tail: vm.tail().to_string(),
                });
            };
            timeline.observe(&line);
        }
        let usage = vm.usage().map_err(LabError::process("read QEMU's memory"));
        let peak = usage?.peak_rss;
        end(vm).await?;
        Ok(Measured {
            timeline,
            whole,
            peak,
        })
    }

    fn machine(&self, name: String, memory_mib: u32, boot: Boot, fw_cfg: Vec<Item>) -> Machine {
        Machine {
            cpus: CPUS,
            memory_mib,
            boot,
            fw_cfg,
            // A kernel that panics must not reboot before the timeout.
            on_reset: OnReset::Exit,
            ..Machine::new(name, self.accel)
        }
    }
}

/// A fw_cfg item with parameters.
///
/// # Errors
/// Never, because the name is valid.
pub fn parameters(parameters: &NodeParameters) -> Result<Item> {
    let bytes = parameters.encode_to_vec();
    Ok(Item::bytes(names::FW_CFG_PARAMETERS, bytes)?)
}

/// The parameters by which a node founds this owner's cluster. INSECURE, because what it is compared with does not
/// encrypt.
pub fn insecure(owner: &Owner) -> NodeParameters {
    owner.parameters(with_storage(StorageSecurityPolicy::NeedsInsecure))
}

/// The host endpoint of a machine's port.
///
/// # Errors
/// If the port is not forwarded.
pub fn forwarded(vm: &Vm, port: u16) -> Result<Endpoint> {
    let address = vm.forwarded(port).ok_or_else(|| LabError::Unplugged {
        machine: vm.name().to_owned(),
        what: "port on this host",
    })?;
    Ok(address.into())
}

/// Cuts the power of a machine and removes its disk; the logs are kept.
///
/// # Errors
/// If QEMU cannot be killed.
pub async fn end(vm: Vm) -> Result<()> {
    let cut = vm.power_cut().await;
    cut.map_err(LabError::process("kill QEMU"))?;
    remove_disk(&vm)
}

fn remove_disk(vm: &Vm) -> Result<()> {
    remove_file(&vm.run_dir().file(DISK))
}

fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).map_err(LabError::file("remove", path))
}

/// Removes the results of the last round.
///
/// # Errors
/// If it cannot be removed.
pub fn clear(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(LabError::file("remove", folder)(error))
        }
        _ => Ok(()),
    }
}
