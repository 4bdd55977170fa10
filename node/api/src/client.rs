//! The authenticated client of the curators: one channel over all of them.
//!
//! Every curator serves every call, so a client needs one working connection, and another one soon
//! after that fails. Endpoints are tried one after the other at short intervals, without waiting
//! for the earlier ones to fail: the first that is connected and reports that it is serving is
//! used, so dead addresses cost a moment, not a timeout. [`Endpoints`] determines the order: as
//! given, or this machine's own first and the others shuffled, so that the load is spread.
//!
//! An endpoint that fails is backed off: for a while it is tried after the others. A failure is a
//! broken connection, and also a curator that answers `Unavailable` over a working connection
//! because it has lost contact with the others, such as one that is partitioned off with a
//! minority. From then on new calls go to another endpoint if possible. The same check happens
//! periodically without any failure, so that curators that join or return get their share of the
//! load, and a node returns to its own curator. Calls that are running on a connection that new
//! calls no longer use continue there, and the connection is closed after the last of them.
//!
//! A connection ends when a certificate on it expires, the client's or the server's. Well before
//! that, new calls go to a new connection, to the same endpoint or another, and
//! [`Curators::renewals`] tells those who have a stream that it is time to open another.
//!
//! The TLS configuration states which servers a client accepts: usually any node of its cluster. A
//! client that knows which nodes run a curator restricts its endpoints to those with
//! [`Endpoints::only`]; no other node is sent a request, even if it is a member of the cluster,
//! because it could return false data.
//!
//! HTTP/2 keep-alive runs on every connection all the time, so that a peer that disappears without
//! closing the connection is noticed within fifteen seconds. Calls are not retried here: only the
//! caller knows which calls may be repeated.

mod channel;
mod endpoint;
mod line;
mod list;
mod retry;

use std::convert::Infallible;
use std::future::Future;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use std::{fmt, io};

use rustls::ClientConfig;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Status;

pub use channel::Channel;
pub use endpoint::{Endpoint, EndpointError};
pub use line::connect_plain;
pub use list::Endpoints;
pub use retry::retry_unavailable;

use crate::certificates::CertificateError;
use crate::tls::{self, Clock, OwnCertificate};
use line::Line;
pub(crate) use line::connect_one;
use list::List;

/// The next endpoint is tried after this time if the earlier ones have not answered.
const ATTEMPT_STAGGER: Duration = Duration::from_millis(250);
/// A call that has a connection waits at most this long for a better one.
const REPLACE_WITHIN: Duration = Duration::from_secs(1);
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// A connection that could not be replaced is tried again after this time.
const RENEW_AGAIN: Duration = Duration::from_secs(5);

