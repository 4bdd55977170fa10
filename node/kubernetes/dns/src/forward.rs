//! Forwards queries for other domains to the node's name servers.
//!
//! A forwarded query has an ID and a port of its own, and only a response from the server that was
//! queried, with that ID and exactly the same question, is accepted: a pod that floods this server
//! with responses has to guess all of them. Servers are queried in turn, beginning with the one
//! that responded last, each for at most [`SERVER_ANSWERS_WITHIN`], and all together for no longer
//! than a resolver waits. Without name servers the response is an error at once, so that programs
//! do not hang.
//!
//! The number of outstanding queries, which clients share fairly ([`Shares`]), the time of each, and the cache ([`Cache`], in number and
//! size of responses) are limited. The cache is for many pods that query the same few names, not
//! for saving traffic.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::ranges::ClusterRanges;
use hearth_api::shares::Shares;
use hickory_proto::op::{Edns, Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::{RData, Record, RecordType};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout};

use super::answer::{self, DATAGRAM_BYTES, Reply};

/// Timeout for one name server.
const SERVER_ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// Timeout for all of them: resolvers usually retry after five seconds.
const ALL_ANSWER_WITHIN: Duration = Duration::from_millis(4500);
/// Maximum number of outstanding queries, and of those of one client.
const MAX_OPEN_QUESTIONS: usize = 512;
const MAX_OPEN_QUESTIONS_OF_ONE: usize = 64;
/// Maximum number of cached responses, each of which fits into a datagram.
const MAX_KEPT_ANSWERS: usize = 1024;
/// Maximum time for which a response is cached.
const MAX_KEPT_SECONDS: u32 = 300;
/// Maximum time for which a negative response is cached.
const MAX_NOTHING_KEPT_SECONDS: u32 = 30;
/// How much of `resolv.conf` is read; resolvers use three servers.
const MAX_RESOLV_CONF: u64 = 16 << 10;
const PORT: u16 = 53;

/// Why a query was not answered.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// There are none, neither from DHCP nor in the parameters.
    #[error("the node has no name servers")]
    NoServers,
    /// Newer queries have taken the place of this one.
    #[error(
        "more than {MAX_OPEN_QUESTIONS} outstanding queries, or {MAX_OPEN_QUESTIONS_OF_ONE} of one client"
    )]
    Busy,
    /// None of the servers has responded.
    #[error("no response from any name server in time")]
    Silent,
    /// The query cannot be encoded.
    #[error("cannot encode the query")]
    Encode(#[source] hickory_proto::ProtoError),
    /// An error of the socket or of the random number generator.
    #[error("cannot query {server}")]
    Io {
        /// The name server.
        server: SocketAddr,
        /// The cause.
        source: io::Error,
    },
}

/// Forwards queries and caches the responses.
pub struct Forwarder {
    resolv_conf: PathBuf,
    port: u16,
    ranges: ClusterRanges,
    open: Arc<Shares<IpAddr>>,
    /// Index of the server that responded last, modulo the number of servers.
    preferred: AtomicUsize,
    cache: Mutex<Cache>,
    random: SystemRandom,
}

/// A query to be forwarded; the key of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Asked {
    /// The question, with the letter case that the client has chosen.
    pub query: Query,
    /// Value of the DO flag.
    pub signatures: bool,
    /// Value of the CD flag.
    pub checking_disabled: bool,
}

impl Forwarder {
    /// `resolv_conf` lists the name servers. It is read for each query, because it changes with the
    /// DHCP lease. `ranges` are the addresses of pods and services.
    pub fn new(resolv_conf: PathBuf, ranges: ClusterRanges) -> Self {
        Self::at_port(resolv_conf, PORT, ranges)
    }

    /// The same for name servers at another port.
    pub fn at_port(resolv_conf: PathBuf, port: u16, ranges: ClusterRanges) -> Self {
        Self {
            resolv_conf,
            port,
            ranges,
            open: Shares::new(MAX_OPEN_QUESTIONS, MAX_OPEN_QUESTIONS_OF_ONE),
            preferred: AtomicUsize::new(0),
            cache: Mutex::new(Cache::default()),
            random: SystemRandom::new(),
        }
    }

