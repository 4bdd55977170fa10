//! The virtual network: an Ethernet switch for machines, without privileges.
//!
//! One process (`hearth-switch`) is the whole network: a learning switch with a port for each machine, a DHCP server, a
//! gateway through which the host reaches every machine at the machine's own address and, where the options have it,
//! machines reach other networks, a packet capture, and faults that can be set while it runs. It is a separate process
//! because machines that are left running outlive their launcher, and so must their network.
//!
//! ```no_run
//! # async fn network() -> Result<(), Box<dyn std::error::Error>> {
//! use std::path::Path;
//! use hearth_switch::{Faults, Lifetime, Mac, Network, NetworkOptions};
//!
//! let options = NetworkOptions::default();
//! let binary = Path::new("target/debug/hearth-switch");
//! let network = Network::start(binary, Path::new("net"), options.clone(), Lifetime::KillWithParent).await?;
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
//! QEMU's `-netdev stream` connects to a port's socket and sends and receives frames, each preceded by its length
//! (`framing`). The path of a frame is: sender's link, switch, receiver's link. Faults belong to a link and apply to
//! both of its directions, including traffic of the gateway; blocks belong to the switch and apply between two
//! machines, so that machines can be separated from each other while the host still reaches all of them. Whatever is
//! done to a link, the machine's card stays connected: frames are lost, nothing is refused.
//!
//! # Parts
//! | module | what |
//! |---|---|
//! | `address` | Ethernet addresses, and ports of the host |
//! | `framing`, `learning`, `faults`, `fabric`, `capture` | frames: framing, forwarding, faults, capture; no I/O except the capture's file |
//! | `dhcp`, `dhcp6` | the DHCP servers, as pure state machines |
//! | `gateway`, `wire` | the network's one host that is no machine, the device of its stacks |
//! | `tunnel` | one TCP connection between the host and a machine, in either direction |
//! | `way_out` | what becomes of packets to other networks; no I/O |
//! | `serve` | the process: sockets and tasks |
//! | `control` | the control protocol of the process |
//! | `client` | [`Network`], the handle of clients |
//!
//! # Invariants
//! - Never waits for a machine: a machine that does not read its frames loses them, and only its own, when a bounded
//!   queue is full.
//! - Memory is bounded whatever machines and clients of the host do.
//! - A host port is bound by this process on request and kept bound, so no other process can take it in between.
//! - Without a way out, nothing that machines send leaves this process, except as answers to connections of the host.
//! - With one, no machine reaches the host's loopback by an address that the options do not name.
//! - No switch outlives its launcher unless it was explicitly detached.
//! - All random faults come from one seed, which is in the log and the status.
//!
//! # Why this design
//! TAP devices and bridges need privileges. QEMU's own user-mode network (slirp) works as a gateway on a switch, but
//! needs one more process for each network, chooses addresses itself, and can only forward to an address that is known
//! before it starts. A TCP of our own would be the largest and least tested part of the project; smoltcp is maintained,
//! and has no I/O or clock of its own, so it can be attached to the switch as one more endpoint. Each forwarded
//! connection is a stack of its own with a single socket, found by its port number: smoltcp searches all sockets for
//! that of a packet, whose cost grows with the square of the connections.

mod address;
mod capture;
mod client;
mod control;
mod dhcp;
mod dhcp6;
mod fabric;
mod faults;
mod framing;
mod gateway;
mod lacp;
mod learning;
#[cfg(test)]
mod packets;
mod serve;
mod tunnel;
mod way_out;
mod wire;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use address::{Mac, NotMac, PortForward};
pub use client::{Network, NetworkError};
pub use control::Refusal;
pub use faults::Faults;
pub use hearth_process::folder::FolderError;
pub use hearth_process::spawn::Lifetime;
pub use serve::{ServeError, run};
pub use way_out::WayOut;
pub use way_out::proxy::ProxySettings;

/// The gateway's Ethernet address, which no machine has ([`Mac::of_machine`]).
pub const GATEWAY_MAC: Mac = Mac([0x52, 0x54, 0x00, 0x47, 0x00, 0x01]);

/// The gateway's link-local address: the one that belongs to its Ethernet address (RFC 4291, appendix A).
const GATEWAY_LINK_LOCAL: Ipv6Addr = {
    let [a, b, c, d, e, f] = GATEWAY_MAC.0;
    let id = [a ^ 2, b, c, 0xff, 0xfe, d, e, f];
    Ipv6Addr::from_bits(0xfe80 << 112 | u64::from_be_bytes(id) as u128)
};