/// Why an endpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// The TCP connection failed.
    #[error("cannot connect")]
    Tcp(#[source] io::Error),
    /// The TLS handshake failed.
    #[error("TLS handshake failed")]
    Tls(#[source] io::Error),
    /// The server is not one that the client accepts.
    #[error("server certificate rejected")]
    Certificate(#[source] CertificateError),
    /// The HTTP/2 handshake failed.
    #[error("HTTP/2 handshake failed")]
    Http2(#[source] tonic::transport::Error),
    /// The server closed the connection before it answered the health check.
    #[error("connection closed by the server")]
    Ended(#[source] Box<Status>),
    /// The curator has lost contact with the others, or is shutting down.
    #[error("curator is not serving")]
    NotServing,
    /// The endpoint was removed from the list while the connection was being made.
    #[error("endpoint no longer in use")]
    Unlisted,
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Slow(Duration),
}

/// No endpoint can be used.
#[derive(Debug)]
pub struct ConnectError {
    /// The failed endpoints with their errors, in the order of failure.
    pub attempts: Vec<(Endpoint, AttemptError)>,
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.attempts.is_empty() {
            return f.write_str("no curator is known");
        }
        let attempts = self.attempts.iter();
        let attempts = attempts.map(|(at, error)| format!("{at}: {}", crate::chain(error)));
        // Who shows every new reason shows the same one once, whichever endpoint was asked first.
        let mut attempts: Vec<String> = attempts.collect();
        attempts.sort_unstable();
        write!(f, "cannot reach any curator ({})", attempts.join("; "))
    }
}

impl std::error::Error for ConnectError {}

impl From<ConnectError> for Status {
    fn from(error: ConnectError) -> Self {
        let mut status = Self::unavailable(error.to_string());
        status.set_source(Arc::new(error));
        status
    }
}

/// Timeouts and intervals of a client.
#[derive(Clone, Debug)]
pub struct Options {
    /// For one endpoint: TCP, TLS, HTTP/2 and the health check.
    pub connect_timeout: Duration,
    /// Until the answer to a call begins, connecting included. For a unary call that is the whole
    /// answer; streams are not limited.
    pub call_timeout: Duration,
    /// Interval of HTTP/2 keep-alive pings on a silent connection. The peer has half of this to
    /// answer.
    pub keep_alive: Duration,
    /// New calls look for a better connection once the current one is about this old.
    pub rebalance: Duration,
    /// The clock by which certificates expire.
    pub clock: Clock,
    /// The certificates that are presented, if they may be replaced while the client lives: a connection
    /// is replaced before the one with which it began expires.
    pub presents: Option<Arc<OwnCertificate>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(10),
            keep_alive: KEEP_ALIVE,
            rebalance: Duration::from_secs(300),
            clock: tls::wall_clock(),
            presents: None,
        }
    }
}

/// A client of all known curators. Cheap to clone; the clones share the connections and the list.
#[derive(Clone)]
pub struct Curators {
    shared: Arc<Shared>,
}

impl Curators {
    /// Connects at the first call. The TLS configuration determines which servers are accepted and
    /// which identity is presented.
    pub fn new(endpoints: impl Into<Endpoints>, tls: Arc<ClientConfig>, options: Options) -> Self {
        let mut list = List::default();
        list.set(endpoints.into());
        let shared = Arc::new(Shared {
            tls,
            options,
            state: Mutex::new(State {
                list,
                current: None,
                look_again: Instant::now(),
                lines: Vec::new(),
            }),
            connecting: tokio::sync::Mutex::new(()),
            renewals: watch::Sender::new(0),
            changed: Notify::new(),
        });
        Self { shared }
    }

    /// A channel for the generated clients.
    pub fn channel(&self) -> Channel {
        Channel(Arc::clone(&self.shared))
    }

    /// Replaces the endpoints. Connections to endpoints that are no longer listed are closed, with
    /// the calls that are running on them; new calls connect to another. If other endpoints are
    /// preferred now, new calls go there.
    pub fn set_endpoints(&self, endpoints: impl Into<Endpoints>) {
        let endpoints = endpoints.into();
        let mut state = self.shared.state();
        if *state.list.endpoints() == endpoints {
            return;
        }
        state.list.set(endpoints);
        state.look_again = Instant::now();
        let State { list, lines, .. } = &mut *state;
        for line in lines.iter().filter_map(Weak::upgrade) {
            if !list.wants(&line.endpoint, line.server.as_ref()) {
                line.cut();
            }
        }
        let current = state.current.take();
        state.current =
            current.filter(|line| state.list.wants(&line.endpoint, line.server.as_ref()));
    }

    /// The current endpoints.
    pub fn endpoints(&self) -> Endpoints {
        self.shared.state().list.endpoints().clone()
    }

    /// Reports that the endpoint of new calls accepts calls and does not answer them. It is backed
    /// off like one that has failed.
    pub fn mark_suspect(&self) {
        let mut state = self.shared.state();
        if let Some(line) = state.current() {
            state.list.failed(&line.endpoint, Instant::now());
        }
    }

    /// Makes new calls use a new connection if the current one began without a valid certificate, which
    /// has been replaced since.
    pub fn present_renewed(&self) {
        let current = self.shared.state().current();
        if let Some(line) = current.filter(|line| line.began_expired) {
            line.set_renew_at(Instant::now());
            self.shared.changed.notify_one();
        }
    }

    /// Changes whenever a connection has been replaced because a certificate on it will expire. It
    /// carries the calls that are running until then. Calls replace connections; where there may be
    /// none, [`Self::keep_renewed`] has to run.
    pub fn renewals(&self) -> watch::Receiver<u64> {
        self.shared.renewals.subscribe()
    }

    /// Replaces connections in time, also while no call is made.
    pub async fn keep_renewed(&self) -> Infallible {
        loop {
            let renew_at = self.shared.state().current().map(|line| line.renew_at());
            let due = async {
                match renew_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.shared.changed.notified() => {}
                // What becomes of it shows in the next round, at the latest after `RENEW_AGAIN`.
                () = due => drop(self.shared.line().await),
            }
        }
    }

    /// The endpoint that new calls use, if known.
    pub fn current(&self) -> Option<Endpoint> {
        let state = self.shared.state();
        let current = state.current.as_ref();
        current.map(|line| line.endpoint.clone())
    }
}

struct Shared {
    tls: Arc<ClientConfig>,
    options: Options,
    state: Mutex<State>,
    /// Held by the call that is connecting; the others wait for its result.
    connecting: tokio::sync::Mutex<()>,
    /// How many connections have been replaced because a certificate will expire.
    renewals: watch::Sender<u64>,
    /// There is another connection for new calls, or it is to be replaced.
    changed: Notify,
}

struct State {
    list: List,
    /// The connection for new calls.
    current: Option<Arc<Line>>,
    /// When new calls look for a better connection.
    look_again: Instant,
    /// All open connections.
    lines: Vec<Weak<Line>>,
}

impl State {
    fn current(&mut self) -> Option<Arc<Line>> {
        self.current.take_if(|line| line.is_closed());
        self.current.clone()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection for a call.
    async fn line(&self) -> Result<Arc<Line>, ConnectError> {
        let current = self.state().current();
        if let Some(line) = current {
            return Ok(self.better(&line).await.unwrap_or(line));
        }
        let _one = self.connecting.lock().await;
        let (current, order) = {
            let mut state = self.state();
            (state.current(), state.list.order(Instant::now()))
        };
        match current {
            // Another call has connected in the meantime.
            Some(line) => Ok(line),
            None => self.connect(order, true).await,
        }
    }

    /// A better connection than this one, if it is time to look for one. Only one call looks; the
    /// others keep using the current connection meanwhile.
    async fn better(&self, line: &Line) -> Option<Arc<Line>> {
        let now = Instant::now();
        let is_old = line.renew_at() <= now;
        let (stands_back, better) = {
            let state = self.state();
            let stands_back = state.list.stands_back(&line.endpoint, now);
            if !stands_back && !is_old && now < state.look_again {
                return None;
            }
            // A new connection is better than an old one, also to the same endpoint.
            let better = match is_old {
                true => state.list.order(now),
                false => state.list.better_than(&line.endpoint, now),
            };
            (stands_back, better)
        };
        let _one = self.connecting.try_lock().ok()?;
        if is_old {
            line.set_renew_at(now + RENEW_AGAIN);
        }
        // Set in any case, even if nothing comes of it because the call is cancelled.
        self.state().look_again = now + self.until_next_look();
        if better.is_empty() {
            return None;
        }
        // Little is lost if the current endpoint does not work; but it may work again, and this
        // call must have the time to try it.
        let bound = match stands_back {
            true => self
                .options
                .connect_timeout
                .min(self.options.call_timeout / 3),
            false => REPLACE_WITHIN,
        };
        let connect = self.connect(better.clone(), false);
        match tokio::time::timeout(bound, connect).await {
            Ok(connected) => {
                let connected = connected.ok()?;
                if is_old {
                    self.renewals.send_modify(|count| *count += 1);
                }
                Some(connected)
            }
            // The next attempt is `RENEW_AGAIN` later, so further calls do not wait either.
            Err(_) if is_old => None,
            Err(_) => {
                // Further calls must not wait for these endpoints as well.
                let mut state = self.state();
                for endpoint in better {
                    state.list.failed(&endpoint, Instant::now());
                }
                None
            }
        }
    }

    /// Between half of the interval and one and a half of it, so that clients that started together
    /// do not stay in step.
    fn until_next_look(&self) -> Duration {
        let factor = 500 + below_a_thousand();
        self.options.rebalance * factor / 1000
    }

    /// Connects to the first of these endpoints that is serving; if `any` is set and none is
    /// serving, to one that is at least reachable and can say why it is not serving.
    async fn connect(
        &self,
        endpoints: Vec<Endpoint>,
        any: bool,
    ) -> Result<Arc<Line>, ConnectError> {
        let mut waiting = endpoints.into_iter();
        let mut running = JoinSet::new();
        let mut attempts = Vec::new();
        let mut poor = None;
        loop {
            match waiting.next() {
                Some(endpoint) => {
                    let tls = Arc::clone(&self.tls);
                    let options = self.options.clone();
                    let servers = self.state().list.servers();
                    running.spawn(async move {
                        let line = Line::open(endpoint.clone(), &servers, tls, &options).await;
                        (endpoint, line)
                    });
                }
                None if running.is_empty() => break,
                None => {}
            }
            // A failed attempt starts the next one at once.
            let more = waiting.len() > 0;
            let finished = tokio::select! {
                finished = running.join_next() => finished,
                () = tokio::time::sleep(ATTEMPT_STAGGER), if more => None,
            };
            let (endpoint, error) = match finished {
                Some(Ok((_, Ok(line)))) if line.serves => match self.adopt(line) {
                    Ok(line) => return Ok(line),
                    Err(endpoint) => (endpoint, AttemptError::Unlisted),
                },
                Some(Ok((endpoint, Ok(line)))) => {
                    poor.get_or_insert(line);
                    (endpoint, AttemptError::NotServing)
                }
                Some(Ok((endpoint, Err(error)))) => (endpoint, error),
                // Only a panic ends an attempt without a result, and it would have to be one in
                // rustls. The other attempts may still succeed.
                Some(Err(error)) => {
                    tracing::error!(%error, "connection attempt panicked");
                    continue;
                }
                None => continue,
            };
            self.state().list.failed(&endpoint, Instant::now());
            attempts.push((endpoint, error));
        }
        match poor.filter(|_| any).map(|line| self.adopt(line)) {
            Some(Ok(line)) => Ok(line),
            _ => Err(ConnectError { attempts }),
        }
    }

    /// Makes this the connection for new calls, if its endpoint is still wanted.
    fn adopt(&self, line: Line) -> Result<Arc<Line>, Endpoint> {
        let mut state = self.state();
        if !state.list.wants(&line.endpoint, line.server.as_ref()) {
            return Err(line.endpoint);
        }
        let line = Arc::new(line);
        state.lines.retain(|line| line.strong_count() > 0);
        state.lines.push(Arc::downgrade(&line));
        state.current = Some(Arc::clone(&line));
        state.look_again = Instant::now() + self.until_next_look();
        self.changed.notify_one();
        Ok(line)
    }

    /// A call on this connection was answered.
    fn works(&self, line: &Line) {
        self.state().list.works(&line.endpoint);
    }

    /// The server of this connection is not serving.
    fn failed(&self, line: &Line) {
        self.state().list.failed(&line.endpoint, Instant::now());
    }

    /// This connection cannot be used, whatever the state of its socket.
    fn broken(&self, line: &Arc<Line>) {
        let mut state = self.state();
        state.list.failed(&line.endpoint, Instant::now());
        state.current.take_if(|current| Arc::ptr_eq(current, line));
    }
}

/// A random number, by which clients that began together come apart.
fn below_a_thousand() -> u32 {
    let random = RandomState::new().hash_one(0_u8) % 1000;
    u32::try_from(random).unwrap_or_default()
}

/// Limits the duration of a whole call: `DeadlineExceeded` if it takes longer.
pub async fn within<T>(
    bound: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let answered = tokio::time::timeout(bound, call).await;
    answered.unwrap_or_else(|_| Err(no_answer(bound)))
}

fn no_answer(bound: Duration) -> Status {
    Status::deadline_exceeded(format!("no answer within {bound:?}"))
}

#[cfg(test)]
mod tests;