    /// Returns the response from the cache, or from a name server, for this client.
    pub async fn ask(&self, client: IpAddr, asked: &Asked) -> Result<Reply, ForwardError> {
        if let Some(reply) = self.cache().find(asked, Instant::now()) {
            return Ok(reply);
        }
        let place = self.open.take(client);
        let message = tokio::select! {
            biased;
            () = place.lost() => return Err(ForwardError::Busy),
            message = timeout(ALL_ANSWER_WITHIN, self.ask_in_turn(asked)) => message,
        };
        drop(place);
        let message = message.map_err(|_| ForwardError::Silent)??;
        // Pods may query zones that they control themselves: large responses are not cached.
        let is_small = message
            .to_vec()
            .is_ok_and(|bytes| bytes.len() <= usize::from(DATAGRAM_BYTES));
        let reply = Reply {
            code: message.metadata.response_code,
            authoritative: false,
            answers: message.answers,
            authorities: message.authorities,
        };
        if is_small {
            self.cache().keep(asked, &reply, Instant::now());
        }
        Ok(reply)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask_in_turn(&self, asked: &Asked) -> Result<Message, ForwardError> {
        let servers = self.servers().await;
        if servers.is_empty() {
            return Err(ForwardError::NoServers);
        }
        let first = self.preferred.load(Ordering::Relaxed);
        let mut worst = ForwardError::Silent;
        // Twice: a datagram may be lost.
        for turn in 0..2 * servers.len() {
            let at = first.wrapping_add(turn);
            let server = servers[at % servers.len()];
            match timeout(SERVER_ANSWERS_WITHIN, self.ask_one(server, asked)).await {
                // An error response: another server may have the answer.
                Ok(Ok(message)) if is_failure(&message) && turn + 1 < servers.len() => {}
                Ok(Ok(message)) => {
                    self.preferred.store(at, Ordering::Relaxed);
                    return Ok(message);
                }
                Ok(Err(error)) => worst = error,
                Err(_) => {}
            }
        }
        Err(worst)
    }

    async fn ask_one(&self, server: SocketAddr, asked: &Asked) -> Result<Message, ForwardError> {
        let failed = |source| ForwardError::Io { server, source };
        let mut id = [0; 2];
        let random = self.random.fill(&mut id);
        random.map_err(|_| failed(io::Error::other("cannot generate a random ID")))?;
        let id = u16::from_be_bytes(id);
        let mut message = Message::new(id, hickory_proto::op::MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.metadata.checking_disabled = asked.checking_disabled;
        message.add_query(asked.query.clone());
        let mut edns = Edns::new();
        edns.set_max_payload(DATAGRAM_BYTES);
        edns.set_dnssec_ok(asked.signatures);
        message.set_edns(edns);
        let bytes = message.to_vec().map_err(ForwardError::Encode)?;

        let answered = exchange_datagrams(server, &bytes, id, &asked.query).await;
        let answered = answered.map_err(failed)?;
        if !answered.metadata.truncation {
            return Ok(answered);
        }
        // A truncated response would be used, and cached, as if it were complete.
        let whole = exchange_by_stream(server, &bytes, id, &asked.query).await;
        whole.map_err(failed)
    }

    async fn servers(&self) -> Vec<SocketAddr> {
        let text = match tokio::fs::File::open(&self.resolv_conf).await {
            Ok(file) => {
                let mut text = String::new();
                let read = file.take(MAX_RESOLV_CONF).read_to_string(&mut text).await;
                read.map(|_| text).unwrap_or_default()
            }
            // It does not exist before the network is configured.
            Err(_) => String::new(),
        };
        let servers = name_servers(&text, &self.ranges).into_iter();
        servers.map(|ip| SocketAddr::new(ip, self.port)).collect()
    }
}

fn is_failure(message: &Message) -> bool {
    matches!(
        message.metadata.response_code,
        ResponseCode::ServFail | ResponseCode::Refused | ResponseCode::NotImp
    )
}

/// The name servers in a `resolv.conf`, without this server: it would forward to itself forever.
fn name_servers(text: &str, ranges: &ClusterRanges) -> Vec<IpAddr> {
    let own = |ip: &IpAddr| ranges.has_pod(*ip) || *ip == ranges.dns_service();
    let words = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == "nameserver").then(|| words.next())?
    });
    let addresses = words.filter_map(|word| word.parse().ok());
    addresses.filter(|ip| !own(ip)).take(3).collect()
}

async fn exchange_datagrams(
    server: SocketAddr,
    question: &[u8],
    id: u16,
    query: &Query,
) -> io::Result<Message> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(question).await?;
    let mut buffer = vec![0; 4096];
    // The caller limits the time.
    loop {
        let size = socket.recv(&mut buffer).await?;
        if let Some(message) = answer::response_to(id, query, &buffer[..size]) {
            return Ok(message);
        }
    }
}

async fn exchange_by_stream(
    server: SocketAddr,
    question: &[u8],
    id: u16,
    query: &Query,
) -> io::Result<Message> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(question.len()).map_err(io::Error::other)?;
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend_from_slice(question);
    stream.write_all(&bytes).await?;
    let length = stream.read_u16().await?;
    let mut bytes = vec![0; length.into()];
    stream.read_exact(&mut bytes).await?;
    answer::response_to(id, query, &bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Cached responses.
#[derive(Default)]
struct Cache {
    kept: HashMap<Asked, Kept>,
}

struct Kept {
    reply: Reply,
    since: Instant,
    until: Instant,
}

impl Cache {
    fn find(&mut self, asked: &Asked, now: Instant) -> Option<Reply> {
        let kept = self.kept.get(asked).filter(|kept| now < kept.until)?;
        let age = now.duration_since(kept.since).as_secs();
        let age = u32::try_from(age).unwrap_or(u32::MAX);
        let mut reply = kept.reply.clone();
        let records = reply.answers.iter_mut().chain(&mut reply.authorities);
        for record in records {
            record.ttl = record.ttl.saturating_sub(age);
        }
        // The letter case of the question may differ from that of the cached one.
        Some(reply)
    }

    fn keep(&mut self, asked: &Asked, reply: &Reply, now: Instant) {
        let Some(seconds) = holds_for(reply) else {
            return;
        };
        if self.kept.len() >= MAX_KEPT_ANSWERS {
            self.kept.retain(|_, kept| now < kept.until);
        }
        // Full of entries that are still valid: evict the oldest.
        if self.kept.len() >= MAX_KEPT_ANSWERS {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.since);
            if let Some(oldest) = oldest.map(|(asked, _)| asked.clone()) {
                self.kept.remove(&oldest);
            }
        }
        let kept = Kept {
            reply: reply.clone(),
            since: now,
            until: now + Duration::from_secs(seconds.into()),
        };
        self.kept.insert(asked.clone(), kept);
    }
}