/// The default of [`NetworkOptions::gateway6`]: in a unique local prefix (RFC 4193) of our own.
const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd68, 0x6561, 0x7274, 0, 0, 0, 0, 1);

const PREFIX6: u8 = NetworkOptions::PREFIX6;
const MASK6: u128 = u128::MAX << (128 - PREFIX6);

/// Options of a network. Fixed when it is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkOptions {
    /// The gateway's address; also that of the DHCP server.
    pub gateway: Ipv4Addr,
    /// Length of the subnet's prefix, 8 to 30.
    pub prefix: u8,
    /// The gateway's IPv6 address, whose first 64 bits are the prefix of the network's IPv6 subnet.
    #[serde(default = "gateway6")]
    pub gateway6: Ipv6Addr,
    /// How machines get addresses that they do not give themselves.
    #[serde(default)]
    pub addressing: Addressing,
    /// Duration of a lease, in whole seconds, at least 2. Machines renew after half of it.
    pub lease: Duration,
    /// The URL of what firmware boots by HTTP, as DHCP tells it to those who ask. None: no firmware boots from this network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_url: Option<String>,
    /// Seed of the random faults, for repeating them; chosen, if none.
    pub seed: Option<u64>,
    /// Maximum size of the capture in bytes; 0 for no capture. Later frames are counted ([`CaptureStatus::dropped`]).
    pub capture_limit: u64,
    /// How machines reach other networks, by this host; with it, DHCP announces the gateway as the resolver. None: they
    /// do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub way_out: Option<WayOut>,
}

fn gateway6() -> Ipv6Addr {
    GATEWAY6
}

/// How machines get their addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Addressing {
    /// IPv4 addresses by DHCP; the gateway does not advertise itself as an IPv6 router.
    #[default]
    Dhcp,
    /// IPv6 addresses only, which machines make themselves of the prefix that the gateway advertises to those who ask for
    /// routers. It advertises itself as their name server as well.
    RouterAdvertisements,
    /// IPv6 addresses only, by DHCPv6, of which the gateway tells those who ask for routers. It is their name server as well.
    Dhcp6,
}

impl Default for NetworkOptions {
    fn default() -> Self {
        Self {
            gateway: Ipv4Addr::new(10, 98, 0, 1),
            prefix: 24,
            gateway6: GATEWAY6,
            addressing: Addressing::default(),
            // Short, so that every machine has renewed within a minute.
            lease: Duration::from_secs(30),
            boot_url: None,
            seed: None,
            capture_limit: 256 << 20,
            way_out: None,
        }
    }
}

impl NetworkOptions {
    /// Length of the IPv6 subnet's prefix.
    pub const PREFIX6: u8 = 64;

    /// The address for the machine with this number: from the tenth of the subnet on.
    pub fn machine_address(&self, number: u16) -> Ipv4Addr {
        let network = u32::from(self.gateway) & self.mask();
        Ipv4Addr::from(network.saturating_add(10 + u32::from(number)))
    }

    /// The IPv6 address that the machine with this number may give itself; none is announced to it.
    pub fn machine_address6(&self, number: u16) -> Ipv6Addr {
        let network = self.gateway6.to_bits() & MASK6;
        Ipv6Addr::from_bits(network + 10 + u128::from(number))
    }

    /// An address of the subnet that no machine has for itself ([`Self::machine_address`]): for machines that have it
    /// in turn.
    pub fn shared_address(&self) -> Ipv4Addr {
        let network = u32::from(self.gateway) & self.mask();
        Ipv4Addr::from(network.saturating_add(5))
    }

    /// The gateway's address of the same version as this one.
    fn gateway_for(&self, address: IpAddr) -> IpAddr {
        match address {
            IpAddr::V4(_) => self.gateway.into(),
            IpAddr::V6(_) => self.gateway6.into(),
        }
    }

    /// The addresses of the gateway.
    fn own(&self) -> [IpAddr; 3] {
        let (v4, v6) = (self.gateway.into(), self.gateway6.into());
        [v4, v6, GATEWAY_LINK_LOCAL.into()]
    }

    fn mask(&self) -> u32 {
        u32::MAX
            .checked_shl(32 - u32::from(self.prefix.min(32)))
            .unwrap_or(0)
    }

    /// Whether a machine can have this IPv6 address. All zeros after the prefix are those of routers (RFC 4291, 2.6.1).
    fn may_have6(&self, address: Ipv6Addr) -> bool {
        self.is_inside6(address) && address.to_bits() & !MASK6 != 0 && address != self.gateway6
    }

