//! Finds other machines that use an IPv4 address of this one (RFC 5227).
//!
//! Probing before an address is used takes seconds at each boot, for a mistake that is rare. So the address is used at once,
//! and asked about at the same time: another machine that has it answers. From then on every ARP message that
//! claims the address is noticed. This only observes; what follows from it is the user's decision.

use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

use crate::announce::{self, ARP};
use crate::raw::{self, FilterStep, Watched};

/// How often an address is probed when it begins to be used.
pub const PROBES: u32 = 3;
/// The time between two of these probes; the last one is given as long for its answer.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// The offsets of the sender's hardware and IP address in a frame.
const SENDER_MAC: usize = 22;
const SENDER: u32 = 28;
const FRAME: usize = 64;

/// Listens for claims of one address on one interface.
pub struct Detector {
    socket: Watched,
    mac: [u8; 6],
    address: Ipv4Addr,
}

impl Detector {
    /// Starts to listen. `mac` is the interface's own address. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If the interface does not exist or is down, or this process may not open packet sockets.
    pub fn open(interface: u32, mac: [u8; 6], address: Ipv4Addr) -> io::Result<Self> {
        let claims = claims_of(address);
        let socket = Watched::new(raw::packet_socket(interface, ARP, &claims)?)?;
        Ok(Self {
            socket,
            mac,
            address,
        })
    }

    /// Asks whether another machine has the address. A link that is down answers nothing.
    pub fn probe(&self) {
        let probe = announce::arp(1, self.mac, Ipv4Addr::UNSPECIFIED, self.address);
        if let Err(error) = self.socket.write(&probe) {
            tracing::debug!(address = %self.address, %error, "cannot probe the address");
        }
    }

    /// The address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Forgets the claims that were not asked for yet.
    pub fn forget(&self) {
        while self.socket.discard() {}
    }

    /// The hardware address of the next other machine that claims the address. Cancel safe.
    pub async fn next(&self) -> io::Result<[u8; 6]> {
        let mut frame = [0; FRAME];
        loop {
            match self.socket.read(&mut frame).await {
                Ok(length) => {
                    let sender = frame[..length].get(SENDER_MAC..SENDER_MAC + 6);
                    if let Some(sender) = sender.and_then(|mac| mac.try_into().ok())
                        && sender != self.mac
                    {
                        return Ok(sender);
                    }
                }
                // Reported once when the interface goes down.
                Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Passes ARP messages from this address only.
fn claims_of(address: Ipv4Addr) -> [FilterStep; 4] {
    [
        (0x20, 0, 0, SENDER),
        (0x15, 0, 1, address.to_bits()),
        (0x06, 0, 0, FRAME as u32), // pass
        (0x06, 0, 0, 0),            // drop
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cidr::Cidr;
    use crate::netlink::{Link, Netlink};
    use crate::testing::{add_veth, in_own_network};

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);

    async fn link(netlink: &Netlink, name: &str) -> Link {
        let link = netlink.link_named(name).await.unwrap();
        netlink.set_up(link.index).await.unwrap();
        link
    }

    #[test]
    fn another_machine_with_the_address_is_found_and_nobody_else() {
        in_own_network(async {
            if !add_veth("here", "there").await {
                return;
            }
            let netlink = Netlink::open().unwrap();
            let here = link(&netlink, "here").await;
            let there = link(&netlink, "there").await;
            let other = Cidr::new(Ipv4Addr::new(192, 0, 2, 8).into(), 24).unwrap();
            netlink.add_address(there.index, other).await.unwrap();
            let detector = Detector::open(here.index, here.mac.unwrap(), ADDRESS).unwrap();
            // Only of another address, and of its own.
            let quiet = tokio::time::timeout(Duration::from_millis(200), async {
                loop {
                    announce::announce(there.index, there.mac.unwrap(), other.address()).unwrap();
                    detector.probe();
                    let heard = tokio::time::timeout(Duration::from_millis(20), detector.next());
                    if let Ok(heard) = heard.await {
                        return heard.unwrap();
                    }
                }
            });
            assert!(quiet.await.is_err());
            // The kernel of the other machine answers the probe.
            let same = Cidr::new(ADDRESS.into(), 24).unwrap();
            netlink.add_address(there.index, same).await.unwrap();
            let heard = loop {
                detector.probe();
                let heard = tokio::time::timeout(Duration::from_millis(50), detector.next());
                if let Ok(heard) = heard.await {
                    break heard.unwrap();
                }
            };
            assert_eq!(Some(heard), there.mac);
        });
    }
}
