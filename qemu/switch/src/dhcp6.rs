//! A DHCPv6 server (RFC 8415) with one fixed address for each machine.
//!
//! It remembers nothing: whatever is asked is granted for the duration of a lease, and what a machine gives back is granted again.
//! Relays are not supported, as there are none on this network. Pure.
//!
//! smoltcp has no DHCPv6. Of the options of a query only four matter: who asks, whom, for which association, and nothing of its content.

use std::net::Ipv6Addr;
use std::time::Duration;

use super::GATEWAY_MAC;

/// The ports of servers and clients.
pub(super) const SERVER_PORT: u16 = 547;
pub(super) const CLIENT_PORT: u16 = 546;

const SOLICIT: u8 = 1;
const ADVERTISE: u8 = 2;
const REQUEST: u8 = 3;
const RENEW: u8 = 5;
const REBIND: u8 = 6;
const REPLY: u8 = 7;
const RELEASE: u8 = 8;
const DECLINE: u8 = 9;
const INFORMATION_REQUEST: u8 = 11;

const CLIENT_ID: u16 = 1;
const SERVER_ID: u16 = 2;
const IA_NA: u16 = 3;
const IA_ADDRESS: u16 = 5;
const NAME_SERVERS: u16 = 23;

/// The server.
#[derive(Debug)]
pub(super) struct Server {
    /// The name server of all machines.
    pub resolver: Ipv6Addr,
    /// For how long an address is granted, in whole seconds.
    pub lease: Duration,
}

impl Server {
    /// The answer to a message of the machine with this address. Anything but a valid message is not answered.
    pub(super) fn answer(&self, query: &[u8], address: Ipv6Addr) -> Option<Vec<u8>> {
        let (&[kind, a, b, c], options) = query.split_first_chunk()?;
        let (answer, grants) = match kind {
            SOLICIT => (ADVERTISE, true),
            REQUEST | RENEW | REBIND => (REPLY, true),
            RELEASE | DECLINE | INFORMATION_REQUEST => (REPLY, false),
            _ => return None,
        };
        let own = identifier();
        let client = find(options, CLIENT_ID)?;
        if find(options, SERVER_ID).is_some_and(|server| server != own) {
            return None;
        }
        let mut message = vec![answer, a, b, c];
        put(&mut message, CLIENT_ID, client);
        put(&mut message, SERVER_ID, &own);
        if grants {
            let association = find(options, IA_NA)?.first_chunk()?;
            put(&mut message, IA_NA, &self.grant(association, address));
        }
        put(&mut message, NAME_SERVERS, &self.resolver.octets());
        Some(message)
    }

    /// Machines renew after half of the lease.
    fn grant(&self, association: &[u8; 4], address: Ipv6Addr) -> Vec<u8> {
        let lease = u32::try_from(self.lease.as_secs()).unwrap_or(u32::MAX);
        let mut content = address.octets().to_vec();
        for lifetime in [lease, lease] {
            content.extend(lifetime.to_be_bytes());
        }
        let mut grant = association.to_vec();
        for time in [lease / 2, lease - lease / 8] {
            grant.extend(time.to_be_bytes());
        }
        put(&mut grant, IA_ADDRESS, &content);
        grant
    }
}

/// The DUID of the server: that of the gateway's Ethernet address.
fn identifier() -> Vec<u8> {
    [&[0, 3, 0, 1][..], &GATEWAY_MAC.0].concat()
}

fn put(message: &mut Vec<u8>, code: u16, content: &[u8]) {
    message.extend(code.to_be_bytes());
    message.extend((content.len() as u16).to_be_bytes());
    message.extend(content);
}

/// The content of the first option with this code.
fn find(mut options: &[u8], code: u16) -> Option<&[u8]> {
    loop {
        let (&[a, b, c, d], rest) = options.split_first_chunk()?;
        let (content, rest) = rest.split_at_checked(u16::from_be_bytes([c, d]).into())?;
        if u16::from_be_bytes([a, b]) == code {
            return Some(content);
        }
        options = rest;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ADDRESS: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x0b);
    const SERVER: Server = Server {
        resolver: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1),
        lease: Duration::from_secs(30),
    };

    fn query(kind: u8, options: &[(u16, &[u8])]) -> Vec<u8> {
        let mut message = vec![kind, 7, 8, 9];
        for (code, content) in options {
            put(&mut message, *code, content);
        }
        message
    }

    #[test]
    fn machines_are_granted_their_address_and_told_the_name_server() {
        let association = [&[0, 0, 0, 5][..], &[0; 8]].concat();
        let asked = [(CLIENT_ID, &b"me"[..]), (IA_NA, &association)];
        for (kind, expected) in [
            (SOLICIT, ADVERTISE),
            (REQUEST, REPLY),
            (RENEW, REPLY),
            (REBIND, REPLY),
        ] {
            let answer = SERVER.answer(&query(kind, &asked), ADDRESS);
            let answer = answer.expect("an answer");
            assert_eq!(answer[..4], [expected, 7, 8, 9]);
            let options = &answer[4..];
            assert_eq!(find(options, CLIENT_ID), Some(&b"me"[..]));
            let resolver = find(options, NAME_SERVERS);
            assert_eq!(resolver, Some(&SERVER.resolver.octets()[..]));
            let granted = find(options, IA_NA).expect("an association");
            assert_eq!(granted[..12], [0, 0, 0, 5, 0, 0, 0, 15, 0, 0, 0, 27]);
            let address = find(&granted[12..], IA_ADDRESS).expect("an address");
            assert_eq!(address[..16], ADDRESS.octets());
            assert_eq!(address[16..], [0, 0, 0, 30, 0, 0, 0, 30]);
        }
        let client = [(CLIENT_ID, &b"me"[..])];
        let answer = SERVER.answer(&query(INFORMATION_REQUEST, &client), ADDRESS);
        assert_eq!(find(&answer.expect("an answer")[4..], IA_NA), None);
    }

    #[test]
    fn others_are_not_answered() {
        let other = [(CLIENT_ID, &b"me"[..]), (SERVER_ID, &b"other"[..])];
        let nobody = [(IA_NA, &[0; 12][..])];
        let without_association = [(CLIENT_ID, &b"me"[..])];
        for query in [
            query(DECLINE, &other),
            query(SOLICIT, &nobody),
            query(SOLICIT, &without_association),
            query(REPLY, &without_association),
        ] {
            assert_eq!(SERVER.answer(&query, ADDRESS), None);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            SERVER.answer(&bytes, ADDRESS);
        }
    }
}