    /// Whether an address is in the IPv6 subnet.
    fn is_inside6(&self, address: Ipv6Addr) -> bool {
        address.to_bits() & MASK6 == self.gateway6.to_bits() & MASK6
    }

    /// Whether a machine can have this address.
    fn may_have(&self, address: Ipv4Addr) -> bool {
        let mask = self.mask();
        let host = u32::from(address) & !mask;
        self.is_inside(address) && host != 0 && host != !mask && address != self.gateway
    }

    /// Whether an address is in the subnet.
    fn is_inside(&self, address: Ipv4Addr) -> bool {
        let mask = self.mask();
        u32::from(address) & mask == u32::from(self.gateway) & mask
    }
}

/// A machine's port of the switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// The socket that QEMU connects to, one machine at a time: the last connection replaces an earlier one.
    pub socket: PathBuf,
    /// The address that DHCP gives the machine.
    pub address: Ipv4Addr,
}

/// The status of a network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkStatus {
    /// Its options.
    pub options: NetworkOptions,
    /// The seed of its random faults.
    pub seed: u64,
    /// Its ports, in the order in which they were added.
    pub ports: Vec<PortStatus>,
    /// Pairs of ports that cannot reach each other.
    pub blocks: Vec<(String, String)>,
    /// Number of open forwarded TCP connections.
    pub connections: usize,
    /// What machines have open to other networks.
    #[serde(default)]
    pub way_out: WayOutStatus,
    /// The packet capture; `None` if there is none.
    pub capture: Option<CaptureStatus>,
}

impl NetworkStatus {
    /// The port of this name.
    pub fn port(&self, name: &str) -> Option<&PortStatus> {
        self.ports.iter().find(|port| port.name == name)
    }
}

/// What machines have open to other networks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WayOutStatus {
    /// TCP connections, also those that the host is still making.
    pub connections: usize,
    /// Flows of UDP and of echo requests.
    pub flows: usize,
}

/// The status of a port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortStatus {
    /// Its name.
    pub name: String,
    /// Its machine's Ethernet address.
    pub mac: Mac,
    /// The address that DHCP gives the machine.
    pub address: Ipv4Addr,
    /// The address in its last DHCP lease, until that expires. Differs from `address` while the machine has not noticed
    /// a change.
    pub leased: Option<Ipv4Addr>,
    /// Whether DHCP answers it.
    pub dhcp: bool,
    /// Whether a machine is connected.
    pub connected: bool,
    /// Whether the machine uses it as a part of an aggregation (LACP), as it has said within the last three seconds.
    #[serde(default)]
    pub aggregated: bool,
    /// Its link's faults.
    pub faults: Faults,
    /// Its frame counters.
    pub counters: Counters,
    /// The host addresses of its machine's ports.
    pub forwards: Vec<PortForward>,
}

/// Frames of a port. Lost frames are counted at the port whose link or queue lost them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Frames that its machine sent.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that its machine received.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Lost because the link is cut.
    pub dropped_cut: u64,
    /// Lost at random.
    pub dropped_loss: u64,
    /// Lost because they were larger than the link's MTU.
    pub dropped_mtu: u64,
    /// Not delivered because the sender is blocked.
    pub dropped_blocked: u64,
    /// Lost because the machine did not read them fast enough.
    pub dropped_overflow: u64,
    /// Lost because no machine is connected.
    pub dropped_unplugged: u64,
    /// Sent by the machine, but not valid Ethernet frames.
    pub dropped_malformed: u64,
}

/// The packet capture: what a mirror port of the switch would see. It does not have frames that were lost on the
/// sender's link, but has those that are lost on the receiver's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureStatus {
    /// The file, in the format of pcap.
    pub path: PathBuf,
    /// Frames that are in it, or will be within a second.
    pub frames: u64,
    /// Frames that are not in it, because it had reached its size or could not be written.
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
        let shared = options.shared_address();
        assert!(options.may_have(shared) && shared < options.machine_address(0));
        for other in ["10.98.0.0", "10.98.0.1", "10.98.0.255", "10.98.1.10"] {
            let address = other.parse().expect("an address");
            assert!(!options.may_have(address), "{other}");
        }
        let ours = "fd68:6561:7274::10".parse().expect("an address");
        assert!(options.may_have6(ours));
        for other in [
            "fd68:6561:7274::",
            "fd68:6561:7274::1",
            "fd68:6561:7274:1::10",
            "fe80::10",
        ] {
            let address = other.parse().expect("an address");
            assert!(!options.may_have6(address), "{other}");
        }
        assert_eq!(GATEWAY_LINK_LOCAL.to_string(), "fe80::5054:ff:fe47:1");
    }
}
