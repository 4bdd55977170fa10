//! Forwards queries for other domains to the node's name servers.
//!
//! Servers are queried in turn, beginning with the one that responded last, each for at most
//! [`SERVER_ANSWERS_WITHIN`], and all together for no longer than a resolver waits. Without name
//! servers the response is an error at once, so that programs do not hang. [`upstream`] decides what
//! to do with each response; here are sockets and time.
//!
//! Equal queries that are outstanding at the same time are joined: the name servers are asked once,
//! for all clients, for as long as one of them waits. So a name that every pod looks up at once costs
//! one query, and nobody can have many guesses at one answer by asking for it many times.
//!
//! The number of outstanding queries is limited, and clients share it fairly ([`Shares`]); so are the
//! time of each, and the cache. A name server that does not accept EDNS is remembered for
//! [`WITHOUT_EDNS_FOR`].

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use hearth_api::ranges::ClusterRanges;
use hearth_api::shares::Shares;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout_at};

use super::cache::Cache;
use super::upstream::{self, Asked, Attempt, Outcome, Search, Step};
use super::wire::{self, Answer, Transport};

/// Timeout for one name server.
const SERVER_ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// Timeout for all of them: resolvers usually retry after five seconds.
const ALL_ANSWER_WITHIN: Duration = Duration::from_millis(4500);
/// Maximum number of outstanding queries, and of those of one client.
const MAX_OPEN_QUESTIONS: usize = 512;
const MAX_OPEN_QUESTIONS_OF_ONE: usize = 64;
/// For how long a name server that has refused EDNS is queried without. It may be replaced by a
/// better one.
const WITHOUT_EDNS_FOR: Duration = Duration::from_secs(600);
/// How many name servers are remembered like that; `resolv.conf` changes with the network only.
const MAX_WITHOUT_EDNS: usize = 16;
/// Name servers that are used, as by resolvers.
const MAX_SERVERS: usize = 3;
/// How much of `resolv.conf` is read.
const MAX_RESOLV_CONF: u64 = 16 << 10;
/// The largest datagram that is read; more than was asked for.
const MAX_DATAGRAM_BYTES: usize = 4096;
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
    /// An error of the socket or of the random number generator.
    #[error("cannot query {server}")]
    Io {
        /// The name server.
        server: SocketAddr,
        /// The cause.
        source: io::Error,
    },
}

/// A response to a forwarded query.
#[derive(Clone, Debug)]
pub struct Forwarded {
    /// As the name server has sent it.
    pub answer: Arc<Answer>,
    /// For how many seconds it was cached.
    pub age: u32,
}

/// A query to the name servers, for all clients that wait for its outcome.
type Exchange = BoxFuture<'static, Result<Arc<Answer>, Arc<ForwardError>>>;

/// Forwards queries and caches the responses.
pub struct Forwarder {
    resolv_conf: PathBuf,
    port: u16,
    ranges: ClusterRanges,
    places: Arc<Shares<IpAddr>>,
    open: Mutex<Open>,
    /// Index of the server that responded last, modulo the number of servers.
    preferred: AtomicUsize,
    without_edns: Mutex<WithoutEdns>,
    cache: Mutex<Cache>,
    random: SystemRandom,
}

/// The queries that name servers were asked and have not answered. An exchange exists as long as a
/// client waits for it, and each client has a place, so there are no more of them than places.
#[derive(Default)]
struct Open {
    last: u64,
    exchanges: HashMap<Asked, (u64, WeakShared<Exchange>)>,
}

