//! Frames of machines to the gateway, for tests.

use std::net::IpAddr;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetProtocol, IpAddress, IpProtocol, IpRepr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber,
};

use super::GATEWAY_MAC;
use super::learning::{Address, HEADER};
use super::wire::{ethertype, framed};

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
    from: impl Into<IpAddr>,
    to: impl Into<IpAddr>,
    next_header: IpProtocol,
    payload: &[u8],
) -> Vec<u8> {
    let (from, to) = (IpAddress::from(from.into()), IpAddress::from(to.into()));
    let repr = IpRepr::new(from, to, next_header, payload.len(), 64);
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(&mut bytes[..], &ChecksumCapabilities::default());
    bytes[repr.header_len()..].copy_from_slice(payload);
    frame(mac, ethertype(repr.version()), &bytes)
}

/// A frame with a TCP segment without data.
pub(super) fn tcp<A: Into<IpAddr>>(
    mac: Address,
    from: (A, u16),
    to: (A, u16),
    control: TcpControl,
    ack: bool,
) -> Vec<u8> {
    let acknowledged = ack.then_some(TcpSeqNumber(1));
    segment(mac, from, to, control, TcpSeqNumber(7), acknowledged)
}

/// The same with this sequence number, and what it acknowledges.
pub(super) fn segment<A: Into<IpAddr>>(
    mac: Address,
    from: (A, u16),
    to: (A, u16),
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
    let (from, to) = (from.0.into(), to.0.into());
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(
        &mut TcpPacket::new_unchecked(&mut bytes),
        &from.into(),
        &to.into(),
        &ChecksumCapabilities::default(),
    );
    ip(mac, from, to, IpProtocol::Tcp, &bytes)
}
