//! The configuration of a machine, and its installation.

use std::fs;
use std::path::Path;

use anyhow::Context;
use hearth_api::names;
use hearth_api::v1::{ClusterConfiguration, NetworkConfig, StorageSecurityPolicy};
use hearth_lab::owner::with_storage;
use hearth_lab::{Owner, dual_stack, tool};
use hearth_qemu::accel::Accel;
use hearth_qemu::artifacts::Image;
use hearth_qemu::command::{Boot, CommandLine, Machine, Rtc, TpmInterface};
use hearth_qemu::disk::{Disk, Format, make_overlay};
use hearth_qemu::firmware::Firmware;
use hearth_qemu::hardware::{Card, DiskBus};
use hearth_qemu::network::{Forward, Link, Mac, Nic, PortForward, UserNetwork};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::smbios::Smbios;
use hearth_qemu::switch::NetworkOptions;

use super::Node;
use crate::places::Occupant;
use crate::{Outcome, TestCtx};

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
    is_logged: bool,
    has_twin: bool,
    larger_by: u64,
    /// The bytes of [`SECOND_DISK`].
    second_disk: Option<u64>,
    configuration: ClusterConfiguration,
    manifests: Vec<String>,
    forwards: Vec<PortForward>,
    runs_kubernetes: bool,
    /// Its addresses; `None`: by DHCP.
    network_config: Option<NetworkConfig>,
}

/// The name of a node's second disk in its folder.
pub const SECOND_DISK: &str = "second.img";

/// The disk of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An overlay on the image.
    Overlay,
    /// A copy of the image, which the test can read and change.
    Raw,
    /// Zeros, as large as the image.
    Blank,
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
            is_logged: false,
            has_twin: false,
            larger_by: 0,
            second_disk: None,
            configuration: with_storage(StorageSecurityPolicy::NeedsInsecure),
            manifests: Vec::new(),
            forwards: Vec::new(),
            runs_kubernetes: false,
            network_config: None,
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

    /// With another network card, the one with this number, and this link.
    pub fn card(mut self, number: u16, link: Link) -> Self {
        self.machine.nics.push(Nic {
            mac: Mac::of_machine(number),
            link,
        });
        self
    }

    /// With a network configuration in its parameters.
    pub fn network_config(mut self, config: NetworkConfig) -> Self {
        self.network_config = Some(config);
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

    /// With a new disk, on which nothing is; the test can read and change it while the machine is off.
    pub fn blank_disk(mut self) -> Self {
        self.disk = Kind::Blank;
        self
    }

    /// With a disk of large logical sectors; the image must be for such a disk.
    pub fn sector_bytes(mut self, sector_bytes: u32) -> Self {
        self.sector_bytes = sector_bytes;
        self
    }

    /// With a log of what it writes to its disk.
    pub fn logged(mut self) -> Self {
        self.is_logged = true;
        self
    }

    /// Firmware boots from the first network card.
    pub fn boots_from_network(mut self) -> Self {
        self.machine.boots_from_network = true;
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

    /// With a second disk, an empty one of this many bytes ([`SECOND_DISK`]).
    pub fn second_disk(mut self, bytes: u64) -> Self {
        self.second_disk = Some(bytes);
        self
    }

    /// With other settings of the cluster that it founds.
    pub fn configured(mut self, change: impl FnOnce(&mut ClusterConfiguration)) -> Self {
        change(&mut self.configuration);
        self
    }

    /// With an address of each family in the network of several machines, as the one with this number, and ranges of both
    /// families for pods and services in the cluster that it founds.
    pub fn dual_stack(self, number: u16) -> Self {
        let config = dual_stack::network_config(&NetworkOptions::default(), number);
        Self {
            network_config: Some(config),
            ..self.configured(dual_stack::configure)
        }
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
            Kind::Blank => {
                let path = run_dir.file("disk.img");
                fs::File::create_new(&path)?.set_len(bytes)?;
                Disk::new(path, Format::Raw)
            }
        };
        self.machine.boot = match self.uefi {
            true => Boot::Uefi(Firmware::locate()?),
            false => self.image.direct(),
        };
        let log = self.is_logged.then(|| run_dir.file("writes.log"));
        if let Some(path) = &log {
            fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        self.machine.disks = vec![Disk {
            sector_bytes: self.sector_bytes,
            log,
            ..disk
        }];
        if self.has_twin {
            let path = run_dir.file("twin.img");
            copy(&self.machine.disks[0].path, &path).await?;
            self.machine.disks.push(Disk::new(path, Format::Raw));
        }
        if let Some(bytes) = self.second_disk {
            let path = run_dir.file(SECOND_DISK);
            fs::File::create_new(&path)?.set_len(bytes)?;
            self.machine.disks.push(Disk::new(path, Format::Raw));
        }
        let owner = Owner::create(run_dir.path())?;
        let parameters = owner.founding(self.configuration, self.manifests);
        let mut node = Node {
            parameters: None,
            network_config: self.network_config,
            failpoint: None,
            more_fw_cfg: Vec::new(),
            smbios: Smbios::default(),
            machine: self.machine,
            forwards: self.forwards,
            run_dir,
            owner,
        };
        node.tell(&parameters);
        Ok(node)
    }
}

/// Copies a sparse file sparsely.
pub(crate) async fn copy(from: &Path, to: &Path) -> Outcome {
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
