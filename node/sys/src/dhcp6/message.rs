//! The format of DHCPv6 messages (RFC 8415), as far as a client needs it.
//!
//! ```text
//! message  type (1), transaction (3), options
//! option   code (2), length (2), content; IA_NA and its addresses have options in their content
//! ```
//!
//! Numbers are big-endian. What a client has to ignore is no [`Answer`]: messages without the identifiers of client and server,
//! those for others, and those whose options do not fill them. An option that is malformed in itself has no part in the answer.

use std::net::Ipv6Addr;
use std::time::Duration;

use crate::dhcp::domains;
use crate::router_advertisements::{self, MOST_SERVERS};

/// A lifetime without an end.
const INFINITE: u32 = u32::MAX;

/// Codes of options.
mod code {
    pub(super) const CLIENT_ID: u16 = 1;
    pub(super) const SERVER_ID: u16 = 2;
    pub(super) const IA_NA: u16 = 3;
    pub(super) const IA_ADDRESS: u16 = 5;
    pub(super) const REQUESTED: u16 = 6;
    pub(super) const PREFERENCE: u16 = 7;
    pub(super) const ELAPSED: u16 = 8;
    pub(super) const STATUS: u16 = 13;
    pub(super) const NAME_SERVERS: u16 = 23;
    pub(super) const DOMAINS: u16 = 24;
    pub(super) const REFRESH: u16 = 32;
    pub(super) const NTP: u16 = 56;
    pub(super) const SOL_MAX_RT: u16 = 82;
}

/// What every message of the client asks for.
const WANTED: [u16; 5] = [
    code::NAME_SERVERS,
    code::DOMAINS,
    code::NTP,
    code::SOL_MAX_RT,
    code::REFRESH,
];
/// The address of a time server, within the option of these.
const NTP_ADDRESS: u16 = 1;

/// A transaction, chosen by the client.
pub(super) type Transaction = [u8; 3];

/// The kinds of messages of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Who has addresses?
    Solicit = 1,
    /// The address of this advertisement, please.
    Request = 3,
    /// For longer, by the same server.
    Renew = 5,
    /// For longer, by any server.
    Rebind = 6,
    /// Another machine has the address.
    Decline = 9,
    /// Only name servers and the like.
    InformationRequest = 11,
}

/// A message of the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question<'a> {
    /// Its kind.
    pub(super) kind: Kind,
    /// The transaction.
    pub(super) transaction: Transaction,
    /// The client's DUID.
    pub(super) client: &'a [u8],
    /// The DUID of the server that it is for; none: for all.
    pub(super) server: Option<&'a [u8]>,
    /// The identifier of the client's only association, and the addresses that it asks for; none: only for information.
    pub(super) association: Option<(u32, &'a [Ipv6Addr])>,
    /// Since the first message of the transaction.
    pub(super) elapsed: Duration,
}

impl Question<'_> {
    /// Encodes it.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind as u8];
        bytes.extend(self.transaction);
        put(&mut bytes, code::CLIENT_ID, self.client);
        if let Some(server) = self.server {
            put(&mut bytes, code::SERVER_ID, server);
        }
        let hundredths = (self.elapsed.as_millis() / 10).min(u16::MAX.into()) as u16;
        put(&mut bytes, code::ELAPSED, &hundredths.to_be_bytes());
        if let Some((identifier, addresses)) = self.association {
            // T1 and T2 are the server's decision, and so are the lifetimes.
            let mut content = identifier.to_be_bytes().to_vec();
            content.extend([0; 8]);
            for address in addresses {
                let address = [&address.octets()[..], &[0; 8]].concat();
                put(&mut content, code::IA_ADDRESS, &address);
            }
            put(&mut bytes, code::IA_NA, &content);
        }
        let wanted: Vec<u8> = WANTED.iter().flat_map(|code| code.to_be_bytes()).collect();
        put(&mut bytes, code::REQUESTED, &wanted);
        bytes
    }
}

