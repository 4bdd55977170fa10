//! The proxy of outgoing TCP connections: which connections are made through one, and how it is asked. Pure.
//!
//! Programs on the host use the proxy that its environment names, and often nothing else gets out of such a network. So
//! the gateway asks it, too, by HTTP's CONNECT: connections to port 443 through `HTTPS_PROXY`, to port 80 through
//! `HTTP_PROXY`, and where that is not set, or to another port, through `ALL_PROXY`; except to the addresses in
//! `NO_PROXY`. The names may be in lower case, which takes precedence.
//!
//! What this cannot do: machines have resolved their names before they connect, so the proxy is asked for an address,
//! and one that permits only certain names will refuse; for the same reason, names in `NO_PROXY` match nothing. UDP and
//! ping do not use a proxy. A connection that the proxy refuses is refused to the machine, rather than made directly:
//! whoever has set a proxy may have reasons.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

/// The port of a proxy that does not name one.
const PORT: u16 = 80;

/// The longest answer to a CONNECT.
pub(crate) const MAX_HEAD: usize = 8 << 10;

/// The proxy settings of an environment, each as the variable's value.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProxySettings {
    /// `HTTP_PROXY`: for port 80.
    pub http: Option<String>,
    /// `HTTPS_PROXY`: for port 443.
    pub https: Option<String>,
    /// `ALL_PROXY`: for ports without a proxy of their own.
    pub all: Option<String>,
    /// `NO_PROXY`: addresses, each with a port or not, and networks, which are reached directly.
    pub no_proxy: Option<String>,
}

/// They may contain a password.
impl fmt::Debug for ProxySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProxySettings(…)")
    }
}

impl ProxySettings {
    /// Those of an environment.
    pub(crate) fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let either = |name: &str| {
            let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
            set(&name.to_ascii_lowercase()).or_else(|| set(name))
        };
        Self {
            http: either("HTTP_PROXY"),
            https: either("HTTPS_PROXY"),
            all: either("ALL_PROXY"),
            no_proxy: either("NO_PROXY"),
        }
    }
}

/// A proxy that cannot be used, or has refused. The URL is not shown, because it may contain a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProxyError {
    #[error("expected a URL such as http://proxy.example:3128, got another one")]
    Url,
    #[error("expected a URL with the scheme http, got {0}")]
    Scheme(String),
    #[error("expected an answer of HTTP/1, got another one")]
    Answer,
    #[error("the proxy refused: {0}")]
    Refused(String),
}

/// A proxy.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Proxy {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// The value of the header `Proxy-Authorization`.
    authorization: Option<String>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Which connections are made through which proxy.
#[derive(Debug, Default)]
pub(crate) struct Proxies {
    http: Option<Proxy>,
    https: Option<Proxy>,
    all: Option<Proxy>,
    exceptions: Vec<Exception>,
}

/// An entry of `NO_PROXY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exception {
    All,
    Endpoint(SocketAddr),
    Network(IpAddr, u8),
}

impl Proxies {
    /// The proxies of these settings, and what is wrong with those that cannot be used, by the variable's name.
    pub(crate) fn new(settings: &ProxySettings) -> (Self, Vec<(&'static str, ProxyError)>) {
        let mut wrong = Vec::new();
        let mut proxy = |name, url: &Option<String>| match url.as_deref().map(parse) {
            None => None,
            Some(Ok(proxy)) => Some(proxy),
            Some(Err(error)) => {
                wrong.push((name, error));
                None
            }
        };
        let proxies = Self {
            http: proxy("HTTP_PROXY", &settings.http),
            https: proxy("HTTPS_PROXY", &settings.https),
            all: proxy("ALL_PROXY", &settings.all),
            exceptions: exceptions(settings.no_proxy.as_deref().unwrap_or_default()),
        };
        (proxies, wrong)
    }

    /// The proxy for a connection; `None` if it is made directly.
    pub(crate) fn to(&self, destination: SocketAddr) -> Option<&Proxy> {
        if self.exceptions.iter().any(|one| one.covers(destination)) {
            return None;
        }
        let own = match destination.port() {
            80 => self.http.as_ref(),
            443 => self.https.as_ref(),
            _ => None,
        };
        own.or(self.all.as_ref())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.http.is_none() && self.https.is_none() && self.all.is_none()
    }
}

impl Exception {
    fn covers(self, destination: SocketAddr) -> bool {
        match self {
            Self::All => true,
            Self::Endpoint(endpoint) => endpoint == destination,
            Self::Network(network, prefix) => shares(network, destination.ip(), prefix),
        }
    }
}

/// Whether two addresses have the first bits in common.
fn shares(a: IpAddr, b: IpAddr, prefix: u8) -> bool {
    let prefix = u32::from(prefix);
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            (a.to_bits() ^ b.to_bits()).leading_zeros() >= prefix.min(32)
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            (a.to_bits() ^ b.to_bits()).leading_zeros() >= prefix.min(128)
        }
        _ => false,
    }
}

