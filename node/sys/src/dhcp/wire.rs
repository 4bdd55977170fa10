//! DHCP on the wire: the frames, and the validation of received data.
//!
//! All received data is hostile until checked. A message that fails a check is dropped with the
//! reason; lists are truncated to limits that no honest server reaches. The UDP checksum is not
//! verified: between virtual machines on one host it is often not filled in, and the frame's own
//! checksum and the transaction ID are sufficient.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::message::{Kind, Malformed, Message, code};
use super::{Lease, LeasedRoute, domains};
use crate::cidr::Cidr;
use crate::raw::FilterStep;

pub(crate) const CLIENT_PORT: u16 = 68;
pub(crate) const SERVER_PORT: u16 = 67;
/// IPv4.
pub(crate) const ETHERTYPE: u16 = 0x0800;
/// The maximum size of a received frame; we ask servers for at most 1500 bytes.
pub(crate) const MAX_FRAME: usize = 2048;

const UDP: u8 = 17;
const ETHERNET_HEADER: usize = 14;
const IP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;
const MAX_SERVERS: usize = 8;
const MAX_ROUTES: usize = 32;
/// The smallest MTU that every IPv4 host must support.
const MIN_MTU: u16 = 576;

/// Accepts only unfragmented UDP datagrams to the client's port, so that not all of a busy node's
/// traffic is copied to this socket.
pub(crate) const FILTER: [FilterStep; 11] = [
    (0x28, 0, 0, 12),               // load the EtherType
    (0x15, 0, 8, ETHERTYPE as u32), // IPv4, or drop
    (0x30, 0, 0, 23),               // load the protocol
    (0x15, 0, 6, UDP as u32),       // UDP, or drop
    (0x28, 0, 0, 20),               // load the fragment offset
    (0x45, 4, 0, 0x1fff),           // a later fragment: drop
    (0xb1, 0, 0, 14),               // index = length of the IP header
    (0x48, 0, 0, 16),               // load the destination port
    (0x15, 0, 1, CLIENT_PORT as u32),
    (0x06, 0, 0, MAX_FRAME as u32), // pass
    (0x06, 0, 0, 0),                // drop
];

/// Why received data was dropped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    #[error("not a complete IPv4 UDP datagram")]
    Frame,
    #[error("not for the client's port")]
    Port,
    #[error("not a DHCP message: {0}")]
    Message(#[from] Malformed),
    #[error("not from a server")]
    NotReply,
    #[error("not a message type that servers send")]
    Type,
    #[error("{0} is not a valid host address")]
    Address(Ipv4Addr),
    #[error("no server identifier")]
    NoServer,
    #[error("{0} is not a subnet mask")]
    Mask(Ipv4Addr),
    #[error("no lease time")]
    NoTime,
}

/// A validated message from a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub xid: u32,
    pub mac: [u8; 6],
    pub server: Option<Ipv4Addr>,
    pub kind: ReplyKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReplyKind {
    Offer(Lease),
    Ack(Lease),
    Nak,
}

/// Wraps a message from the client to all servers into an Ethernet frame.
pub(crate) fn broadcast(mac: [u8; 6], message: &[u8]) -> Vec<u8> {
    frame(
        (mac, Ipv4Addr::UNSPECIFIED, CLIENT_PORT),
        ([0xff; 6], Ipv4Addr::BROADCAST, SERVER_PORT),
        message,
    )
}

type End = ([u8; 6], Ipv4Addr, u16);

