//! The kernel state of the mesh: two links, a route, and the peers.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use hearth_api::identity::MeshSecret;
use hearth_api::names::{POD_NETWORK, PORT_MESH};
use hearth_host::networking::PodRange;
use hearth_sys::cidr::{Cidr, CidrError};
use hearth_sys::netlink::{Netlink, NetlinkError, Route};
use hearth_sys::sysctl::{self, SysctlError};
use hearth_sys::wireguard::{Peer, Wireguard, WireguardError};

use super::{BRIDGE, LINK, MTU};

/// Why the kernel state cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// Links, addresses or routes cannot be changed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Key or peers cannot be set.
    #[error(transparent)]
    Wireguard(#[from] WireguardError),
    /// Forwarding or reverse path filtering cannot be set.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// An address range is invalid.
    #[error(transparent)]
    Cidr(#[from] CidrError),
}

/// The configuration of this node.
#[derive(Clone)]
pub struct Own {
    /// Private key of the WireGuard interface.
    pub secret: MeshSecret,
    /// Pod range of the node.
    pub range: PodRange,
}

/// The operations on the kernel state. Every call is idempotent, and may be interrupted: the next
/// one completes it.
#[async_trait]
pub trait Machine: Send + Sync + 'static {
    /// Sets up the bridge and the WireGuard interface.
    async fn set_up(&self, own: &Own) -> Result<(), MachineError>;
    /// Sets the peers; others are removed.
    async fn set_peers(&self, peers: &[Peer]) -> Result<(), MachineError>;
    /// Forwards packets, for another pod network than the built-in one.
    async fn forward(&self) -> Result<(), MachineError>;
    /// Removes everything.
    async fn take_down(&self) -> Result<(), MachineError>;
}

/// The real kernel.
#[derive(Default)]
pub struct Kernel {
    /// Whether the machine forwards packets. (The process runs as long as the machine, so at its
    /// start it does not.)
    forwards: AtomicBool,
}

#[async_trait]
impl Machine for Kernel {
    async fn set_up(&self, own: &Own) -> Result<(), MachineError> {
        let netlink = Netlink::open()?;
        let gateway = own.range.gateway();
        let [a, b, c, d] = gateway.octets();
        // A locally administered MAC address, unique for each node.
        let bridge = netlink.add_bridge(BRIDGE, [0x0a, 0x58, a, b, c, d]).await?;
        netlink.set_mtu(bridge.index, MTU).await?;
        let address = Cidr::new(gateway.into(), own.range.cidr().prefix())?;
        netlink.set_ipv4_addresses(bridge.index, &[address]).await?;

        let link = netlink.add_wireguard(LINK).await?;
        netlink.set_mtu(link.index, MTU).await?;
        let wireguard = Wireguard::open().await?;
        wireguard
            .set_device(LINK, own.secret.expose(), PORT_MESH)
            .await?;
        // Packets that the node itself sends to pods on other nodes, and masqueraded ones, must
        // have a source address of its own range.
        let alone = Cidr::new(gateway.into(), 32)?;
        netlink.set_ipv4_addresses(link.index, &[alone]).await?;
        let route = Route {
            destination: POD_NETWORK.parse()?,
            gateway: None,
            metric: 0,
            source: Some(IpAddr::V4(gateway)),
        };
        netlink.replace_route(link.index, route).await?;

        // Strict reverse path filtering against forged source addresses.
        for link in [BRIDGE, LINK] {
            sysctl::set(&format!("net.ipv4.conf.{link}.rp_filter"), "1")?;
        }
        self.forward().await
    }

    async fn forward(&self) -> Result<(), MachineError> {
        self.forwards.store(true, Ordering::Relaxed);
        Ok(sysctl::set("net.ipv4.ip_forward", "1")?)
    }

    async fn set_peers(&self, peers: &[Peer]) -> Result<(), MachineError> {
        Ok(Wireguard::open().await?.set_peers(LINK, peers).await?)
    }

    async fn take_down(&self) -> Result<(), MachineError> {
        let netlink = Netlink::open()?;
        // This removes the route, too.
        netlink.remove_link(LINK).await?;
        netlink.remove_link(BRIDGE).await?;
        if self.forwards.load(Ordering::Relaxed) {
            sysctl::set("net.ipv4.ip_forward", "0")?;
            self.forwards.store(false, Ordering::Relaxed);
        }
        Ok(())
    }
}
