//! Frames of machines to the gateway, for tests.

use std::net::Ipv4Addr;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetProtocol, IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber,
};

use super::GATEWAY_MAC;
use super::fabric::HEADER;
use super::learning::Address;
use super::wire::framed;

/// A frame from this Ethernet address.
pub(super) fn frame(mac: Address, kind: EthernetProtocol, payload: &[u8]) -> Vec<u8> {
    let mut bytes = framed(GATEWAY_MAC.0, kind, payload.len());
    bytes[6..12].copy_from_slice(&mac);
    bytes[HEADER..].copy_from_slice(payload);
    bytes
}

/// A frame with an IP packet.
pub(super) fn ip(
    mac: Address,
    from: Ipv4Addr,
    to: Ipv4Addr,
    next_header: IpProtocol,
    payload: &[u8],
) -> Vec<u8> {
    let repr = Ipv4Repr {
        src_addr: from,
        dst_addr: to,
        next_header,
        payload_len: payload.len(),
        hop_limit: 64,
    };
    let mut bytes = vec![0; repr.buffer_len() + payload.len()];
    let mut packet = Ipv4Packet::new_unchecked(&mut bytes);
    repr.emit(&mut packet, &ChecksumCapabilities::default());
    packet.payload_mut().copy_from_slice(payload);
    frame(mac, EthernetProtocol::Ipv4, &bytes)
}

/// A frame with a TCP segment without data.
pub(super) fn tcp(
    mac: Address,
    from: (Ipv4Addr, u16),
    to: (Ipv4Addr, u16),
    control: TcpControl,
    ack: bool,
) -> Vec<u8> {
    let acknowledged = ack.then_some(TcpSeqNumber(1));
    segment(mac, from, to, control, TcpSeqNumber(7), acknowledged)
}

/// The same with this sequence number, and what it acknowledges.
pub(super) fn segment(
    mac: Address,
    from: (Ipv4Addr, u16),
    to: (Ipv4Addr, u16),
    control: TcpControl,
    seq_number: TcpSeqNumber,
    ack_number: Option<TcpSeqNumber>,
) -> Vec<u8> {
    let repr = TcpRepr {
        src_port: from.1,
        dst_port: to.1,
        control,
        seq_number,
        ack_number,
        window_len: 1000,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(
        &mut TcpPacket::new_unchecked(&mut bytes),
        &from.0.into(),
        &to.0.into(),
        &ChecksumCapabilities::default(),
    );
    ip(mac, from.0, to.0, IpProtocol::Tcp, &bytes)
}
