//! Neighbour discovery (RFC 4861), the part of it that makes the gateway's addresses known: solicitations are answered.
//!
//! The gateway solicits nobody, as with ARP, and advertises no prefix. Pure.

use std::net::Ipv6Addr;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetAddress, EthernetProtocol, Icmpv6Packet, Icmpv6Repr, IpProtocol, Ipv6Packet, Ipv6Repr,
    NdiscNeighborFlags, NdiscRepr,
};

use crate::GATEWAY_MAC;
use crate::fabric::HEADER;
use crate::learning::Address;
use crate::wire::framed;

/// No router has forwarded a message with this hop limit.
const HOP_LIMIT: u8 = 255;

/// All nodes of the link, and their Ethernet address.
const ALL: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_MAC: Address = [0x33, 0x33, 0, 0, 0, 1];

/// The address that a valid neighbour solicitation asks for.
pub(super) fn solicited(packet: &Ipv6Packet<&[u8]>) -> Option<Ipv6Addr> {
    let is_icmp = packet.next_header() == IpProtocol::Icmpv6;
    if packet.version() != 6 || !is_icmp || packet.hop_limit() != HOP_LIMIT {
        return None;
    }
    let (from, to) = (packet.src_addr(), packet.dst_addr());
    let icmp = Icmpv6Packet::new_checked(packet.payload()).ok()?;
    match Icmpv6Repr::parse(&from, &to, &icmp, &ChecksumCapabilities::default()).ok()? {
        Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit { target_addr, .. }) => Some(target_addr),
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
    let ip = Ipv6Repr {
        src_addr: address,
        dst_addr: to,
        next_header: IpProtocol::Icmpv6,
        payload_len: icmp.buffer_len(),
        hop_limit: HOP_LIMIT,
    };
    let mut bytes = framed(
        mac,
        EthernetProtocol::Ipv6,
        ip.buffer_len() + ip.payload_len,
    );
    let mut packet = Ipv6Packet::new_unchecked(&mut bytes[HEADER..]);
    ip.emit(&mut packet);
    icmp.emit(
        &address,
        &to,
        &mut Icmpv6Packet::new_unchecked(packet.payload_mut()),
        &ChecksumCapabilities::default(),
    );
    bytes
}
