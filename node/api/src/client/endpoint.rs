//! Addresses of servers as text.

use std::fmt;
use std::str::FromStr;

use crate::names::ports;

/// Address of a curator: an IP address or a host name, and a port.
///
/// Nodes use IP addresses only, because their binary cannot resolve names.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
}

/// The text is not an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint: expected HOST or HOST:PORT, IPv6 addresses in [brackets], got {found:?}")]
pub struct EndpointError {
    found: String,
}

impl Endpoint {
    /// Parses HOST or HOST:PORT.
    pub fn parse(text: &str, default_port: u16) -> Result<Self, EndpointError> {
        let wrong = || EndpointError {
            found: text.to_owned(),
        };
        if let Ok(address) = text.parse::<std::net::SocketAddr>() {
            return Ok(address.into());
        }
        let literal = text
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .unwrap_or(text);
        if let Ok(address) = literal.parse::<std::net::IpAddr>() {
            return Ok(Self::new(address, default_port));
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, port.parse().map_err(|_| wrong())?),
            None => (text, default_port),
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        if host.is_empty() || host.len() > 253 || port == 0 || !host.bytes().all(is_name) {
            return Err(wrong());
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }

    /// From an address as in a cluster directory; port 0 is the default port.
    pub fn new(host: std::net::IpAddr, port: u16) -> Self {
        Self {
            host: host.to_string(),
            port: if port == 0 { ports::CURATOR } else { port },
        }
    }

    /// The same host, at another port.
    #[must_use]
    pub fn at_port(&self, port: u16) -> Self {
        Self {
            host: self.host.clone(),
            port,
        }
    }

    /// Its host: a name, or an IP address without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl From<std::net::SocketAddr> for Endpoint {
    fn from(address: std::net::SocketAddr) -> Self {
        Self::new(address.ip(), address.port())
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        Self::parse(text, ports::CURATOR)
    }
}