pub(super) fn frame(from: End, to: End, payload: &[u8]) -> Vec<u8> {
    let udp_length = (UDP_HEADER + payload.len()) as u16;
    let ip_length = IP_HEADER as u16 + udp_length;
    let mut udp = Vec::with_capacity(usize::from(udp_length));
    for word in [from.2, to.2, udp_length, 0] {
        udp.extend_from_slice(&word.to_be_bytes());
    }
    udp.extend_from_slice(payload);
    let mut pseudo = Vec::with_capacity(12 + udp.len());
    pseudo.extend_from_slice(&from.1.octets());
    pseudo.extend_from_slice(&to.1.octets());
    pseudo.extend_from_slice(&[0, UDP]);
    pseudo.extend_from_slice(&udp_length.to_be_bytes());
    pseudo.extend_from_slice(&udp);
    // In UDP a checksum of zero means no checksum; zero is sent as its complement.
    let sum = match internet_checksum(&pseudo) {
        0 => 0xffff,
        sum => sum,
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());

    let mut ip = [0_u8; IP_HEADER];
    ip[0] = 0x45;
    ip[1] = 0x10; // low delay, as other clients ask for
    ip[2..4].copy_from_slice(&ip_length.to_be_bytes());
    ip[8] = 64;
    ip[9] = UDP;
    ip[12..16].copy_from_slice(&from.1.octets());
    ip[16..20].copy_from_slice(&to.1.octets());
    let sum = internet_checksum(&ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());

    let mut frame = Vec::with_capacity(ETHERNET_HEADER + usize::from(ip_length));
    frame.extend_from_slice(&to.0);
    frame.extend_from_slice(&from.0);
    frame.extend_from_slice(&ETHERTYPE.to_be_bytes());
    frame.extend_from_slice(&ip);
    frame.extend_from_slice(&udp);
    frame
}