/// Entries that are not addresses are names, which match nothing here.
fn exceptions(text: &str) -> Vec<Exception> {
    let whole = |address: IpAddr| match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    };
    let network = |entry: &str| {
        let (address, prefix) = entry.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let prefix = prefix.parse().ok()?;
        (prefix <= whole(address)).then_some(Exception::Network(address, prefix))
    };
    let entry = |entry: &str| {
        if entry == "*" {
            return Some(Exception::All);
        }
        let bare = entry.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = bare.parse() {
            return Some(Exception::Network(address, whole(address)));
        }
        entry
            .parse()
            .map(Exception::Endpoint)
            .ok()
            .or_else(|| network(entry))
    };
    text.split([',', ' '])
        .filter_map(|text| entry(text.trim()))
        .collect()
}

/// Parses a proxy's URL.
fn parse(url: &str) -> Result<Proxy, ProxyError> {
    let url = url.trim();
    let rest = match url.split_once("://") {
        None => url,
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
        Some((scheme, _)) => return Err(ProxyError::Scheme(scheme.to_owned())),
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let (user, address) = match authority.rsplit_once('@') {
        Some((user, address)) => (Some(user), address),
        None => (None, authority),
    };
    let (host, port) = match address.strip_prefix('[') {
        Some(address) => {
            let (host, port) = address.split_once(']').ok_or(ProxyError::Url)?;
            let port = match port.is_empty() {
                true => None,
                false => Some(port.strip_prefix(':').ok_or(ProxyError::Url)?),
            };
            (host, port)
        }
        None => match address.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (address, None),
        },
    };
    let is_plain = |byte: u8| byte.is_ascii_graphic();
    if host.is_empty() || !host.bytes().all(is_plain) {
        return Err(ProxyError::Url);
    }
    let port = match port.filter(|port| !port.is_empty()) {
        Some(port) => port.parse().map_err(|_| ProxyError::Url)?,
        None => PORT,
    };
    let authorization = user.map(|user| format!("Basic {}", STANDARD.encode(decoded(user))));
    Ok(Proxy {
        host: host.to_owned(),
        port,
        authorization,
    })
}

/// Resolves percent-encoding; what is not well encoded stays.
fn decoded(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let digit = |at: usize| after.get(at).and_then(|byte| (*byte as char).to_digit(16));
        match (byte, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = &after[2..];
            }
            _ => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    bytes
}

/// The request for a connection.
pub(crate) fn request(proxy: &Proxy, destination: SocketAddr) -> String {
    let mut request = format!("CONNECT {destination} HTTP/1.1\r\nHost: {destination}\r\n");
    if let Some(value) = &proxy.authorization {
        request.push_str(&format!("Proxy-Authorization: {value}\r\n"));
    }
    request + "\r\n"
}

/// Whether the head of an answer is complete.
pub(crate) fn is_complete(head: &[u8]) -> bool {
    head.ends_with(b"\r\n\r\n") || head.ends_with(b"\n\n")
}

/// What the head of an answer says.
pub(crate) fn verdict(head: &[u8]) -> Result<(), ProxyError> {
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = std::str::from_utf8(line).map_err(|_| ProxyError::Answer)?;
    let (version, status) = line.trim_end().split_once(' ').ok_or(ProxyError::Answer)?;
    if !matches!(version, "HTTP/1.0" | "HTTP/1.1") {
        return Err(ProxyError::Answer);
    }
    let code = status.get(..3).unwrap_or_default();
    let is_code = code.bytes().all(|byte| byte.is_ascii_digit());
    match (is_code && code.len() == 3, code.starts_with('2')) {
        (true, true) => Ok(()),
        (true, false) => Err(ProxyError::Refused(
            status.escape_debug().take(80).collect(),
        )),
        (false, _) => Err(ProxyError::Answer),
    }
}

#[cfg(test)]
mod tests;
