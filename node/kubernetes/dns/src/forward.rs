//! Names of others: asked of the node's own name servers.
//!
//! A question is written anew for them, with an ID and a port of its own, and
//! only an answer from the one that was asked, with that ID and the very same
//! question, counts: a pod that floods this server with answers has to guess
//! all of it. They are asked in turn, the one that answered last first, each
//! for [`SERVER_ANSWERS_WITHIN`], and altogether for not longer than a resolver
//! waits. Without any, the answer is an error at once, so that programs do not
//! hang which ask for names that nobody here can know.
//!
//! Bounded are: the questions that are open at one time, the time of each, and
//! what is kept of the answers ([`Cache`], by count and size), which is for the many pods that ask
//! for the same few names, not for saving traffic.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_api::names::pods;
use hickory_proto::op::{Edns, Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::{RData, Record, RecordType};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::answer::{self, DATAGRAM_BYTES, Reply};
use super::zone;

/// For one answer of one server.
const SERVER_ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// For all of them: resolvers usually ask again after five seconds.
const ALL_ANSWER_WITHIN: Duration = Duration::from_millis(4500);
/// Questions that are open at one time.
const MAX_OPEN_QUESTIONS: usize = 256;
/// Answers that are kept, each of which fits a datagram.
const MAX_KEPT_ANSWERS: usize = 1024;
/// No answer is kept for longer.
const MAX_KEPT_SECONDS: u32 = 300;
/// Nor an answer that there is nothing.
const MAX_NOTHING_KEPT_SECONDS: u32 = 30;
/// Of a list of name servers; resolvers know three.
const MAX_RESOLV_CONF: u64 = 16 << 10;
const PORT: u16 = 53;

/// Why others could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// Neither DHCP nor the parameters have named any.
    #[error("the node has no name servers")]
    NoServers,
    /// As many questions as allowed are open.
    #[error("{MAX_OPEN_QUESTIONS} questions are open")]
    Busy,
    /// None of them has answered.
    #[error("no name server has answered in time")]
    Silent,
    /// The question cannot be sent.
    #[error("write the question")]
    Encode(#[source] hickory_proto::ProtoError),
    /// There is no socket, no randomness, or no server at that address.
    #[error("ask {server}")]
    Io {
        /// Who was asked.
        server: SocketAddr,
        /// The cause.
        source: io::Error,
    },
}

/// Asks others.
pub struct Forwarder {
    resolv_conf: PathBuf,
    port: u16,
    open: Semaphore,
    /// Counts on when a server does not answer.
    preferred: AtomicUsize,
    cache: Mutex<Cache>,
    random: SystemRandom,
}

/// A question as others are asked it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Asked {
    /// With the case of letters that the one who asks has chosen.
    pub query: Query,
    /// Signatures, too.
    pub signatures: bool,
    /// Also what could not be verified.
    pub checking_disabled: bool,
}

impl Forwarder {
    /// `resolv_conf` names the servers; it is read for each question, as it
    /// changes with the lease.
    pub fn new(resolv_conf: PathBuf) -> Self {
        Self::at_port(resolv_conf, PORT)
    }

    /// Servers that serve elsewhere.
    pub fn at_port(resolv_conf: PathBuf, port: u16) -> Self {
        Self {
            resolv_conf,
            port,
            open: Semaphore::new(MAX_OPEN_QUESTIONS),
            preferred: AtomicUsize::new(0),
            cache: Mutex::new(Cache::default()),
            random: SystemRandom::new(),
        }
    }

    /// What others say.
    pub async fn ask(&self, asked: &Asked) -> Result<Reply, ForwardError> {
        if let Some(reply) = self.cache().find(asked, Instant::now()) {
            return Ok(reply);
        }
        let _place = self.open.try_acquire().map_err(|_| ForwardError::Busy)?;
        let message = timeout(ALL_ANSWER_WITHIN, self.ask_in_turn(asked)).await;
        let message = message.map_err(|_| ForwardError::Silent)??;
        // Pods may ask for what they have written themselves.
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
                // It has no answer; another may have.
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
        random.map_err(|_| failed(io::Error::other("no randomness")))?;
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
        // Part of an answer would be taken, and kept, for the whole.
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
            // Before the network is there.
            Err(_) => String::new(),
        };
        let servers = name_servers(&text).into_iter();
        servers.map(|ip| SocketAddr::new(ip, self.port)).collect()
    }
}

fn is_failure(message: &Message) -> bool {
    matches!(
        message.metadata.response_code,
        ResponseCode::ServFail | ResponseCode::Refused | ResponseCode::NotImp
    )
}

/// Those of a `resolv.conf`; never this server itself, which would ask itself
/// for ever.
fn name_servers(text: &str) -> Vec<IpAddr> {
    let own = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => zone::is_pod(*ip) || *ip == pods::DNS_SERVICE,
        IpAddr::V6(_) => false,
    };
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
    // The one who calls limits the time.
    loop {
        let size = socket.recv(&mut buffer).await?;
        match Message::from_vec(&buffer[..size]) {
            Ok(message) if answer::answers(&message, id, query) => return Ok(message),
            // Late, or not from there.
            _ => {}
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
    match Message::from_vec(&bytes) {
        Ok(message) if answer::answers(&message, id, query) => Ok(message),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Answers of others, for as long as they hold.
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
        // The question may be written in other letters.
        Some(reply)
    }

    fn keep(&mut self, asked: &Asked, reply: &Reply, now: Instant) {
        let Some(seconds) = holds_for(reply) else {
            return;
        };
        if self.kept.len() >= MAX_KEPT_ANSWERS {
            self.kept.retain(|_, kept| now < kept.until);
        }
        // Full of what still holds: rather what is asked now than what was.
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

/// Seconds for which it may be kept.
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

/// Follows a name that leads outside.
pub async fn follow(
    forwarder: &Arc<Forwarder>,
    asked: &Asked,
    mut before: Vec<Record>,
) -> Result<Reply, ForwardError> {
    let mut reply = forwarder.ask(asked).await?;
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
        // For years, says somebody.
        cache.keep(&asked("a.example."), &reply(u32::MAX), now);
        let later = now + Duration::from_secs(u64::from(MAX_KEPT_SECONDS));
        assert!(cache.find(&asked("a.example."), later).is_none());
        // Not at all.
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
        let servers = name_servers(text);
        let wanted: [IpAddr; 2] = ["10.0.2.3".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(servers, wanted);
    }
}
