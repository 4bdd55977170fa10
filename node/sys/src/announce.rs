//! Announces that an address has moved to this machine, so that neighbours and switches send to it at
//! once instead of where the address was before.
//!
//! For IPv4, ARP about the own address (RFC 5227), as a request and as a response: some devices
//! only take notice of one of them. For IPv6, an unsolicited neighbour advertisement with the override
//! flag to all nodes (RFC 4861, section 7.2.6). The kernel sends neither when an address is added.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::raw::{self, FilterStep};

/// Drops every frame: the socket only sends.
const NOTHING: [FilterStep; 1] = [(0x06, 0, 0, 0)];

pub(crate) const ARP: u16 = 0x0806;
pub(crate) const IPV6: u16 = 0x86dd;
const BROADCAST: [u8; 6] = [0xff; 6];
/// The hardware address of the group of all IPv6 nodes.
const ALL_NODES_HARDWARE: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
/// The group of all IPv6 nodes of a network.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
pub(crate) const ICMPV6: u8 = 58;

/// Announces an address of the interface with this index and hardware address.
///
/// # Errors
/// If the interface does not exist or is down, or this process may not open packet sockets.
pub fn announce(interface: u32, mac: [u8; 6], address: IpAddr) -> io::Result<()> {
    let (protocol, frames) = match address {
        IpAddr::V4(address) => (
            ARP,
            [1, 2]
                .map(|operation| arp(operation, mac, address, address))
                .to_vec(),
        ),
        IpAddr::V6(address) => (IPV6, vec![advertisement(mac, address)]),
    };
    let socket = raw::packet_socket(interface, protocol, &NOTHING)?;
    for frame in frames {
        rustix::io::write(&socket, &frame)?;
    }
    Ok(())
}

/// An Ethernet header.
fn header(to: [u8; 6], from: [u8; 6], protocol: u16) -> Vec<u8> {
    [&to[..], &from, &protocol.to_be_bytes()].concat()
}

/// ARP to everybody; operation 1 is a request, 2 a response.
pub(crate) fn arp(operation: u16, mac: [u8; 6], sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = header(BROADCAST, mac, ARP);
    // Ethernet and IPv4, with addresses of 6 and 4 bytes.
    frame.extend([0, 1, 8, 0, 6, 4]);
    frame.extend(operation.to_be_bytes());
    frame.extend(mac);
    frame.extend(sender.octets());
    // A request asks for this address; a response is for everybody.
    frame.extend(if operation == 1 { [0; 6] } else { BROADCAST });
    frame.extend(target.octets());
    frame
}

fn advertisement(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    // Type, code, checksum, flags (override only), the address, and the option with the hardware address.
    let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    message.extend(address.octets());
    message.extend([2, 1]);
    message.extend(mac);
    icmpv6((ALL_NODES_HARDWARE, mac), (address, ALL_NODES), message)
}

/// A frame with a message of neighbour discovery, whose checksum is filled in.
pub(crate) fn icmpv6(
    (to_mac, mac): ([u8; 6], [u8; 6]),
    (from, to): (Ipv6Addr, Ipv6Addr),
    mut message: Vec<u8>,
) -> Vec<u8> {
    let sum = icmpv6_checksum(from, to, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = header(to_mac, mac, IPV6);
    frame.extend([0x60, 0, 0, 0]);
    frame.extend((message.len() as u16).to_be_bytes());
    // Receivers require this hop limit: such a packet has passed no router.
    frame.extend([ICMPV6, 255]);
    frame.extend(from.octets());
    frame.extend(to.octets());
    frame.extend(message);
    frame
}

/// The checksum of a message; zero over one that contains it.
pub(crate) fn icmpv6_checksum(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> u16 {
    let length = message.len() as u32;
    let pseudo = [
        &from.octets()[..],
        &to.octets(),
        &length.to_be_bytes(),
        &[0, 0, 0, ICMPV6],
        message,
        // To an even number of bytes.
        &[0][..message.len() % 2],
    ];
    checksum(&pseudo.concat())
}

/// The checksum of RFC 1071 over an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks::<2>().0.iter();
    let mut sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;
    use crate::netlink::Netlink;
    use crate::testing::{cable, in_own_network};

    /// Passes every frame.
    const ALL: [FilterStep; 1] = [(0x06, 0, 0, 0xffff)];

    #[test]
    fn a_checksum_is_zero_over_data_that_contain_it() {
        let address = "2001:db8::7".parse().unwrap();
        let frame = advertisement([2, 0, 0, 0, 0, 7], address);
        let (source, rest) = (&frame[22..38], &frame[38..]);
        let (target, message) = rest.split_at(16);
        let octets = |bytes: &[u8]| Ipv6Addr::from(<[u8; 16]>::try_from(bytes).unwrap());
        assert_eq!(icmpv6_checksum(octets(source), octets(target), message), 0);
    }

    #[test]
    fn neighbours_receive_what_is_announced() {
        in_own_network(async {
            let netlink = Netlink::open().unwrap();
            let Some([here, there]) = cable(&netlink).await else {
                return;
            };
            for (address, protocol, expected) in [("192.0.2.7", ARP, 2), ("2001:db8::7", IPV6, 1)] {
                let socket = raw::packet_socket(there.index, protocol, &ALL).unwrap();
                let address: IpAddr = address.parse().unwrap();
                let mac = here.mac.unwrap();
                let mut found = BTreeSet::new();
                let mut buffer = [0; 2048];
                while found.len() < expected {
                    match rustix::io::read(&socket, &mut buffer) {
                        Ok(length) => {
                            let frame = &buffer[..length];
                            if is_about(frame, mac, address) {
                                found.insert(frame.to_vec());
                            }
                        }
                        // A device that has just been set up drops what it is given, for up to a second.
                        Err(rustix::io::Errno::AGAIN) => {
                            announce(here.index, mac, address).unwrap();
                            tokio::time::sleep(Duration::from_millis(5)).await;
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            let error = announce(9999, [2; 6], Ipv4Addr::LOCALHOST.into()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        });
    }

    fn is_about(frame: &[u8], mac: [u8; 6], address: IpAddr) -> bool {
        let octets = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        frame[6..12] == mac && frame.windows(octets.len()).any(|part| part == octets)
    }
}
