//! The address of a time server, as parameters and the cluster setting `time_servers` name it.
//!
//! An IP address, with a port if it is not the usual one: `192.0.2.1`, `192.0.2.1:1123`,
//! `2001:db8::1`, `[2001:db8::1]:1123`. A name is an error: the node's binary resolves none.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// The port of NTP.
pub const PORT: u16 = 123;
/// Maximum number of time servers of a node.
pub const MOST: usize = 8;
/// What the text of a time server should be.
pub const EXPECTED: &str = "the IP address of a time server (names are not resolved)";

/// A time server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimeServer(SocketAddr);

/// A text that is not the address of a time server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {EXPECTED}, got {found:?}")]
pub struct TimeServerError {
    /// The text.
    pub found: String,
}

impl TimeServer {
    /// Its address and port.
    pub fn address(self) -> SocketAddr {
        self.0
    }
}

impl From<IpAddr> for TimeServer {
    fn from(address: IpAddr) -> Self {
        Self(SocketAddr::new(address, PORT))
    }
}

impl From<SocketAddr> for TimeServer {
    fn from(address: SocketAddr) -> Self {
        Self(address)
    }
}

impl FromStr for TimeServer {
    type Err = TimeServerError;

    fn from_str(text: &str) -> Result<Self, TimeServerError> {
        let alone = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, PORT));
        let address = alone.or_else(|_| text.parse::<SocketAddr>());
        let is_one = |address: &SocketAddr| {
            let ip = address.ip();
            address.port() != 0 && !ip.is_unspecified() && !ip.is_multicast()
        };
        match address.ok().filter(is_one) {
            Some(address) => Ok(Self(address)),
            None => Err(TimeServerError {
                found: text.to_owned(),
            }),
        }
    }
}

/// Without the port, if it is the usual one.
impl fmt::Display for TimeServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.port() {
            PORT => self.0.ip().fmt(f),
            _ => self.0.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_server_is_an_address_with_or_without_a_port() {
        for (text, address) in [
            ("192.0.2.1", "192.0.2.1:123"),
            ("192.0.2.1:1123", "192.0.2.1:1123"),
            ("2001:db8::1", "[2001:db8::1]:123"),
            ("[2001:db8::1]:1123", "[2001:db8::1]:1123"),
        ] {
            let server: TimeServer = text.parse().unwrap();
            assert_eq!(server.address(), address.parse().unwrap());
            assert_eq!(server.to_string(), text);
        }
    }

    #[test]
    fn a_name_is_refused_with_the_reason() {
        for text in [
            "",
            "pool.ntp.org",
            "192.0.2.1:0",
            "0.0.0.0",
            "::",
            "224.0.1.1",
            "192.0.2",
            "[2001:db8::1]",
        ] {
            let error = text.parse::<TimeServer>().unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "expected the IP address of a time server (names are not resolved), got {text:?}"
                )
            );
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_can_be_read(ip: IpAddr, port in 1..=u16::MAX) {
            prop_assume!(!ip.is_unspecified() && !ip.is_multicast());
            let server = TimeServer::from(SocketAddr::new(ip, port));
            prop_assert_eq!(server.to_string().parse(), Ok(server));
        }

        #[test]
        fn arbitrary_texts_are_judged_without_harm(text: String) {
            let _ = text.parse::<TimeServer>();
        }
    }
}
