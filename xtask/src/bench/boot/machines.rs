//! The machines that are measured: alike in everything but what boots on them.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_api::console::Milestone;
use hearth_api::names;
use hearth_qemu::accel::Accel;
use hearth_qemu::command::{Boot, Machine, OnReset};
use hearth_qemu::disk::{Disk, Format, make_overlay};
use hearth_qemu::firmware::Firmware;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::network::{Forward, Link, Mac, Nic, UserNetwork};
use hearth_qemu::phases::{Phase, Timeline};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::vm::{Cause, Lifetime, Vm};

use super::owner::Owner;
use crate::image::Artifacts;

/// Of every machine that is measured, in MiB.
pub const MEMORY: u32 = 512;
/// Of every machine that is measured.
pub const CPUS: u32 = 2;
/// As large as `cargo xtask run` makes it: the data partition grows to its end at the first boot.
const DISK_BYTES: u64 = 4 << 30;
/// Its name in a machine's folder.
const DISK: &str = "disk.qcow2";
/// For a whole boot; it takes seconds.
const BOUND: Duration = Duration::from_secs(300);
/// The bare init's fw_cfg item, and its word for "only power off".
const BARE_MODE: (&str, &str) = ("opt/dev.hearth/bare-init", "off");

/// How machines start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// QEMU loads the kernel.
    Direct,
    /// Firmware finds the UKI on the disk.
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
}

/// A boot that was measured.
pub struct Measured {
    /// What it came through, as its console told.
    pub timeline: Timeline,
    /// From QEMU's start to what the boot was for.
    pub whole: Duration,
    /// The most memory QEMU had resident, in bytes.
    pub peak: u64,
}

/// Makes and boots the machines, each with a new disk and new firmware variables.
pub struct Machines {
    /// Ours.
    pub node: Artifacts,
    /// What it is held against.
    pub bare: Artifacts,
    /// What they run on.
    pub accel: Accel,
    /// Where they leave their logs.
    pub folder: PathBuf,
}

impl Machines {
    /// Boots a node until its owner has been told its nodes.
    pub async fn node(&self, way: Way, memory_mib: u32) -> Result<Measured> {
        let owner = Owner::new();
        let item = Item::bytes(names::FW_CFG_PARAMETERS, owner.parameters())?;
        let vm = self.start(way, "node", &self.node, memory_mib, vec![item]);
        let vm = vm.await?;
        let curator = vm
            .forwarded(names::PORT_CURATOR)
            .context("QEMU forwards no port to the curator")?;
        vm.reached(Milestone::Home, BOUND).await?;
        let nodes = vm.while_running("an answer to GetNodes", BOUND, owner.nodes(curator));
        let nodes = nodes.await?;
        let whole = vm.started().elapsed();
        let nodes = nodes.with_context(|| format!("the node's console:\n{}", vm.tail()))?;
        ensure!(
            nodes.len() == 1,
            "{} nodes are listed, not one",
            nodes.len()
        );
        self.measured(vm, Phase::Home, whole).await
    }

    /// Boots the bare init until etcd has acknowledged its put.
    pub async fn bare(&self, way: Way) -> Result<Measured> {
        let vm = self.start(way, "bare", &self.bare, MEMORY, Vec::new());
        let vm = vm.await?;
        let put = vm.reached(Milestone::Consensus, BOUND).await?;
        self.measured(vm, Phase::Consensus, put.at).await
    }

    /// Boots the bare init, which powers off; seconds from QEMU's start to its end.
    pub async fn floor(&self, way: Way) -> Result<f64> {
        let (item, off) = BARE_MODE;
        let item = Item::text(item, off)?;
        let vm = self.start(way, "floor", &self.bare, MEMORY, vec![item]);
        let vm = vm.await?;
        let exit = vm.exited(BOUND).await?;
        ensure!(
            exit.cause == Cause::GuestShutdown,
            "wanted the machine to switch itself off: {exit}\n{}",
            vm.tail()
        );
        remove_disk(&vm)?;
        Ok(exit.at.as_secs_f64())
    }

    async fn start(
        &self,
        way: Way,
        what: &str,
        artifacts: &Artifacts,
        memory_mib: u32,
        fw_cfg: Vec<Item>,
    ) -> Result<Vm> {
        let name = format!("{what}-{}", way.word());
        let folder = self.folder.join(&name);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", folder.display()));
            }
            _ => {}
        }
        let run_dir = RunDir::create(&folder)?;
        let overlay = run_dir.file(DISK);
        make_overlay(&artifacts.image, &overlay, Some(DISK_BYTES)).await?;
        let network = UserNetwork {
            restricted: false,
            forwards: vec![Forward::any(names::PORT_CURATOR)],
        };
        let machine = Machine {
            cpus: CPUS,
            memory_mib,
            boot: boot(way, artifacts)?,
            disks: vec![Disk::new(overlay, Format::Qcow2)],
            nics: vec![Nic {
                mac: Mac::of_machine(1),
                link: Link::User(network),
            }],
            fw_cfg,
            // A kernel that panics must not boot again until the time is up.
            on_reset: OnReset::Exit,
            ..Machine::new(name, self.accel)
        };
        Ok(Vm::start(&machine, &run_dir, Lifetime::Tied).await?)
    }

    /// Takes what there is to know of a boot that has come through `last`, and pulls the plug.
    async fn measured(&self, vm: Vm, last: Phase, whole: Duration) -> Result<Measured> {
        let mut timeline = Timeline::new();
        let mut lines = vm.console().lines();
        while timeline.get(last).is_none() {
            let line = lines.next().await.context("the console has ended")?;
            timeline.observe(&line);
        }
        let peak = vm.usage().context("QEMU's memory")?.peak_rss;
        vm.power_cut().await?;
        remove_disk(&vm)?;
        Ok(Measured {
            timeline,
            whole,
            peak,
        })
    }
}

/// It goes with its machine; the logs stay.
fn remove_disk(vm: &Vm) -> Result<()> {
    fs::remove_file(vm.run_dir().file(DISK)).context("cannot remove a machine's disk")
}

fn boot(way: Way, artifacts: &Artifacts) -> Result<Boot> {
    Ok(match way {
        Way::Direct => Boot::Direct {
            kernel: artifacts.kernel.clone(),
            initrd: Some(artifacts.initramfs.clone()),
            append: artifacts.cmdline.clone(),
        },
        Way::Uefi => Boot::Uefi(Firmware::locate()?),
    })
}
