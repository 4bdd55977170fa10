//! The image and hardware of a cluster's machines.

use std::net::Ipv4Addr;
use std::path::Path;

use hearth_api::names;
use hearth_api::v1::NodeParameters;
use hearth_qemu::accel::{self, Accel};
use hearth_qemu::cluster::{Member, NetworkSpec, Place};
use hearth_qemu::command::{Boot, Machine, TpmInterface};
use hearth_qemu::disk::Cache;
use hearth_qemu::firmware::Firmware;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::switch::{NetworkOptions, WayOut};

use prost::Message as _;

use crate::record::{Artifacts, ClusterRecord, MachineConfig};
use crate::{LabError, Result, dual_stack};

/// The gateway of the machines' network. All clusters can use the same: their networks are separate.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// The name of the machine with this number, from 1.
pub fn name(number: u16) -> String {
    format!("node-{number}")
}

/// The number of the machine with this name: `node-2`, or `2`.
///
/// # Errors
/// If the cluster has no such machine.
pub fn number(name: &str, record: &ClusterRecord) -> Result<u16> {
    let digits = name.strip_prefix("node-").unwrap_or(name);
    match digits.parse() {
        Ok(number) if (1..=record.nodes).contains(&number) => Ok(number),
        _ => Err(LabError::NoMachine {
            name: name.to_owned(),
            has: match record.nodes {
                1 => self::name(1),
                nodes => format!("{} to {}", self::name(1), self::name(nodes)),
            },
        }),
    }
}

/// The virtual address of the API servers of a cluster on this host.
pub(crate) fn api_address() -> Ipv4Addr {
    let options = NetworkOptions {
        gateway: GATEWAY,
        ..NetworkOptions::default()
    };
    options.shared_address()
}

/// A network with this many slots, whose ports in the list are forwarded to the host.
pub fn network(
    switch: &Path,
    options: NetworkOptions,
    nodes: u16,
    forwards: &[u16],
) -> NetworkSpec {
    let place = |number| Place {
        machine: name(number),
        number,
        forwards: forwards.to_vec(),
    };
    NetworkSpec {
        switch: switch.to_owned(),
        options,
        places: (1..=nodes).map(place).collect(),
    }
}

impl Artifacts {
    /// How a machine boots from them: directly by QEMU, or by firmware.
    fn boot(&self, direct: bool) -> Result<Boot> {
        Ok(match direct {
            true => Boot::Direct {
                kernel: self.kernel.clone(),
                initrd: Some(self.initramfs.clone()),
                append: self.cmdline.clone(),
            },
            false => Boot::Uefi(Firmware::locate()?),
        })
    }
}

/// The configuration shared by all machines of a cluster.
pub struct Blueprint {
    config: MachineConfig,
    artifacts: Artifacts,
    accel: Accel,
}

impl Blueprint {
    /// For machines of this kind with these artifacts.
    ///
    /// # Errors
    /// If the requested accelerator is not usable.
    pub fn new(config: MachineConfig, artifacts: Artifacts) -> Result<Blueprint> {
        let choice: accel::Choice = config.accel.parse()?;
        Ok(Blueprint {
            accel: accel::choose(choice)?.accel,
            config,
            artifacts,
        })
    }

    /// As in the last run, without building anything.
    ///
    /// # Errors
    /// If there was none.
    pub fn of_last_run(record: &ClusterRecord) -> Result<Blueprint> {
        match (&record.config, &record.artifacts) {
            (Some(config), Some(artifacts)) => Blueprint::new(config.clone(), artifacts.clone()),
            _ => Err(LabError::Unmade),
        }
    }

    /// The hardware configuration.
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// The network, with a slot for each node of the cluster, and with a way out unless the machines are offline.
    pub fn network(&self, record: &ClusterRecord) -> NetworkSpec {
        let mut forwards = vec![
            names::PORT_CURATOR,
            names::PORT_NODE_MANAGEMENT,
            names::PORT_UNLOCK,
        ];
        if self.config.debug {
            forwards.push(names::PORT_DEBUG);
        }
        if self.config.kubernetes {
            forwards.push(names::PORT_KUBERNETES);
        }
        let options = self.network_options();
        network(&self.artifacts.switch, options, record.nodes, &forwards)
    }

    fn network_options(&self) -> NetworkOptions {
        NetworkOptions {
            gateway: GATEWAY,
            way_out: (!self.config.offline).then(WayOut::default),
            ..NetworkOptions::default()
        }
    }

    /// The parameters of the machine with this number, which in a dual-stack cluster have its addresses.
    fn with_addresses(&self, parameters: Vec<u8>, number: u16) -> Result<Vec<u8>> {
        let mut parameters = NodeParameters::decode(&parameters[..])?;
        let config = dual_stack::network_config(&self.network_options(), number);
        parameters.network_config = Some(config);
        Ok(parameters.encode_to_vec())
    }

    /// A machine. A former member needs no parameters.
    ///
    /// # Errors
    /// If no firmware is found, or the parameters cannot be read.
    pub fn member(
        &self,
        record: &ClusterRecord,
        number: u16,
        parameters: Option<Vec<u8>>,
    ) -> Result<Member> {
        let item = |bytes| Item::bytes(names::FW_CFG_PARAMETERS, bytes);
        let parameters = match (parameters, record.dual_stack) {
            (Some(parameters), true) => Some(self.with_addresses(parameters, number)?),
            (parameters, _) => parameters,
        };
        let (disk_bus, card) = (self.config.disk_bus, self.config.card);
        let machine = Machine {
            disk_bus,
            card,
            // Whoever asks for a machine without virtio gets none: its random numbers come from the CPU.
            rng: disk_bus.is_virtio() || card.is_virtio(),
            rtc: self.config.clock.clone(),
            cpus: self.config.cpus,
            memory_mib: self.config.memory_mib,
            boot: self.artifacts.boot(self.config.direct)?,
            tpm: self.config.tpm.then_some(TpmInterface::Tis),
            fw_cfg: parameters.map(item).transpose()?.into_iter().collect(),
            ..Machine::new(name(number), self.accel)
        };
        Ok(Member {
            machine,
            image: self.artifacts.image.clone(),
            disk_bytes: Some(record.disk_bytes),
            cache: Cache::Writeback,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RunOptions;

    #[test]
    fn a_machine_is_named_or_numbered() {
        let record = |nodes| {
            ClusterRecord::new(&RunOptions {
                nodes: Some(nodes),
                ..RunOptions::default()
            })
        };
        assert_eq!(number("node-2", &record(3)).unwrap(), 2);
        assert_eq!(number("3", &record(3)).unwrap(), 3);
        for wrong in ["node-4", "0", "node-", "x"] {
            let error = number(wrong, &record(3)).unwrap_err().to_string();
            assert!(error.ends_with("node-1 to node-3"), "{error}");
        }
        let error = number("2", &record(1)).unwrap_err().to_string();
        assert!(error.ends_with("this cluster has node-1"), "{error}");
    }
}