fn internet_checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| {
        let low = pair.get(1).copied().unwrap_or(0);
        u32::from(u16::from_be_bytes([pair[0], low]))
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Validates a frame and the message in it.
pub(crate) fn parse(frame: &[u8]) -> Result<Reply, Invalid> {
    parse_message(payload_for(frame, CLIENT_PORT)?)
}

pub(super) fn payload_for(frame: &[u8], port: u16) -> Result<&[u8], Invalid> {
    let packet = frame.get(ETHERNET_HEADER..).ok_or(Invalid::Frame)?;
    if frame[12..14] != ETHERTYPE.to_be_bytes() {
        return Err(Invalid::Frame);
    }
    let first = *packet.first().ok_or(Invalid::Frame)?;
    let header = usize::from(first & 15) * 4;
    if first >> 4 != 4 || header < IP_HEADER || packet.len() < header {
        return Err(Invalid::Frame);
    }
    let total = usize::from(u16_at(packet, 2));
    // The third bit: more fragments; the low 13 bits: the offset.
    let fragment = u16_at(packet, 6) & 0x3fff;
    let sound = internet_checksum(&packet[..header]) == 0;
    if !sound || packet[9] != UDP || fragment != 0 || total > packet.len() {
        return Err(Invalid::Frame);
    }
    let datagram = packet.get(header..total).ok_or(Invalid::Frame)?;
    if datagram.len() < UDP_HEADER {
        return Err(Invalid::Frame);
    }
    if u16_at(datagram, 2) != port {
        return Err(Invalid::Port);
    }
    let length = usize::from(u16_at(datagram, 4));
    datagram.get(UDP_HEADER..length).ok_or(Invalid::Frame)
}

fn parse_message(bytes: &[u8]) -> Result<Reply, Invalid> {
    let message = Message::decode(bytes)?;
    if !message.from_server {
        return Err(Invalid::NotReply);
    }
    let kind = match message.kind {
        Some(Kind::Offer) => ReplyKind::Offer(lease(&message)?),
        Some(Kind::Ack) => ReplyKind::Ack(lease(&message)?),
        Some(Kind::Nak) => ReplyKind::Nak,
        _ => return Err(Invalid::Type),
    };
    Ok(Reply {
        xid: message.xid,
        mac: message.mac,
        server: message.address(code::SERVER)?,
        kind,
    })
}

fn lease(message: &Message) -> Result<Lease, Invalid> {
    let address = message.granted;
    if !may_be_host(address) {
        return Err(Invalid::Address(address));
    }
    let server = message.address(code::SERVER)?.ok_or(Invalid::NoServer)?;
    if !may_be_host(server) {
        return Err(Invalid::Address(server));
    }
    let prefix = prefix(address, message.address(code::SUBNET_MASK)?)?;
    let address = Cidr::new(IpAddr::V4(address), prefix).map_err(|_| Invalid::Address(address))?;
    let (duration, renew_after, rebind_after) = times(message)?;
    let servers = |code| {
        let mut servers = message.addresses(code);
        servers.retain(|server| may_be_host(*server));
        servers.truncate(MAX_SERVERS);
        servers
    };
    let mtu = message
        .option(code::MTU)
        .and_then(|mtu| mtu.try_into().ok());
    Ok(Lease {
        address,
        server,
        routes: routes(message),
        name_servers: servers(code::NAME_SERVERS),
        time_servers: servers(code::TIME_SERVERS),
        domains: domains::of(message.option(code::SEARCH), message.option(code::DOMAIN)),
        mtu: mtu.map(u16::from_be_bytes).filter(|mtu| *mtu >= MIN_MTU),
        duration,
        renew_after,
        rebind_after,
    })
}

fn may_be_host(address: Ipv4Addr) -> bool {
    let [first, ..] = address.octets();
    // 0 is "this network", 127 loopback, 224 and above multicast and reserved.
    first != 0 && first != 127 && first < 224
}

fn prefix(address: Ipv4Addr, mask: Option<Ipv4Addr>) -> Result<u8, Invalid> {
    let Some(mask) = mask else {
        // Without a mask: the prefix of the address class.
        return Ok(match address.octets()[0] {
            ..128 => 8,
            128..192 => 16,
            192.. => 24,
        });
    };
    let bits = u32::from(mask);
    let prefix = bits.leading_ones();
    if prefix == 0 || prefix + bits.trailing_zeros() < 32 {
        return Err(Invalid::Mask(mask));
    }
    Ok(prefix as u8)
}

/// Duration, T1 and T2. If the server's T1 or T2 is invalid, the protocol's default is used.
fn times(message: &Message) -> Result<(Option<Duration>, Duration, Duration), Invalid> {
    let seconds = match message.number(code::LEASE_TIME)? {
        None | Some(0) => return Err(Invalid::NoTime),
        Some(u32::MAX) => return Ok((None, Duration::MAX, Duration::MAX)),
        Some(seconds) => seconds,
    };
    let duration = Duration::from_secs(seconds.into());
    let time = |code| {
        let seconds = message.number(code).ok().flatten();
        seconds.map(|seconds| Duration::from_secs(seconds.into()))
    };
    let rebind = time(code::REBIND_TIME).filter(|t2| !t2.is_zero() && *t2 < duration);
    let rebind = rebind.unwrap_or(duration * 7 / 8);
    let renew = time(code::RENEW_TIME).filter(|t1| !t1.is_zero() && *t1 < rebind);
    let renew = renew.unwrap_or((duration / 2).min(rebind));
    Ok((Some(duration), renew, rebind))
}

/// If there are classless routes, the router option is ignored, as RFC 3442 requires.
fn routes(message: &Message) -> Vec<LeasedRoute> {
    if let Some(bytes) = message.option(code::CLASSLESS_ROUTES) {
        return classless_routes(bytes);
    }
    let router = message.addresses(code::ROUTERS).into_iter().next();
    let default = |gateway| LeasedRoute {
        destination: Cidr::ALL_V4,
        gateway: Some(gateway),
    };
    let router = router.filter(|router| may_be_host(*router));
    router.map(default).into_iter().collect()
}

/// For each route: the prefix length, the significant bytes of the prefix, and the gateway.
/// Everything after a malformed route is ignored.
fn classless_routes(mut bytes: &[u8]) -> Vec<LeasedRoute> {
    let mut routes = Vec::new();
    while let [prefix, rest @ ..] = bytes {
        let significant = usize::from(prefix.div_ceil(8));
        if *prefix > 32 || rest.len() < significant + 4 || routes.len() == MAX_ROUTES {
            break;
        }
        let (network, rest) = rest.split_at(significant);
        let (gateway, rest) = rest.split_at(4);
        bytes = rest;
        let octets =
            |from: &[u8]| -> [u8; 4] { std::array::from_fn(|i| from.get(i).copied().unwrap_or(0)) };
        // Ignore bits after the prefix, which servers may leave set.
        let mask = u32::MAX.checked_shl(32 - u32::from(*prefix)).unwrap_or(0);
        let network = Ipv4Addr::from(u32::from_be_bytes(octets(network)) & mask);
        let gateway = Ipv4Addr::from(octets(gateway));
        let gateway = Some(gateway).filter(|gateway| !gateway.is_unspecified());
        if let Ok(destination) = Cidr::new(IpAddr::V4(network), *prefix)
            && gateway.is_none_or(may_be_host)
        {
            routes.push(LeasedRoute {
                destination,
                gateway,
            });
        }
    }
    routes
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}
