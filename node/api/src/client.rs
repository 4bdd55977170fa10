//! The authenticated client of the curators: one channel over all of them.
//!
//! Every curator serves every call, so a client needs one connection that
//! works, and another one soon when it does not. Endpoints are tried one after
//! the other, a little apart, without waiting for the ones before: the first
//! that is connected and says that it serves is used, and dead addresses cost a
//! moment, not a time-out. In which order, [`Endpoints`] says: as given, or
//! this machine's own first and the others shuffled, so that the load spreads.
//!
//! An endpoint that does not work stands back behind the others for a while.
//! What does not work is a connection that fails, and also a curator that
//! answers `Unavailable`, though its connection is fine: it has lost touch with
//! the others, as one does that is cut off with a minority of them. From then on
//! new calls go elsewhere if they can. The same happens after some time without
//! any failure, so that curators that come (back) get their share, and a node
//! returns to its own. What runs on a connection that new calls no longer take
//! goes on there, and the connection ends with the last of it.
//!
//! Whom a client wants to meet is in its TLS configuration: mostly any node of
//! its cluster. Where it knows by name who runs a curator, [`Endpoints::only`]
//! says so, and no other node is asked anything, though it be one of the
//! cluster: it could show whatever it liked.
//!
//! Keep-alive runs on every connection all the time, so that a peer that
//! vanished without a word is noticed within fifteen seconds. Calls are not
//! repeated here: only the caller knows which may be.

mod channel;
mod endpoint;
mod line;
mod list;

use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustls::ClientConfig;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Status;

pub use channel::Channel;
pub use endpoint::{Endpoint, EndpointError};
pub use list::Endpoints;

use crate::certificates::CertificateError;
use crate::tls::{self, Clock};
use line::Line;
pub(crate) use line::connect_one;
use list::List;

/// The next endpoint is tried after this, if the ones before have not
/// answered.
const ATTEMPT_STAGGER: Duration = Duration::from_millis(250);
/// A call that has a connection waits at most so long for a better one.
const REPLACE_WITHIN: Duration = Duration::from_secs(1);
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// One endpoint does not work.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// No TCP connection.
    #[error("no connection")]
    Tcp(#[source] io::Error),
    /// A connection, and no TLS on it.
    #[error("no TLS session")]
    Tls(#[source] io::Error),
    /// A server that is not the one we want.
    #[error("the server's certificate is refused")]
    Certificate(#[source] CertificateError),
    /// TLS, and no HTTP/2 on it.
    #[error("no HTTP/2 session")]
    Http2(#[source] tonic::transport::Error),
    /// A server that hangs up before it has said how it is.
    #[error("the connection was ended")]
    Ended(#[source] Box<Status>),
    /// A curator that has lost touch with the others, or is about to end.
    #[error("it does not serve at the moment")]
    NotServing,
    /// While it was connected to, it was taken off the list.
    #[error("no longer wanted")]
    Unlisted,
    /// Nothing in time.
    #[error("no answer within {0:?}")]
    Slow(Duration),
}

/// No endpoint works.
#[derive(Debug)]
pub struct ConnectError {
    /// Which failed, and how, in the order in which they did.
    pub attempts: Vec<(Endpoint, AttemptError)>,
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.attempts.is_empty() {
            return f.write_str("no curator is known");
        }
        f.write_str("no curator can be reached (")?;
        for (index, (endpoint, error)) in self.attempts.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{endpoint}: {}", crate::chain(error))?;
        }
        f.write_str(")")
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

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// For one endpoint: TCP, TLS, HTTP/2 and the question how it is.
    pub connect_timeout: Duration,
    /// Until the answer to a call begins, connecting included. For a unary
    /// call that is the whole answer; streams go on as long as they like.
    pub call_timeout: Duration,
    /// How often a silent peer is asked whether it is still there. It has half
    /// of that to answer.
    pub keep_alive: Duration,
    /// New calls look for a better connection once theirs is about that old.
    pub rebalance: Duration,
    /// By which the server's certificate expires.
    pub clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(10),
            keep_alive: KEEP_ALIVE,
            rebalance: Duration::from_secs(300),
            clock: tls::wall_clock(),
        }
    }
}

/// All known curators. Cheap to clone; the clones share the connections and
/// the list.
#[derive(Clone)]
pub struct Curators {
    shared: Arc<Shared>,
}

impl Curators {
    /// Connects when it is first used. Whom it trusts and who it is follows
    /// from the TLS configuration.
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
        });
        Self { shared }
    }

    /// For the generated clients.
    pub fn channel(&self) -> Channel {
        Channel(Arc::clone(&self.shared))
    }

    /// From now on these. Connections to one that is no longer among them end,
    /// with what runs on them; calls connect to another. If others are
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

    /// Those that there are now.
    pub fn endpoints(&self) -> Endpoints {
        self.shared.state().list.endpoints().clone()
    }

    /// Whoever calls has waited for long enough: where new calls go now, calls
    /// are taken and not answered. It stands back like one that has failed.
    pub fn doubt(&self) {
        let mut state = self.shared.state();
        if let Some(line) = state.current() {
            state.list.failed(&line.endpoint, Instant::now());
        }
    }

    /// Where new calls go, as far as known.
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
    /// Held by the call that connects; it does so for all.
    connecting: tokio::sync::Mutex<()>,
}