/// Removes an exchange from [`Open`] when it has ended, or when nobody waits for it any more.
struct Entry {
    forwarder: Arc<Forwarder>,
    asked: Asked,
    number: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut open = lock(&self.forwarder.open);
        let of = open.exchanges.get(&self.asked);
        // Another one may have begun since.
        if of.is_some_and(|(number, _)| *number == self.number) {
            open.exchanges.remove(&self.asked);
        }
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
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
            places: Shares::new(MAX_OPEN_QUESTIONS, MAX_OPEN_QUESTIONS_OF_ONE),
            open: Mutex::default(),
            preferred: AtomicUsize::new(0),
            without_edns: Mutex::default(),
            cache: Mutex::default(),
            random: SystemRandom::new(),
        }
    }

    /// Returns the response from the cache, or from a name server, for this client.
    pub async fn ask(
        self: &Arc<Self>,
        client: IpAddr,
        asked: &Asked,
    ) -> Result<Forwarded, Arc<ForwardError>> {
        if let Some((answer, age)) = lock(&self.cache).find(asked, Instant::now()) {
            return Ok(Forwarded { answer, age });
        }
        let place = self.places.take(client);
        let answer = tokio::select! {
            biased;
            () = place.lost() => return Err(Arc::new(ForwardError::Busy)),
            answer = self.exchange(asked) => answer?,
        };
        Ok(Forwarded { answer, age: 0 })
    }

    /// The exchange for this query: one that has begun for another client, or a new one.
    fn exchange(self: &Arc<Self>, asked: &Asked) -> Shared<Exchange> {
        let mut open = lock(&self.open);
        let begun = open.exchanges.get(asked);
        if let Some(exchange) = begun.and_then(|(_, exchange)| exchange.upgrade()) {
            return exchange;
        }
        open.last += 1;
        let number = open.last;
        let entry = Entry {
            forwarder: Arc::clone(self),
            asked: asked.clone(),
            number,
        };
        let exchange = async move {
            let (forwarder, asked) = (&entry.forwarder, &entry.asked);
            let answer = Arc::new(forwarder.search(asked).await.map_err(Arc::new)?);
            lock(&forwarder.cache).keep(asked, &answer, Instant::now());
            Ok(answer)
        };
        let exchange = exchange.boxed().shared();
        if let Some(weak) = exchange.downgrade() {
            open.exchanges.insert(asked.clone(), (number, weak));
        }
        exchange
    }

    async fn search(&self, asked: &Asked) -> Result<Answer, ForwardError> {
        let servers = self.servers().await;
        if servers.is_empty() {
            return Err(ForwardError::NoServers);
        }
        let until = Instant::now() + ALL_ANSWER_WITHIN;
        let mut search = Search::new(servers.len(), self.preferred.load(Ordering::Relaxed));
        let mut worst = ForwardError::Silent;
        while let Some(at) = search.server().filter(|_| Instant::now() < until) {
            let until = until.min(Instant::now() + SERVER_ANSWERS_WITHIN);
            let outcome = match self.attempt(servers[at], asked, until).await {
                Ok(outcome) => outcome,
                Err(source) => {
                    let server = servers[at];
                    worst = ForwardError::Io { server, source };
                    Outcome::Silence
                }
            };
            if let Some(answer) = search.ended(outcome) {
                self.preferred.store(at, Ordering::Relaxed);
                return Ok(answer);
            }
        }
        search.best().ok_or(worst)
    }

    /// Queries one server. An error of the socket is returned if there is nothing better.
    async fn attempt(
        &self,
        server: SocketAddr,
        asked: &Asked,
        until: Instant,
    ) -> io::Result<Outcome> {
        let question = wire::question(&asked.query);
        let refuses = lock(&self.without_edns).has(server, Instant::now());
        let mut attempt = Attempt::new(!refuses);
        loop {
            let way = attempt.way();
            let id = self.id()?;
            let edns = way.edns.then_some(asked.signatures);
            let query = wire::query(id, &question, asked.checking_disabled, edns);
            let mut step =
                |bytes: &[u8]| attempt.received(upstream::judge(id, &question, way, bytes));
            let exchange = async {
                match way.by {
                    Transport::Udp => by_datagrams(server, &query, &mut step).await,
                    Transport::Tcp => by_stream(server, &query, &mut step).await,
                }
            };
            let (step, error) = match timeout_at(until, exchange).await {
                Ok(Ok(step)) => (step, None),
                Ok(Err(error)) => (attempt.failed(), Some(error)),
                Err(_) => (attempt.failed(), None),
            };
            let outcome = match step {
                Step::Wait | Step::Again => continue,
                Step::End(outcome) => outcome,
            };
            if attempt.needs_no_edns(&outcome) {
                lock(&self.without_edns).add(server, Instant::now());
            }
            return match (outcome, error) {
                (Outcome::Silence, Some(error)) => Err(error),
                (outcome, _) => Ok(outcome),
            };
        }
    }

    fn id(&self) -> io::Result<u16> {
        let mut id = [0; 2];
        match self.random.fill(&mut id) {
            Ok(()) => Ok(u16::from_be_bytes(id)),
            Err(_) => Err(io::Error::other("cannot generate a random ID")),
        }
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

/// The name servers in a `resolv.conf`, without this server: it would forward to itself forever.
fn name_servers(text: &str, ranges: &ClusterRanges) -> Vec<IpAddr> {
    let own = |ip: &IpAddr| ranges.has_pod(*ip) || *ip == ranges.dns_service();
    let words = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == "nameserver").then(|| words.next())?
    });
    let addresses = words.filter_map(|word| word.parse().ok());
    addresses.filter(|ip| !own(ip)).take(MAX_SERVERS).collect()
}

