//! The format of DHCP messages (RFC 2131 and 2132), as far as a client needs it.
//!
//! Options are stored as bytes by their code. An option that occurs several times is one option in
//! parts (RFC 3396), and options may continue in the fields for file and server name (option
//! overload). Decoding accepts any bytes and never panics; encoding accepts what the callers in
//! this module create.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The codes of the supported options.
pub(crate) mod code {
    pub(crate) const SUBNET_MASK: u8 = 1;
    pub(crate) const ROUTERS: u8 = 3;
    pub(crate) const NAME_SERVERS: u8 = 6;
    pub(crate) const HOST_NAME: u8 = 12;
    pub(crate) const DOMAIN: u8 = 15;
    pub(crate) const MTU: u8 = 26;
    pub(crate) const TIME_SERVERS: u8 = 42;
    pub(crate) const WANTED_ADDRESS: u8 = 50;
    pub(crate) const LEASE_TIME: u8 = 51;
    pub(crate) const OVERLOAD: u8 = 52;
    pub(crate) const KIND: u8 = 53;
    pub(crate) const SERVER: u8 = 54;
    pub(crate) const WANTED_OPTIONS: u8 = 55;
    pub(crate) const MAX_SIZE: u8 = 57;
    pub(crate) const RENEW_TIME: u8 = 58;
    pub(crate) const REBIND_TIME: u8 = 59;
    pub(crate) const CLIENT: u8 = 61;
    pub(crate) const SEARCH: u8 = 119;
    pub(crate) const CLASSLESS_ROUTES: u8 = 121;
}

const PAD: u8 = 0;
const END: u8 = 255;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
/// The offset of the options, after the cookie.
const OPTIONS: usize = 240;
/// The fields in which options may continue.
const SERVER_NAME: std::ops::Range<usize> = 44..108;
const FILE: std::ops::Range<usize> = 108..236;
/// Some relays drop shorter messages.
const MIN_MESSAGE_LENGTH: usize = 300;

/// The type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Discover = 1,
    Offer = 2,
    Request = 3,
    Decline = 4,
    Ack = 5,
    Nak = 6,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        let kinds = [
            Self::Discover,
            Self::Offer,
            Self::Request,
            Self::Decline,
            Self::Ack,
            Self::Nak,
        ];
        kinds.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Why bytes are not a DHCP message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("expected at least 240 bytes, got {0}")]
    Short(usize),
    #[error("no magic cookie")]
    Cookie,
    #[error("not for an Ethernet device")]
    Hardware,
    #[error("option {0} is truncated")]
    CutOff(u8),
    #[error("option {0} has an invalid length")]
    Length(u8),
}

/// A DHCP message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    /// Whether a server sent it.
    pub from_server: bool,
    /// Its type; `None` for types that a client does not need.
    pub kind: Option<Kind>,
    /// The ID of the exchange.
    pub xid: u32,
    /// Seconds since the client started the exchange.
    pub seconds: u16,
    /// The client's hardware address.
    pub mac: [u8; 6],
    /// The address that the client already uses (`ciaddr`).
    pub in_use: Ipv4Addr,
    /// The address that the server grants (`yiaddr`).
    pub granted: Ipv4Addr,
    options: BTreeMap<u8, Vec<u8>>,
}

impl Message {
    /// Creates a client's message, with the options that all of them have.
    pub(crate) fn query(kind: Kind, xid: u32, mac: [u8; 6]) -> Self {
        let mut message = Self {
            from_server: false,
            kind: Some(kind),
            xid,
            seconds: 0,
            mac,
            in_use: Ipv4Addr::UNSPECIFIED,
            granted: Ipv4Addr::UNSPECIFIED,
            options: BTreeMap::new(),
        };
        // Type 1 (Ethernet) and the address, as most clients identify themselves.
        let [a, b, c, d, e, f] = mac;
        message.set(code::CLIENT, &[1, a, b, c, d, e, f]);
        message.set(code::MAX_SIZE, &1500_u16.to_be_bytes());
        // Classless routes before routers, as RFC 3442 requires.
        let wanted = [
            code::SUBNET_MASK,
            code::CLASSLESS_ROUTES,
            code::ROUTERS,
            code::NAME_SERVERS,
            code::DOMAIN,
            code::MTU,
            code::SEARCH,
            code::TIME_SERVERS,
            code::LEASE_TIME,
            code::RENEW_TIME,
            code::REBIND_TIME,
        ];
        message.set(code::WANTED_OPTIONS, &wanted);
        message
    }

    /// Sets an option; a value longer than 255 bytes is truncated.
    pub(crate) fn set(&mut self, code: u8, value: &[u8]) {
        let value = &value[..value.len().min(255)];
        self.options.insert(code, value.to_vec());
    }

    /// The bytes of an option.
    pub(crate) fn option(&self, code: u8) -> Option<&[u8]> {
        self.options.get(&code).map(Vec::as_slice)
    }

    /// An option that contains one address.
    pub(crate) fn address(&self, code: u8) -> Result<Option<Ipv4Addr>, Malformed> {
        Ok(self.number(code)?.map(Ipv4Addr::from))
    }

    /// An option that contains a 32-bit number.
    pub(crate) fn number(&self, code: u8) -> Result<Option<u32>, Malformed> {
        let Some(bytes) = self.option(code) else {
            return Ok(None);
        };
        let bytes = bytes.try_into().map_err(|_| Malformed::Length(code))?;
        Ok(Some(u32::from_be_bytes(bytes)))
    }

    /// An option that contains a list of addresses.
    pub(crate) fn addresses(&self, code: u8) -> Vec<Ipv4Addr> {
        let bytes = self.option(code).unwrap_or_default();
        let address = |four: &[u8]| Ipv4Addr::new(four[0], four[1], four[2], four[3]);
        bytes.chunks_exact(4).map(address).collect()
    }

