//! The network of a cluster: one switch, with a port for each machine.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use hearth_switch::{Lifetime, Network, NetworkError, NetworkOptions};

use super::ClusterError;
use crate::network::{Link, Mac, Nic, PortForward};

/// Its folder in the cluster's. It has no machine record, so it is not taken for a machine.
const FOLDER: &str = "net";
/// Exists in the folder from the first start on.
const LOG: &str = "switch.log";

/// The specification of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkSpec {
    /// Path of the program `hearth-switch`.
    pub switch: PathBuf,
    /// Options of the network.
    pub options: NetworkOptions,
    /// A slot for each machine that is, or may be, connected. All have their ports from the start, so that one
    /// machine's parameters can name the others.
    pub places: Vec<Place>,
}

/// A machine's slot in the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the machine.
    pub machine: String,
    /// Number that its Ethernet and IP addresses are derived from.
    pub number: u16,
    /// Its ports that are forwarded to the host.
    pub forwards: Vec<u16>,
}

/// A port of the switch, for one machine.
#[derive(Clone, Debug)]
pub(super) struct Plug {
    mac: Mac,
    socket: PathBuf,
    pub(super) address: Ipv4Addr,
    pub(super) forwards: Vec<PortForward>,
}

impl Plug {
    /// The machine's network card.
    pub(super) fn nic(&self) -> Nic {
        Nic {
            mac: self.mac,
            link: Link::Switch {
                socket: self.socket.clone(),
            },
        }
    }
}

/// A running network with its ports.
#[derive(Debug)]
pub(super) struct Wired {
    pub(super) network: Network,
    plugs: BTreeMap<String, Plug>,
}

impl Wired {
    /// Starts the network. A network that was left running without machines is ended.
    pub(super) async fn start(
        state: &Path,
        spec: &NetworkSpec,
        lifetime: Lifetime,
    ) -> Result<Self, ClusterError> {
        end(state).await?;
        let options = spec.options.clone();
        let network = Network::start(&spec.switch, &folder(state), options, lifetime).await?;
        Self::with_ports(network, spec).await
    }

    /// Attaches to the network that was left running.
    pub(super) async fn find(state: &Path, spec: &NetworkSpec) -> Result<Self, ClusterError> {
        let network = Network::attach(&folder(state)).await?;
        Self::with_ports(network, spec).await
    }

    async fn with_ports(network: Network, spec: &NetworkSpec) -> Result<Self, ClusterError> {
        let mut plugs = BTreeMap::new();
        for place in &spec.places {
            let mac = Mac::of_machine(place.number);
            let address = spec.options.machine_address(place.number);
            let port = network.add_port(&place.machine, mac, address).await?;
            let mut forwards = Vec::new();
            for &guest in &place.forwards {
                let host: SocketAddr = network.forward(&place.machine, guest).await?;
                forwards.push(PortForward { guest, host });
            }
            let plug = Plug {
                mac,
                socket: port.socket,
                address: port.address,
                forwards,
            };
            plugs.insert(place.machine.clone(), plug);
        }
        Ok(Self { network, plugs })
    }

    /// The port of this machine.
    pub(super) fn plug(&self, machine: &str) -> Option<&Plug> {
        self.plugs.get(machine)
    }
}

/// The network of the cluster in this folder, if it is running.
///
/// # Errors
/// If it is running and does not answer.
pub async fn network(state: &Path) -> Result<Option<Network>, ClusterError> {
    match Network::attach(&folder(state)).await {
        Ok(network) => Ok(Some(network)),
        Err(NetworkError::NotRunning(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Ends the network of the cluster in this folder, whoever started it. True: it was running. Running machines stay
/// disconnected.
///
/// # Errors
/// If it cannot be ended.
pub async fn end(state: &Path) -> Result<bool, ClusterError> {
    match network(state).await? {
        Some(network) => {
            network.stop().await?;
            Ok(true)
        }
        None => Ok(false),
    }
}

/// Removes its files; a folder without a switch's log is not removed.
pub(super) fn remove(state: &Path) -> Result<(), ClusterError> {
    let folder = folder(state);
    if !folder.join(LOG).exists() {
        return Ok(());
    }
    fs::remove_dir_all(&folder).map_err(ClusterError::file("remove", &folder))
}

/// Path of its folder.
pub(super) fn folder(state: &Path) -> PathBuf {
    state.join(FOLDER)
}
