//! The virtual network: an Ethernet switch for machines, without privileges.
//!
//! One process of ours (`hearth-switch`) is the whole network: a learning
//! switch with a port for each machine, a DHCP server, a gateway through which
//! the host reaches every machine at the machine's own address, a capture of
//! what is on the wire, and faults that are set while it runs. It is a process
//! of its own because machines that are left running outlive whoever launched
//! them, and so must what they are plugged into.
//!
//! ```no_run
//! # async fn network() -> Result<(), Box<dyn std::error::Error>> {
//! use std::path::Path;
//! use hearth_switch::{Faults, Lifetime, Mac, Network, NetworkOptions};
//!
//! let options = NetworkOptions::default();
//! let binary = Path::new("target/debug/hearth-switch");
//! let network = Network::start(binary, Path::new("net"), options.clone(), Lifetime::Tied).await?;
//! let mac = Mac::of_machine(0);
//! let port = network.add_port("node-0", mac, options.machine_address(0)).await?;
//! // … a machine whose card has this address is plugged into port.socket …
//! let curator = network.forward("node-0", 7835).await?;
//! network.set_faults("node-0", Faults { cut: true, ..Faults::default() }).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # The wire
//! QEMU's `-netdev stream` connects to a port's socket and sends and takes
//! frames, each behind its length (`framing`). A frame goes: sender's link,
//! switch, receiver's link. Faults belong to a link and act on both of its
//! directions, the gateway's traffic included; blocks belong to the switch and
//! act between two machines, so that machines can be parted from each other
//! while the host still sees them all. Whatever is done to a link, the
//! machine's card stays plugged in: frames disappear, nothing is refused.
//!
//! # Parts
//! | module | what |
//! |---|---|
//! | `address` | Ethernet addresses, and ports of the host |
//! | `framing`, `learning`, `faults`, `fabric`, `capture` | frames: their boundaries, their ways, their losses, their record; no I/O but the capture's file |
//! | `dhcp` | who has which address, as a pure state machine |
//! | `gateway`, `tunnel` | the host's place in the network, one TCP connection into it |
//! | `serve` | the process: sockets and tasks around all that |
//! | `control` | what can be asked of the process |
//! | `client` | [`Network`], the handle that asks |
//!
//! # Invariants
//! - Never waits for a machine: whoever does not take its frames loses them,
//!   when a bounded queue is full, and alone.
//! - Memory is bounded whatever machines and clients of the host do.
//! - A host port is bound by this process when it is asked for and never let
//!   go, so nobody can take it in between.
//! - No switch outlives its launcher unless it was explicitly detached.
//! - All random faults come from one seed, which the log and the status tell.
//!
//! # Why this design
//! TAP devices and bridges want privileges. QEMU's own user network (slirp)
//! as a gateway works on a switch, but is a process more for each network,
//! chooses addresses itself, and can forward to an address only that is known
//! before it starts. A TCP of our own would be the largest and least tried
//! part of the project; smoltcp is a maintained one, without I/O or clock of
//! its own, so it can be put behind the switch as one more endpoint. Each
//! forwarded connection is a stack of its own with one socket in it, found by
//! its port number: smoltcp looks for the socket of a packet among all, which
//! grows with the square of the connections.

mod address;
mod capture;
mod client;
mod control;
mod dhcp;
mod fabric;
mod faults;
mod framing;
mod gateway;
mod learning;
mod serve;
mod tunnel;

use std::{net::Ipv4Addr, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

pub use address::{Forwarded, Mac, NotMac};
pub use client::{Network, NetworkError};
pub use control::Refusal;
pub use faults::Faults;
pub use hearth_process::folder::FolderError;
pub use hearth_process::spawn::Lifetime;
pub use serve::{ServeError, run};

/// The gateway's Ethernet address. No machine's
/// ([`Mac::of_machine`]).
pub const GATEWAY_MAC: Mac = Mac([0x52, 0x54, 0x00, 0x47, 0x00, 0x01]);

/// What a network is like. Fixed when it is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkOptions {
    /// The gateway's address; also that of the DHCP server.
    pub gateway: Ipv4Addr,
    /// Length of the subnet's prefix, 8 to 30.
    pub prefix: u8,
    /// How long a DHCP lease lasts, in whole seconds, at least 2. Machines
    /// renew after half of it.
    pub lease: Duration,
    /// Repeats the random faults; chosen, if none.
    pub seed: Option<u64>,
    /// The capture ends at this size, in bytes; 0 for none. What came after
    /// is counted ([`CaptureStatus::dropped`]).
    pub capture_limit: u64,
}