fn put(bytes: &mut Vec<u8>, code: u16, content: &[u8]) {
    bytes.extend(code.to_be_bytes());
    bytes.extend((content.len() as u16).to_be_bytes());
    bytes.extend(content);
}

/// What a server says of what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// What was asked for is granted.
    Success,
    /// There are no addresses.
    NoAddresses,
    /// The server does not know the association.
    NoBinding,
    /// Any other, by its code.
    Other(u16),
}

/// An address of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granted {
    /// The address.
    pub(super) address: Ipv6Addr,
    /// How long it is used for new connections; none: without an end.
    pub(super) preferred: Option<Duration>,
    /// How long it is used; none: without an end.
    pub(super) valid: Option<Duration>,
}

/// A message of a server to this client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// An advertisement, not a reply.
    pub(super) is_advertisement: bool,
    /// The transaction that it answers.
    pub(super) transaction: Transaction,
    /// The DUID of the server.
    pub(super) server: Vec<u8>,
    /// Of several advertisements, the one with the highest number is taken.
    pub(super) preference: u8,
    /// Of the whole message, or of the association, whichever is not a success.
    pub(super) status: Status,
    /// The first usable address of the association.
    pub(super) granted: Option<Granted>,
    /// Addresses of the association that must not be used any longer.
    pub(super) ended: Vec<Ipv6Addr>,
    /// T1 and T2 of the association; zero: the client decides.
    pub(super) times: (Duration, Duration),
    /// Name servers, in order of preference.
    pub(super) name_servers: Vec<Ipv6Addr>,
    /// Time servers.
    pub(super) time_servers: Vec<Ipv6Addr>,
    /// Domains in which names are looked up.
    pub(super) domains: Vec<String>,
    /// When to ask for information again.
    pub(super) refresh: Option<Duration>,
    /// The longest pause between two solicitations that the server wants.
    pub(super) longest_pause: Option<Duration>,
}

impl Answer {
    /// Decodes a message to the client with this DUID, whose association has this identifier.
    pub(super) fn decode(bytes: &[u8], client: &[u8], association: u32) -> Option<Self> {
        const ADVERTISE: u8 = 2;
        const REPLY: u8 = 7;
        let (&[kind, first, second, third], options) = bytes.split_first_chunk()?;
        let mut answer = Self {
            is_advertisement: match kind {
                ADVERTISE => true,
                REPLY => false,
                _ => return None,
            },
            transaction: [first, second, third],
            server: Vec::new(),
            preference: 0,
            status: Status::Success,
            granted: None,
            ended: Vec::new(),
            times: (Duration::ZERO, Duration::ZERO),
            name_servers: Vec::new(),
            time_servers: Vec::new(),
            domains: Vec::new(),
            refresh: None,
            longest_pause: None,
        };
        let mut is_for_client = false;
        for option in Options(options) {
            let (code, content) = option?;
            match code {
                code::CLIENT_ID => is_for_client = content == client,
                code::SERVER_ID => answer.server = content.to_vec(),
                code => answer.take(code, content, association),
            }
        }
        (is_for_client && !answer.server.is_empty()).then_some(answer)
    }

    /// Whether it gives the client an address.
    pub(super) fn grants(&self) -> bool {
        self.status == Status::Success && self.granted.is_some()
    }

    fn take(&mut self, code: u16, content: &[u8], association: u32) {
        match code {
            code::PREFERENCE => self.preference = content.first().copied().unwrap_or(0),
            code::STATUS => self.fail(status(content)),
            code::IA_NA => drop(self.take_association(content, association)),
            code::NAME_SERVERS => self.name_servers = servers(content),
            code::DOMAINS => self.domains = domains::list(content),
            code::NTP => self.time_servers = time_servers(content),
            code::REFRESH => self.refresh = seconds(content),
            code::SOL_MAX_RT => {
                // RFC 8415, section 21.24: other values are ignored.
                let allowed = Duration::from_secs(60)..=Duration::from_secs(86_400);
                self.longest_pause = seconds(content).filter(|it| allowed.contains(it));
            }
            _ => {}
        }
    }