    /// Encodes the message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; OPTIONS];
        bytes[0] = if self.from_server { 2 } else { 1 };
        bytes[1] = 1; // Ethernet
        bytes[2] = 6; // the length of its addresses
        bytes[4..8].copy_from_slice(&self.xid.to_be_bytes());
        bytes[8..10].copy_from_slice(&self.seconds.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.in_use.octets());
        bytes[16..20].copy_from_slice(&self.granted.octets());
        bytes[28..34].copy_from_slice(&self.mac);
        bytes[236..240].copy_from_slice(&COOKIE);
        if let Some(kind) = self.kind {
            bytes.extend([code::KIND, 1, kind as u8]);
        }
        for (code, value) in &self.options {
            bytes.extend([*code, value.len() as u8]);
            bytes.extend_from_slice(value);
        }
        bytes.push(END);
        if bytes.len() < MIN_MESSAGE_LENGTH {
            bytes.resize(MIN_MESSAGE_LENGTH, PAD);
        }
        bytes
    }

    /// Whether each option fits into one part, as those that are set do.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn is_encodable(&self) -> bool {
        self.options.values().all(|value| value.len() <= 255)
    }

    /// Decodes a message.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() < OPTIONS {
            return Err(Malformed::Short(bytes.len()));
        }
        if bytes[236..240] != COOKIE {
            return Err(Malformed::Cookie);
        }
        if bytes[1] != 1 || bytes[2] != 6 {
            return Err(Malformed::Hardware);
        }
        let mut options = BTreeMap::new();
        read_options(&bytes[OPTIONS..], &mut options)?;
        let overload = options
            .get(&code::OVERLOAD)
            .and_then(|v| v.first().copied());
        let overload = overload.unwrap_or(0);
        if overload & 1 != 0 {
            read_options(&bytes[FILE], &mut options)?;
        }
        if overload & 2 != 0 {
            read_options(&bytes[SERVER_NAME], &mut options)?;
        }
        let kind = match options.remove(&code::KIND).as_deref() {
            Some([kind]) => Kind::of(*kind),
            _ => None,
        };
        let four = |at: usize| -> [u8; 4] { std::array::from_fn(|i| bytes[at + i]) };
        Ok(Self {
            from_server: bytes[0] == 2,
            kind,
            xid: u32::from_be_bytes(four(4)),
            seconds: u16::from_be_bytes([bytes[8], bytes[9]]),
            mac: std::array::from_fn(|i| bytes[28 + i]),
            in_use: Ipv4Addr::from(four(12)),
            granted: Ipv4Addr::from(four(16)),
            options,
        })
    }
}

fn read_options(mut bytes: &[u8], options: &mut BTreeMap<u8, Vec<u8>>) -> Result<(), Malformed> {
    while let [code, rest @ ..] = bytes {
        match *code {
            PAD => bytes = rest,
            END => break,
            code => {
                let (length, rest) = rest.split_first().ok_or(Malformed::CutOff(code))?;
                let value = rest.split_at_checked(usize::from(*length));
                let (value, rest) = value.ok_or(Malformed::CutOff(code))?;
                options.entry(code).or_default().extend_from_slice(value);
                bytes = rest;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query() -> Message {
        Message::query(Kind::Discover, 0x0102_0304, [2, 0, 0, 0, 0, 9])
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let mut message = query();
        message.seconds = 7;
        message.in_use = [10, 0, 0, 1].into();
        message.set(code::HOST_NAME, b"node");
        let bytes = message.encode();
        assert!(bytes.len() >= MIN_MESSAGE_LENGTH);
        assert_eq!(Message::decode(&bytes).unwrap(), message);
    }

    #[test]
    fn the_layout_is_the_standards() {
        let bytes = query().encode();
        assert_eq!(bytes[..8], [1, 1, 6, 0, 1, 2, 3, 4]);
        assert_eq!(bytes[28..34], [2, 0, 0, 0, 0, 9]);
        assert_eq!(bytes[236..243], [99, 130, 83, 99, 53, 1, 1]);
    }

    #[test]
    fn options_in_pieces_and_in_other_fields_are_put_together() {
        let mut bytes = query().encode();
        bytes.truncate(OPTIONS);
        bytes.extend([0, 6, 2, 10, 0, 0, 52, 1, 3, 6, 2, 0, 1, 255, 9]);
        bytes[108..114].copy_from_slice(&[3, 4, 10, 0, 0, 2]);
        bytes[44..48].copy_from_slice(&[12, 2, b'a', b'b']);
        let message = Message::decode(&bytes).unwrap();
        let servers = message.addresses(code::NAME_SERVERS);
        assert_eq!(servers, [Ipv4Addr::new(10, 0, 0, 1)]);
        assert_eq!(message.addresses(code::ROUTERS).len(), 1);
        assert_eq!(message.option(code::HOST_NAME), Some(&b"ab"[..]));
    }

    #[test]
    fn malformed_messages_are_named() {
        let good = query().encode();
        assert_eq!(Message::decode(&good[..239]), Err(Malformed::Short(239)));
        let change = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            Message::decode(&bytes)
        };
        assert_eq!(change(236, 0), Err(Malformed::Cookie));
        assert_eq!(change(2, 17), Err(Malformed::Hardware));
        assert_eq!(change(241, 255), Err(Malformed::CutOff(code::KIND)));
        let mut message = query();
        message.set(code::SERVER, &[1, 2, 3]);
        let message = Message::decode(&message.encode()).unwrap();
        assert_eq!(message.address(code::SERVER), Err(Malformed::Length(54)));
    }
}
