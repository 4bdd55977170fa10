//! What the mesh wants of the kernel: two links, a route, who the peers are,
//! and a few rules about packets.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Mutex;

use async_trait::async_trait;
use hearth_api::identity::MeshSecret;
use hearth_api::names::{POD_NETWORK, PORT_MESH};
use hearth_host::networking::PodRange;
use hearth_sys::cidr::{Cidr, CidrError};
use hearth_sys::iptables::{Iptables, IptablesError};
use hearth_sys::netlink::{Netlink, NetlinkError, Route};
use hearth_sys::sysctl::{self, SysctlError};
use hearth_sys::wireguard::{Peer, Wireguard, WireguardError};

use super::firewall::Firewall;
use super::{BRIDGE, LINK, MTU};

/// Why the kernel is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// Links, addresses or routes.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Keys or peers.
    #[error(transparent)]
    Wireguard(#[from] WireguardError),
    /// Forwarding or filtering by source.
    #[error(transparent)]
    Sysctl(#[from] SysctlError),
    /// Rules.
    #[error(transparent)]
    Firewall(#[from] IptablesError),
    /// The range.
    #[error(transparent)]
    Cidr(#[from] CidrError),
}

/// This node's own part.
#[derive(Clone)]
pub struct Own {
    /// Of the mesh.
    pub secret: MeshSecret,
    /// Of its pods.
    pub range: PodRange,
    /// The program.
    pub iptables: PathBuf,
}

/// See the module. Every call can be repeated, and can be cut short: the next
/// one makes it whole.
#[async_trait]
pub trait Machine: Send + Sync + 'static {
    /// Has the bridge, the mesh's link, and the rules.
    async fn set_up(&self, own: &Own) -> Result<(), MachineError>;
    /// Has exactly these peers.
    async fn set_peers(&self, peers: &[Peer]) -> Result<(), MachineError>;
    /// Has none of all this.
    async fn take_down(&self) -> Result<(), MachineError>;
}

/// The kernel below.
#[derive(Default)]
pub struct Kernel {
    /// By which rules were made since the machine was booted. Nothing else
    /// outlives this process without the machine.
    firewall: Mutex<Option<Firewall>>,
}

impl Kernel {
    fn firewall(&self) -> std::sync::MutexGuard<'_, Option<Firewall>> {
        self.firewall
            .lock()
            .unwrap_or_else(|broken| broken.into_inner())
    }
}

#[async_trait]
impl Machine for Kernel {
    async fn set_up(&self, own: &Own) -> Result<(), MachineError> {
        let netlink = Netlink::open()?;
        let gateway = own.range.gateway();
        let [a, b, c, d] = gateway.octets();
        // Locally administered, and its own on every node.
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
        // What the node itself sends to pods elsewhere, and what it sends in
        // place of others, has to come from an address that is its own there.
        let alone = Cidr::new(gateway.into(), 32)?;
        netlink.set_ipv4_addresses(link.index, &[alone]).await?;
        let route = Route {
            destination: POD_NETWORK.parse()?,
            gateway: None,
            metric: 0,
            source: Some(IpAddr::V4(gateway)),
        };
        netlink.replace_route(link.index, route).await?;

        // Nobody speaks for addresses to which the way is another one.
        for link in [BRIDGE, LINK] {
            sysctl::set(&format!("net.ipv4.conf.{link}.rp_filter"), "1")?;
        }
        let firewall = Firewall {
            iptables: Iptables::at(own.iptables.clone()),
        };
        *self.firewall() = Some(firewall.clone());
        firewall.make(own.range).await?;
        // Last: nothing is forwarded before it is confined.
        sysctl::set("net.ipv4.ip_forward", "1")?;
        Ok(())
    }

    async fn set_peers(&self, peers: &[Peer]) -> Result<(), MachineError> {
        Ok(Wireguard::open().await?.set_peers(LINK, peers).await?)
    }

    async fn take_down(&self) -> Result<(), MachineError> {
        let netlink = Netlink::open()?;
        // The route goes with it.
        netlink.remove_link(LINK).await?;
        netlink.remove_link(BRIDGE).await?;
        let made = self.firewall().clone();
        if let Some(firewall) = made {
            sysctl::set("net.ipv4.ip_forward", "0")?;
            firewall.remove().await?;
            *self.firewall() = None;
        }
        Ok(())
    }
}
