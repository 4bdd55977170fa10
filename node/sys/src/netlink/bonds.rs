//! Bonds: several Ethernet devices as one interface.

use rtnetlink::packet_route::link::{BondLacpRate, BondMode as Mode, BondXmitHashPolicy};
use rtnetlink::{LinkBond, LinkUnspec};

use super::{Link, Netlink, NetlinkError, is, refused};

/// How often the kernel looks at the carriers of the devices, in milliseconds.
const CARRIER_INTERVAL: u32 = 100;

/// How the devices of a bond share the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BondMode {
    /// One at a time carries it.
    ActiveBackup,
    /// The switch and the machine agree by LACP (802.3ad).
    Lacp,
}

impl Netlink {
    /// Creates a bond with this hardware address; an existing one with this name is not changed. Returns its link, which
    /// is not set up.
    pub async fn add_bond(
        &self,
        name: &str,
        mode: BondMode,
        mac: Option<[u8; 6]>,
    ) -> Result<Link, NetlinkError> {
        let bond = LinkBond::new(name).miimon(CARRIER_INTERVAL);
        let mut bond = match mode {
            BondMode::ActiveBackup => bond.mode(Mode::ActiveBackup),
            BondMode::Lacp => bond
                .mode(Mode::Ieee8023Ad)
                .ad_lacp_rate(BondLacpRate::Fast)
                .xmit_hash_policy(BondXmitHashPolicy::Layer34),
        };
        if let Some(mac) = mac {
            bond = bond.address(mac.to_vec());
        }
        let result = self.handle.link().add(bond.build()).execute().await;
        if let Err(error) = result
            && !is(&error, libc::EEXIST)
        {
            return Err(refused(format!("create bond {name}"))(error));
        }
        self.link_named(name).await
    }

    /// Adds a device to a bond. It is set down for that, and up again by the bond.
    pub async fn join_bond(&self, index: u32, bond: u32) -> Result<(), NetlinkError> {
        self.set_down(index).await?;
        let join = LinkUnspec::new_with_index(index).controller(bond).build();
        let result = self.handle.link().set(join).execute().await;
        result.map_err(refused(format!("add interface {index} to bond {bond}")))
    }
}
