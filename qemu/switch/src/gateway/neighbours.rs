//! Neighbour discovery (RFC 4861), the part of it that makes the gateway known: solicitations are answered, those of routers
//! only in a network that has its addresses from them ([`Addressing`](crate::Addressing)).
//!
//! The gateway solicits nobody, as with ARP, and advertises nothing unasked. Pure.

use std::net::Ipv6Addr;
use std::time::Duration;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetAddress, EthernetProtocol, Icmpv6Packet, Icmpv6Repr, IpProtocol, Ipv6Packet, Ipv6Repr,
    NdiscNeighborFlags, NdiscPrefixInfoFlags, NdiscPrefixInformation, NdiscRepr, NdiscRouterFlags,
};

use crate::learning::{Address, HEADER};
use crate::wire::framed;
use crate::{GATEWAY_LINK_LOCAL, GATEWAY_MAC, MASK6, PREFIX6};

/// No router has forwarded a message with this hop limit.
const HOP_LIMIT: u8 = 255;

/// All nodes of the link, and their Ethernet address.
const ALL: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_MAC: Address = [0x33, 0x33, 0, 0, 0, 1];

/// How long machines use what the gateway advertises: longer than a network exists.
const ADVERTISED_FOR: Duration = Duration::from_secs(24 * 3600);
/// The same of the router itself; RFC 4861 allows no more.
const ROUTER_FOR: Duration = Duration::from_secs(9000);
/// The option with name servers (RFC 8106): its type, and its length with one of them, in units of 8 bytes.
const RDNSS: [u8; 2] = [25, 3];

/// What a solicitation asks for.
pub(super) enum Solicited {
    /// The neighbour with this address.
    Neighbour(Ipv6Addr),
    /// All routers.
    Routers,
}

/// What a valid solicitation asks for.
pub(super) fn solicited(packet: &Ipv6Packet<&[u8]>) -> Option<Solicited> {
    let is_icmp = packet.next_header() == IpProtocol::Icmpv6;
    if packet.version() != 6 || !is_icmp || packet.hop_limit() != HOP_LIMIT {
        return None;
    }
    let (from, to) = (packet.src_addr(), packet.dst_addr());
    let icmp = Icmpv6Packet::new_checked(packet.payload()).ok()?;
    match Icmpv6Repr::parse(&from, &to, &icmp, &ChecksumCapabilities::default()).ok()? {
        Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit { target_addr, .. }) => {
            Some(Solicited::Neighbour(target_addr))
        }
        Icmpv6Repr::Ndisc(NdiscRepr::RouterSolicit { .. }) => Some(Solicited::Routers),
        _ => None,
    }
}

/// A frame that advertises an address of the gateway to the one who has asked for it. A machine that has no address yet
/// asks whether its own is free: all are told that it is not.
pub(super) fn advertise(mac: Address, asker: Ipv6Addr, address: Ipv6Addr) -> Vec<u8> {
    let is_known = !asker.is_unspecified();
    let (mac, to) = match is_known {
        true => (mac, asker),
        false => (ALL_MAC, ALL),
    };
    let mut flags = NdiscNeighborFlags::ROUTER | NdiscNeighborFlags::OVERRIDE;
    flags.set(NdiscNeighborFlags::SOLICITED, is_known);
    let icmp = Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
        flags,
        target_addr: address,
        lladdr: Some(EthernetAddress(GATEWAY_MAC.0).into()),
    });
    emitted((mac, to), address, &icmp, &[])
}

/// A frame that tells all machines that the gateway is a router, and that its network is on the link. They may have addresses in
/// it, and the gateway is their name server; or else there is a server of DHCPv6 for both.
pub(super) fn advertise_router(address: Ipv6Addr, is_with_dhcp: bool) -> Vec<u8> {
    let lifetime = ADVERTISED_FOR.into();
    let (flags, prefix_flags) = match is_with_dhcp {
        true => (
            NdiscRouterFlags::MANAGED | NdiscRouterFlags::OTHER,
            NdiscPrefixInfoFlags::ON_LINK,
        ),
        false => (
            NdiscRouterFlags::empty(),
            NdiscPrefixInfoFlags::ON_LINK | NdiscPrefixInfoFlags::ADDRCONF,
        ),
    };
    let icmp = Icmpv6Repr::Ndisc(NdiscRepr::RouterAdvert {
        hop_limit: 64,
        flags,
        router_lifetime: ROUTER_FOR.into(),
        reachable_time: Duration::ZERO.into(),
        retrans_time: Duration::ZERO.into(),
        lladdr: Some(EthernetAddress(GATEWAY_MAC.0).into()),
        mtu: None,
        prefix_info: Some(NdiscPrefixInformation {
            prefix_len: PREFIX6,
            flags: prefix_flags,
            valid_lifetime: lifetime,
            preferred_lifetime: lifetime,
            prefix: Ipv6Addr::from_bits(address.to_bits() & MASK6),
        }),
    });
    let mut server = Vec::new();
    if !is_with_dhcp {
        server.extend([RDNSS, [0, 0]].concat());
        server.extend((ADVERTISED_FOR.as_secs() as u32).to_be_bytes());
        server.extend(address.octets());
    }
    emitted((ALL_MAC, ALL), GATEWAY_LINK_LOCAL, &icmp, &server)
}

/// A frame with a message, and with further options after it.
fn emitted(
    (mac, to): (Address, Ipv6Addr),
    from: Ipv6Addr,
    icmp: &Icmpv6Repr<'_>,
    more: &[u8],
) -> Vec<u8> {
    let ip = Ipv6Repr {
        src_addr: from,
        dst_addr: to,
        next_header: IpProtocol::Icmpv6,
        payload_len: icmp.buffer_len() + more.len(),
        hop_limit: HOP_LIMIT,
    };
    let mut bytes = framed(
        mac,
        EthernetProtocol::Ipv6,
        ip.buffer_len() + ip.payload_len,
    );
    let mut packet = Ipv6Packet::new_unchecked(&mut bytes[HEADER..]);
    ip.emit(&mut packet);
    let payload = packet.payload_mut();
    // First, because the checksum is one of all of it.
    payload[icmp.buffer_len()..].copy_from_slice(more);
    icmp.emit(
        &from,
        &to,
        &mut Icmpv6Packet::new_unchecked(payload),
        &ChecksumCapabilities::default(),
    );
    bytes
}
