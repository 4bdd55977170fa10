//! What the machines of a cluster are made of.

use anyhow::{Context, Result, bail};
use hearth_api::names;
use hearth_qemu::accel;
use hearth_qemu::cluster::{Member, NetworkSpec, Place};
use hearth_qemu::command::{Boot, Machine};
use hearth_qemu::disk::Cache;
use hearth_qemu::firmware::Firmware;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::switch::NetworkOptions;
use std::net::Ipv4Addr;

use super::state::{Built, Founding, Make};
use crate::image::{self, Flavour};
use crate::kubernetes::{self, Bundle};
use crate::program;
use crate::ui::Ui;

/// The gateway of the machines' network. Any cluster's: networks of two clusters do not meet.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// The name of the machine with this number, from 1.
pub fn name(number: u16) -> String {
    format!("node-{number}")
}

/// The number of the machine that is meant: `node-2`, or `2`.
pub fn number(name: &str, founding: &Founding) -> Result<u16> {
    let digits = name.strip_prefix("node-").unwrap_or(name);
    match digits.parse() {
        Ok(number) if (1..=founding.nodes).contains(&number) => Ok(number),
        _ => bail!(
            "there is no machine {name:?}; this cluster has {}",
            match founding.nodes {
                1 => self::name(1),
                nodes => format!("{} to {}", self::name(1), self::name(nodes)),
            }
        ),
    }
}

/// What it takes to make a machine of a cluster.
pub struct Workshop {
    make: Make,
    accel: accel::Accel,
    built: Built,
}

impl Workshop {
    /// Builds what machines of this make boot, and what they are plugged into.
    pub fn open(ui: &Ui, make: &Make, bundle: Option<&Bundle>) -> Result<Workshop> {
        let extensions = bundle.map(kubernetes::extension).transpose()?;
        let artifacts = image::ensure_extended(ui, make.flavour(), extensions.as_slice())?;
        let built = Built {
            image: artifacts.image,
            kernel: artifacts.kernel,
            initramfs: artifacts.initramfs,
            cmdline: artifacts.cmdline,
            switch: program::switch(ui)?,
        };
        Workshop::of(make, &built)
    }

    /// As the last run had it, without building anything.
    pub fn of_last_run(founding: &Founding) -> Result<Workshop> {
        match (&founding.make, &founding.built) {
            (Some(make), Some(built)) => Workshop::of(make, built),
            _ => {
                bail!("it is not known what the machines are made of; `cargo xtask run` boots them")
            }
        }
    }

    fn of(make: &Make, built: &Built) -> Result<Workshop> {
        let choice: accel::Choice = make.accel.parse().context("--accel")?;
        Ok(Workshop {
            make: make.clone(),
            accel: accel::choose(choice)?.accel,
            built: built.clone(),
        })
    }

    /// Of each machine.
    pub fn memory_mib(&self) -> u32 {
        self.make.memory_mib
    }

    /// What was built.
    pub fn built(&self) -> &Built {
        &self.built
    }

    /// The network, with a place for each node of the cluster.
    pub fn network(&self, founding: &Founding) -> NetworkSpec {
        let mut forwards = vec![names::PORT_CURATOR, names::PORT_NODE_MANAGEMENT];
        if self.make.debug {
            forwards.push(names::PORT_DEBUG);
        }
        if self.make.kubernetes {
            forwards.push(names::PORT_KUBERNETES);
        }
        let place = |number| Place {
            machine: name(number),
            number,
            forwards: forwards.clone(),
        };
        NetworkSpec {
            switch: self.built.switch.clone(),
            options: NetworkOptions {
                gateway: GATEWAY,
                ..NetworkOptions::default()
            },
            places: (1..=founding.nodes).map(place).collect(),
        }
    }

    /// A machine. One that has been a member needs no parameters.
    pub fn member(
        &self,
        founding: &Founding,
        number: u16,
        parameters: Option<Vec<u8>>,
    ) -> Result<Member> {
        let boot = match self.make.direct {
            true => Boot::Direct {
                kernel: self.built.kernel.clone(),
                initrd: Some(self.built.initramfs.clone()),
                append: self.built.cmdline.clone(),
            },
            false => Boot::Uefi(Firmware::locate()?),
        };
        let item = |bytes| Item::bytes(names::FW_CFG_PARAMETERS, bytes);
        let machine = Machine {
            cpus: self.make.cpus,
            memory_mib: self.make.memory_mib,
            boot,
            fw_cfg: parameters.map(item).transpose()?.into_iter().collect(),
            ..Machine::new(name(number), self.accel)
        };
        Ok(Member {
            machine,
            image: self.built.image.clone(),
            disk_bytes: Some(founding.disk_bytes),
            cache: Cache::Writeback,
        })
    }
}

impl Make {
    /// Which image.
    pub fn flavour(&self) -> Flavour {
        match self.debug {
            true => Flavour::Debug,
            false => Flavour::Release,
        }
    }
}
