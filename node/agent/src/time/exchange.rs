//! Asking one time server for its time.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use hearth_api::time_server::TimeServer;
use hearth_sys::clock::SystemClock;
use hearth_sys::random;
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout};

use super::agreement::Sample;
use super::packet::{self, Answer, Flaw};

/// How long an answer may take.
const BOUND: Duration = Duration::from_secs(2);
/// The shortest error that is assumed: this node's own time stamps.
const PRECISION: Duration = Duration::from_micros(100);

/// Why a server has not given its time.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExchangeError {
    /// The socket failed; the network may have no route to the server.
    #[error("cannot ask the time server {server}")]
    Socket {
        /// The server.
        server: TimeServer,
        /// The error of the system.
        source: io::Error,
    },
    /// Nothing came in time.
    #[error("the time server {0} does not answer")]
    Silent(TimeServer),
    /// It gave an answer that cannot be used.
    #[error("the time server {server} gives no time")]
    Unusable {
        /// The server.
        server: TimeServer,
        /// What is wrong with the answer.
        #[source]
        flaw: Flaw,
    },
}

impl ExchangeError {
    /// Whether the server asks not to be asked.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Unusable {
                flaw: Flaw::Refused(_),
                ..
            }
        )
    }
}

/// Compares a server's clock with this one. `begin`: no time is before it.
pub(super) async fn ask(
    server: TimeServer,
    clock: &dyn SystemClock,
    begin: SystemTime,
) -> Result<Sample, ExchangeError> {
    let exchange = timeout(BOUND, exchange(server.address(), clock, begin));
    match exchange.await {
        Ok(Ok(Ok(sample))) => Ok(sample),
        Ok(Ok(Err(flaw))) => Err(ExchangeError::Unusable { server, flaw }),
        Ok(Err(source)) => Err(ExchangeError::Socket { server, source }),
        Err(_) => Err(ExchangeError::Silent(server)),
    }
}

async fn exchange(
    server: SocketAddr,
    clock: &dyn SystemClock,
    begin: SystemTime,
) -> io::Result<Result<Sample, Flaw>> {
    // A port of its own for each exchange, so that there is more to guess.
    let any: SocketAddr = match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any).await?;
    // The kernel drops packets of others.
    socket.connect(server).await?;
    let number = random::number();
    let (sent, sent_at) = (clock.now(), Instant::now());
    socket.send(&packet::request(number)).await?;
    let mut buffer = [0; packet::LENGTH];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let round_trip = sent_at.elapsed();
        match packet::parse(&buffer[..length], number, begin) {
            Ok(answer) => return Ok(Ok(compare(server, sent, round_trip, &answer))),
            // Anyone can send these, and the answer may still come.
            Err(flaw @ (Flaw::OtherRequest | Flaw::Short(_) | Flaw::Kind { .. })) => {
                tracing::debug!(%server, %flaw, "ignored a packet of a time server");
            }
            Err(flaw) => return Ok(Err(flaw)),
        }
    }
}

/// The request reached the server after half of the time that both ways took. The round trip is measured by the
/// monotonic clock.
fn compare(server: SocketAddr, sent: SystemTime, round_trip: Duration, answer: &Answer) -> Sample {
    let way = round_trip.saturating_sub(answer.took) / 2;
    Sample {
        from: TimeServer::from(server).to_string(),
        offset: difference(answer.received, sent + way),
        error: way + answer.distance + PRECISION,
    }
}

/// `a` minus `b` in nanoseconds, at most 292 years.
pub(super) fn difference(a: SystemTime, b: SystemTime) -> i64 {
    let nanoseconds = |distance: Duration| i64::try_from(distance.as_nanos()).unwrap_or(i64::MAX);
    match a.duration_since(b) {
        Ok(ahead) => nanoseconds(ahead),
        Err(behind) => -nanoseconds(behind.duration()),
    }
}
