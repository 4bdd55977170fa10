//! The client against servers that answer, send NAKs, disappear and lie: the state machine on a
//! simulated clock, the decoder on arbitrary bytes, and the whole client on a pair of virtual
//! Ethernet devices.

mod on_machine;
mod on_network;
mod on_wire;

use std::net::Ipv4Addr;

use super::message::{Kind, Message, code};
use super::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 5);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 254);

fn decode(message: &[u8]) -> Message {
    Message::decode(message).unwrap()
}

/// A server's answer to a query, with the usual options.
fn answer(query: &Message, kind: Kind, seconds: u32) -> Message {
    let mut message = Message::query(kind, query.xid, query.mac);
    message.from_server = true;
    message.set(code::SERVER, &SERVER.octets());
    if kind != Kind::Nak {
        message.granted = ADDRESS;
        message.set(code::LEASE_TIME, &seconds.to_be_bytes());
        message.set(code::SUBNET_MASK, &[255, 255, 255, 0]);
        message.set(code::ROUTERS, &ROUTER.octets());
        message.set(code::NAME_SERVERS, &SERVER.octets());
        message.set(code::TIME_SERVERS, &SERVER.octets());
        message.set(code::DOMAIN, b"Example.com");
    }
    message
}

fn frame_to_client(message: &[u8]) -> Vec<u8> {
    let from = ([2, 0, 0, 0, 0, 1], SERVER, wire::SERVER_PORT);
    wire::frame(from, (MAC, ADDRESS, wire::CLIENT_PORT), message)
}