/// Seconds for which a response may be cached; `None` if it must not be.
fn holds_for(reply: &Reply) -> Option<u32> {
    let shortest = |records: &[Record]| records.iter().map(|record| record.ttl).min();
    let seconds = match reply.code {
        ResponseCode::NoError if !reply.answers.is_empty() => {
            shortest(&reply.answers)?.min(MAX_KEPT_SECONDS)
        }
        ResponseCode::NoError | ResponseCode::NXDomain => {
            let of = |record: &Record| match &record.data {
                RData::SOA(soa) if record.record_type() == RecordType::SOA => {
                    Some(soa.minimum.min(record.ttl))
                }
                _ => None,
            };
            let soa = reply.authorities.iter().find_map(of)?;
            soa.min(MAX_NOTHING_KEPT_SECONDS)
        }
        _ => return None,
    };
    (seconds > 0).then_some(seconds)
}

/// Forwards a query of a client, and puts the records `before`, CNAMEs of the zone, before the
/// answers.
pub async fn follow(
    forwarder: &Arc<Forwarder>,
    client: IpAddr,
    asked: &Asked,
    mut before: Vec<Record>,
) -> Result<Reply, ForwardError> {
    let mut reply = forwarder.ask(client, asked).await?;
    before.append(&mut reply.answers);
    reply.answers = before;
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::Name;
    use proptest::prelude::*;

    use super::*;

    fn asked(name: &str) -> Asked {
        Asked {
            query: Query::query(Name::from_ascii(name).unwrap(), RecordType::A),
            signatures: false,
            checking_disabled: false,
        }
    }

    fn reply(ttl: u32) -> Reply {
        let name = Name::from_ascii("a.example.").unwrap();
        let data = RData::A(std::net::Ipv4Addr::new(192, 0, 2, 1).into());
        Reply {
            answers: vec![Record::from_rdata(name, ttl, data)],
            ..Reply::bare(ResponseCode::NoError)
        }
    }

    #[test]
    fn what_is_kept_grows_old() {
        let mut cache = Cache::default();
        let now = Instant::now();
        cache.keep(&asked("a.example."), &reply(60), now);
        let later = now + Duration::from_secs(20);
        let found = cache.find(&asked("A.example."), later).unwrap();
        assert_eq!(found.answers[0].ttl, 40);
        let over = now + Duration::from_secs(60);
        assert!(cache.find(&asked("a.example."), over).is_none());
        // A TTL of years is capped.
        cache.keep(&asked("a.example."), &reply(u32::MAX), now);
        let later = now + Duration::from_secs(u64::from(MAX_KEPT_SECONDS));
        assert!(cache.find(&asked("a.example."), later).is_none());
        // A TTL of 0 is not cached.
        cache.keep(&asked("b.example."), &reply(0), now);
        assert!(cache.find(&asked("b.example."), now).is_none());
    }

    #[test]
    fn failures_are_not_kept() {
        let mut cache = Cache::default();
        let now = Instant::now();
        for code in [ResponseCode::ServFail, ResponseCode::Refused] {
            let failed = Reply { code, ..reply(60) };
            cache.keep(&asked("a.example."), &failed, now);
            assert!(cache.find(&asked("a.example."), now).is_none());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

        #[test]
        fn only_so_much_is_kept(names in prop::collection::vec(0_u32..5000, 0..3000)) {
            let mut cache = Cache::default();
            let now = Instant::now();
            for (turn, name) in names.iter().enumerate() {
                let now = now + Duration::from_millis(turn as u64);
                let asked = asked(&format!("n{name}.example."));
                cache.keep(&asked, &reply(60), now);
                prop_assert!(cache.find(&asked, now).is_some());
                prop_assert!(cache.kept.len() <= MAX_KEPT_ANSWERS);
            }
        }
    }

    #[test]
    fn name_servers_are_those_of_others() {
        let text = "search x\nnameserver 10.0.2.3\n nameserver fd00::1 # x\nnameserver\n\
            nameserver 10.208.3.1\nnameserver 10.224.0.10\nnameserver x\n";
        let servers = name_servers(text, &ClusterRanges::DEFAULT);
        let wanted: [IpAddr; 2] = ["10.0.2.3".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(servers, wanted);
    }
}
