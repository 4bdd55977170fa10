//! What the stacks of the gateway have in common: their clock, their device, and the packets that wait for one.
//!
//! A stack processes plain IP. The frames around its packets are made here: all of them go to one Ethernet address, so
//! a stack needs no address resolution.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Instant;

use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::phy::{self, Device, DeviceCapabilities, Medium};
use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, HardwareAddress, IpCidr, IpVersion,
    Ipv4Packet, Ipv6Packet,
};
use tokio::sync::Notify;

use super::GATEWAY_MAC;
use super::learning::{Address, HEADER};

/// MTU of the IP packets on this network.
pub(super) const MTU: usize = 1500;

/// Maximum number of bytes that wait for one connection, whose window is smaller.
pub(super) const INBOX: usize = 512 << 10;

/// smoltcp's time, derived from ours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn at(self, now: Instant) -> smoltcp::time::Instant {
        let micros = now.saturating_duration_since(self.0).as_micros();
        smoltcp::time::Instant::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
    }
}

/// Received frames of a connection that have not been processed.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    frames: RefCell<VecDeque<Vec<u8>>>,
    bytes: Cell<usize>,
    /// Notified when a frame arrives.
    pub(super) arrived: Notify,
}

impl Inbox {
    /// Adds a frame; a machine that exceeds the window loses it.
    pub(super) fn put(&self, frame: Vec<u8>) {
        let bytes = self.bytes.get() + frame.len();
        if bytes <= INBOX {
            self.bytes.set(bytes);
            self.frames.borrow_mut().push_back(frame);
            self.arrived.notify_one();
        }
    }

    /// Drops all frames.
    pub(super) fn clear(&self) {
        self.bytes.set(0);
        self.frames.borrow_mut().clear();
    }

    /// Moves all frames to the input of a stack.
    pub(super) fn take(&self, wire: &mut Wire) {
        self.bytes.set(0);
        wire.received.append(&mut self.frames.borrow_mut());
    }
}

/// The device of a stack: IP packets in frames.
#[derive(Debug)]
pub(super) struct Wire {
    /// Frames with IP packets.
    pub(super) received: VecDeque<Vec<u8>>,
    /// Complete frames.
    pub(super) sent: Vec<Vec<u8>>,
    /// Their destination.
    pub(super) to: Address,
    /// Only answers may be sent now.
    pub(super) full: bool,
}

impl Wire {
    pub(super) fn new(to: Address) -> Self {
        Self {
            received: VecDeque::new(),
            sent: Vec::new(),
            to,
            full: false,
        }
    }

    /// A stack with this device and these addresses, at most three.
    pub(super) fn stack(&mut self, own: &[IpCidr], now: smoltcp::time::Instant) -> Interface {
        let mut config = Config::new(HardwareAddress::Ip);
        // For sequence numbers, not for faults.
        config.random_seed = fastrand::u64(..);
        let mut stack = Interface::new(config, self, now);
        stack.update_ip_addrs(|addresses| {
            // There is space for them.
            let _ = addresses.extend_from_slice(own);
        });
        stack
    }
}

/// One address, as that of a stack which has no other host on its device.
pub(super) fn alone(address: IpAddr) -> [IpCidr; 1] {
    [IpCidr::new(address.into(), 0)]
}

/// The Ethernet type of packets of this version.
pub(super) fn ethertype(version: IpVersion) -> EthernetProtocol {
    match version {
        IpVersion::Ipv4 => EthernetProtocol::Ipv4,
        IpVersion::Ipv6 => EthernetProtocol::Ipv6,
    }
}

pub(super) struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0[HEADER..])
    }
}

pub(super) struct Sent<'a> {
    sent: &'a mut Vec<Vec<u8>>,
    to: Address,
}

impl phy::TxToken for Sent<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        let mut bytes = framed(self.to, EthernetProtocol::Ipv4, length);
        let done = f(&mut bytes[HEADER..]);
        if let Ok(IpVersion::Ipv6) = IpVersion::of_packet(&bytes[HEADER..]) {
            let mut frame = EthernetFrame::new_unchecked(&mut bytes);
            frame.set_ethertype(EthernetProtocol::Ipv6);
        }
        self.sent.push(bytes);
        done
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sent<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received, Sent<'_>)> {
        let frame = self.received.pop_front()?;
        let (sent, to) = (&mut self.sent, self.to);
        Some((Received(frame), Sent { sent, to }))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Sent<'_>> {
        if self.full {
            return None;
        }
        let (sent, to) = (&mut self.sent, self.to);
        Some(Sent { sent, to })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        capabilities
    }
}

/// A frame from the gateway with space for this much payload.
pub(super) fn framed(to: Address, kind: EthernetProtocol, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; HEADER + length];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes);
    frame.set_dst_addr(EthernetAddress(to));
    frame.set_src_addr(EthernetAddress(GATEWAY_MAC.0));
    frame.set_ethertype(kind);
    bytes
}

/// What a host without services answers to a frame with a segment of a connection: a reset, from the address that the
/// frame is for.
pub(super) fn refuse(frame: Vec<u8>, now: smoltcp::time::Instant) -> Vec<Vec<u8>> {
    let Ok(ethernet) = EthernetFrame::new_checked(&frame[..]) else {
        return Vec::new();
    };
    let sender = ethernet.src_addr().0;
    let Some(address) = destination(ethernet.payload()) else {
        return Vec::new();
    };
    let mut wire = Wire::new(sender);
    let mut stack = wire.stack(&alone(address), now);
    wire.received.push_back(frame);
    stack.poll(now, &mut wire, &mut SocketSet::new(Vec::new()));
    wire.sent
}

fn destination(packet: &[u8]) -> Option<IpAddr> {
    Some(match IpVersion::of_packet(packet).ok()? {
        IpVersion::Ipv4 => Ipv4Packet::new_checked(packet).ok()?.dst_addr().into(),
        IpVersion::Ipv6 => Ipv6Packet::new_checked(packet).ok()?.dst_addr().into(),
    })
}