    fn take_association(&mut self, content: &[u8], association: u32) -> Option<()> {
        let (head, options) = content.split_first_chunk::<12>()?;
        let number =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if number(0) != association {
            return None;
        }
        let (first, second) = (number(4), number(8));
        // RFC 8415, section 21.4: such an association is discarded.
        if first > second && second > 0 {
            return None;
        }
        let (mut granted, mut ended) = (None, Vec::new());
        for option in Options(options) {
            match option? {
                (code::STATUS, content) => self.fail(status(content)),
                (code::IA_ADDRESS, content) => match address(content) {
                    Some(one) if one.valid == Some(Duration::ZERO) => ended.push(one.address),
                    one => granted = granted.or(one),
                },
                _ => {}
            }
        }
        self.granted = granted;
        self.ended = ended;
        self.times = (
            Duration::from_secs(first.into()),
            Duration::from_secs(second.into()),
        );
        Some(())
    }

    /// The first failure counts.
    fn fail(&mut self, status: Status) {
        if self.status == Status::Success {
            self.status = status;
        }
    }
}

/// The options of a message or of an option. One that does not end within it is `None`, and the last.
struct Options<'a>(&'a [u8]);

impl<'a> Iterator for Options<'a> {
    type Item = Option<(u16, &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let bytes = std::mem::take(&mut self.0);
        let option = bytes.split_first_chunk().and_then(|(head, rest)| {
            let &[a, b, c, d] = head;
            let (content, rest) = rest.split_at_checked(u16::from_be_bytes([c, d]).into())?;
            self.0 = rest;
            Some((u16::from_be_bytes([a, b]), content))
        });
        Some(option)
    }
}

fn status(content: &[u8]) -> Status {
    match content.first_chunk().map(|code| u16::from_be_bytes(*code)) {
        Some(0) => Status::Success,
        Some(2) => Status::NoAddresses,
        Some(3) => Status::NoBinding,
        Some(code) => Status::Other(code),
        None => Status::Other(1),
    }
}

/// With a lifetime of zero, it has ended.
fn address(content: &[u8]) -> Option<Granted> {
    let (octets, rest) = content.split_first_chunk::<16>()?;
    let (times, options) = rest.split_first_chunk::<8>()?;
    let [a, b, c, d, e, f, g, h] = *times;
    let (preferred, valid) = (
        u32::from_be_bytes([a, b, c, d]),
        u32::from_be_bytes([e, f, g, h]),
    );
    let address = Ipv6Addr::from(*octets);
    let is_usable = !address.is_multicast()
        && !address.is_unspecified()
        && !address.is_loopback()
        && !address.is_unicast_link_local();
    let is_granted = Options(options).all(|option| match option {
        Some((code::STATUS, content)) => status(content) == Status::Success,
        Some(_) => true,
        None => false,
    });
    (is_usable && is_granted && preferred <= valid).then(|| Granted {
        address,
        preferred: lifetime(preferred),
        valid: lifetime(valid),
    })
}

fn lifetime(seconds: u32) -> Option<Duration> {
    (seconds != INFINITE).then(|| Duration::from_secs(seconds.into()))
}

fn servers(content: &[u8]) -> Vec<Ipv6Addr> {
    let servers = router_advertisements::servers(content);
    servers.take(MOST_SERVERS).collect()
}

/// RFC 5908: each server is an option within the option.
fn time_servers(content: &[u8]) -> Vec<Ipv6Addr> {
    let options = Options(content).map_while(|option| option);
    let addresses = options.filter(|(code, _)| *code == NTP_ADDRESS);
    let addresses: Vec<u8> = addresses
        .flat_map(|(_, content)| content)
        .copied()
        .collect();
    servers(&addresses)
}

fn seconds(content: &[u8]) -> Option<Duration> {
    let seconds = content
        .first_chunk()
        .map(|bytes| u32::from_be_bytes(*bytes));
    seconds.map(|seconds| Duration::from_secs(seconds.into()))
}