/// Sends a query, and waits for messages until one of them leads to a next step. The caller limits
/// the time.
async fn by_datagrams(
    server: SocketAddr,
    query: &[u8],
    step: &mut impl FnMut(&[u8]) -> Step,
) -> io::Result<Step> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    loop {
        let size = socket.recv(&mut buffer).await?;
        match step(&buffer[..size]) {
            Step::Wait => {}
            step => return Ok(step),
        }
    }
}

async fn by_stream(
    server: SocketAddr,
    query: &[u8],
    step: &mut impl FnMut(&[u8]) -> Step,
) -> io::Result<Step> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend_from_slice(query);
    stream.write_all(&bytes).await?;
    let length = stream.read_u16().await?;
    let mut bytes = vec![0; length.into()];
    stream.read_exact(&mut bytes).await?;
    Ok(step(&bytes))
}

/// Name servers that do not accept EDNS, and since when that is known.
#[derive(Default)]
struct WithoutEdns(HashMap<SocketAddr, Instant>);

impl WithoutEdns {
    fn has(&self, server: SocketAddr, now: Instant) -> bool {
        let since = self.0.get(&server);
        since.is_some_and(|since| now.duration_since(*since) < WITHOUT_EDNS_FOR)
    }

    fn add(&mut self, server: SocketAddr, now: Instant) {
        self.0
            .retain(|_, since| now.duration_since(*since) < WITHOUT_EDNS_FOR);
        if self.0.len() < MAX_WITHOUT_EDNS {
            self.0.insert(server, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_those_of_others() {
        let text = "search x\nnameserver 10.0.2.3\n nameserver fd00::1 # x\nnameserver\n\
            nameserver 10.208.3.1\nnameserver 10.224.0.10\nnameserver x\n";
        let servers = name_servers(text, &ClusterRanges::DEFAULT);
        let wanted: [IpAddr; 2] = ["10.0.2.3".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(servers, wanted);
    }

    #[test]
    fn a_server_without_edns_is_remembered_for_a_while_and_not_more_of_them_than_a_few() {
        let mut without = WithoutEdns::default();
        let server = |last: u8| SocketAddr::from(([192, 0, 2, last], PORT));
        let now = Instant::now();
        without.add(server(1), now);
        let later = now + WITHOUT_EDNS_FOR;
        assert!(without.has(server(1), later - Duration::from_secs(1)));
        assert!(!without.has(server(1), later) && !without.has(server(2), now));
        for last in 0..=255 {
            without.add(server(last), now);
        }
        assert_eq!(without.0.len(), MAX_WITHOUT_EDNS);
        without.add(server(99), later);
        assert!(without.has(server(99), later));
    }
}