struct State {
    list: List,
    /// For new calls.
    current: Option<Arc<Line>>,
    /// When new calls look for something better.
    look_again: Instant,
    /// All that still stand.
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
            // Somebody has connected while this waited.
            Some(line) => Ok(line),
            None => self.connect(order, true).await,
        }
    }

    /// A connection that is better than this one, if it is time for one. It is
    /// one call that looks for it; the others meanwhile go by what there is.
    async fn better(&self, line: &Line) -> Option<Arc<Line>> {
        let now = Instant::now();
        let (stands_back, better) = {
            let state = self.state();
            let stands_back = state.list.stands_back(&line.endpoint, now);
            if !stands_back && now < state.look_again {
                return None;
            }
            (stands_back, state.list.better_than(&line.endpoint, now))
        };
        let _one = self.connecting.try_lock().ok()?;
        // Whatever comes of it, or does not because the call is given up.
        self.state().look_again = now + self.until_next_look();
        if better.is_empty() {
            return None;
        }
        // There is little to lose if what there is does not work; but it may
        // work again, and this call is to have the time to find that out.
        let bound = match stands_back {
            true => self
                .options
                .connect_timeout
                .min(self.options.call_timeout / 3),
            false => REPLACE_WITHIN,
        };
        let connect = self.connect(better.clone(), false);
        match tokio::time::timeout(bound, connect).await {
            Ok(connected) => connected.ok(),
            Err(_) => {
                // Not every call is to wait for them.
                let mut state = self.state();
                for endpoint in better {
                    state.list.failed(&endpoint, Instant::now());
                }
                None
            }
        }
    }

    /// Half of the time to one and a half, so that clients that began together
    /// do not go on together.
    fn until_next_look(&self) -> Duration {
        let random = RandomState::new().hash_one(0_u8) % 1000;
        let factor = 500 + u32::try_from(random).unwrap_or_default();
        self.options.rebalance * factor / 1000
    }

    /// The first of these that serves; or, if any will do, one that is at least
    /// there to say why it does not.
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
            // One that fails makes way for the next at once.
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
                // Only a panic ends an attempt without a result, and rustls
                // would have to have one. The others may still succeed.
                Some(Err(error)) => {
                    tracing::error!(%error, "a connection attempt broke down");
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

    /// From now on calls go by this one, if its endpoint is still wanted.
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
        Ok(line)
    }

    /// A call by this connection was answered.
    fn works(&self, line: &Line) {
        self.state().list.works(&line.endpoint);
    }

    /// The server of this connection does not serve.
    fn failed(&self, line: &Line) {
        self.state().list.failed(&line.endpoint, Instant::now());
    }

    /// This connection is of no use, whatever its socket is.
    fn broken(&self, line: &Arc<Line>) {
        let mut state = self.state();
        state.list.failed(&line.endpoint, Instant::now());
        state.current.take_if(|current| Arc::ptr_eq(current, line));
    }
}

/// Bounds a whole call: `DeadlineExceeded` when it takes longer.
pub async fn within<T>(
    bound: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    tokio::time::timeout(bound, call).await.unwrap_or_else(|_| {
        Err(Status::deadline_exceeded(format!(
            "no answer within {bound:?}"
        )))
    })
}

#[cfg(test)]
mod tests;