impl Default for NetworkOptions {
    fn default() -> Self {
        Self {
            gateway: Ipv4Addr::new(10, 98, 0, 1),
            prefix: 24,
            // Short, so that everything that runs for a minute has renewed.
            lease: Duration::from_secs(30),
            seed: None,
            capture_limit: 256 << 20,
        }
    }
}

impl NetworkOptions {
    /// An address for the machine with this number: the tenth of the subnet
    /// and those that follow.
    pub fn machine_address(&self, number: u16) -> Ipv4Addr {
        let network = u32::from(self.gateway) & self.mask();
        Ipv4Addr::from(network.saturating_add(10 + u32::from(number)))
    }

    fn mask(&self) -> u32 {
        u32::MAX
            .checked_shl(32 - u32::from(self.prefix.min(32)))
            .unwrap_or(0)
    }

    /// Whether a machine can have this address.
    fn may_have(&self, address: Ipv4Addr) -> bool {
        let (mask, bits) = (self.mask(), u32::from(address));
        let host = bits & !mask;
        bits & mask == u32::from(self.gateway) & mask
            && host != 0
            && host != !mask
            && address != self.gateway
    }
}

/// A machine's place in the network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// What QEMU connects to, one machine
    /// at a time: the last to come is the one that is plugged in.
    pub socket: PathBuf,
    /// The address that DHCP gives the machine.
    pub address: Ipv4Addr,
}

/// What a network is and has done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkStatus {
    /// What it was started with.
    pub options: NetworkOptions,
    /// The seed of its random faults.
    pub seed: u64,
    /// Its ports, in the order in which they were added.
    pub ports: Vec<PortStatus>,
    /// Pairs of ports that do not reach each other.
    pub blocks: Vec<(String, String)>,
    /// Forwarded TCP connections that are open.
    pub connections: usize,
    /// The packet capture; `None` if there is none.
    pub capture: Option<CaptureStatus>,
}

impl NetworkStatus {
    /// The port of this name.
    pub fn port(&self, name: &str) -> Option<&PortStatus> {
        self.ports.iter().find(|port| port.name == name)
    }
}

/// What a port is and has done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortStatus {
    /// Its name.
    pub name: String,
    /// Its machine's Ethernet address.
    pub mac: Mac,
    /// The address that DHCP gives the machine.
    pub address: Ipv4Addr,
    /// The address that DHCP gave it last, until that lease ends. Another
    /// than `address` for as long as the machine has not noticed the change.
    pub leased: Option<Ipv4Addr>,
    /// Whether DHCP answers it.
    pub dhcp: bool,
    /// Whether a machine is plugged in.
    pub connected: bool,
    /// Its link's faults.
    pub faults: Faults,
    /// What came and went.
    pub counters: Counters,
    /// Where the host reaches its machine's ports.
    pub forwards: Vec<Forwarded>,
}

/// Frames of a port. Those that were lost are counted where they were lost:
/// at the port whose link or queue it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Frames that its machine sent.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that its machine was given.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Lost because the link is cut.
    pub dropped_cut: u64,
    /// Lost by chance.
    pub dropped_loss: u64,
    /// Lost because they were larger than the link's MTU.
    pub dropped_mtu: u64,
    /// Not delivered because the sender is blocked.
    pub dropped_blocked: u64,
    /// Lost because the machine did not take them fast enough.
    pub dropped_overflow: u64,
    /// Lost because no machine is plugged in.
    pub dropped_unplugged: u64,
    /// Sent by the machine and no Ethernet frames.
    pub dropped_malformed: u64,
}

/// The packet capture: what a mirror port of the switch would see. Frames that
/// were lost on the sender's link are not in it, those that are lost on the
/// receiver's are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureStatus {
    /// The file, in the format of pcap.
    pub path: PathBuf,
    /// Frames that are in it, or will be within a second.
    pub frames: u64,
    /// Frames that are not, because it had reached its size or could not be
    /// written.
    pub dropped: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_have_addresses_of_the_subnet() {
        let options = NetworkOptions::default();
        assert_eq!(options.machine_address(0), Ipv4Addr::new(10, 98, 0, 10));
        for number in 0..200 {
            assert!(
                options.may_have(options.machine_address(number)),
                "{number}"
            );
        }
        for other in ["10.98.0.0", "10.98.0.1", "10.98.0.255", "10.98.1.10"] {
            let address = other.parse().expect("an address");
            assert!(!options.may_have(address), "{other}");
        }
    }
}
