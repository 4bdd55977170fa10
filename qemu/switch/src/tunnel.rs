//! One TCP connection between the host and a machine, in either direction.
//!
//! The host's client connects to this process, which connects, from the gateway, to the machine, and forwards bytes
//! both ways. Or this process has connected to a remote host, and the machine's connection to that host is accepted by a
//! stack here, which has the remote host's address. The state of one end is passed to the other: an end of data is
//! passed on by itself (half close), a reset is a reset, and a slow reader blocks the sender. Both buffers are fixed, so
//! a connection uses at most their size and its inbox's.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use smoltcp::iface::{Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{self, State};
use smoltcp::wire::IpEndpoint;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep, sleep_until};

use super::learning::Address;
use super::wire::{Clock, Inbox, Wire, alone};

/// Size of each direction's buffer, in bytes.
const BUFFER: usize = 128 << 10;

/// Bound for a machine to accept: as long as other systems try.
const CONNECT: Duration = Duration::from_secs(130);

/// Maximum time in which a machine acknowledges nothing that was sent. Machines may be cut off and reconnected; the
/// connection then continues.
const SILENT: Duration = Duration::from_secs(15 * 60);

/// The same, once the host's side has ended: usually its client is gone.
const SILENT_AT_END: Duration = Duration::from_secs(120);

/// Keep-alive interval of an idle connection, so that one whose machine is gone ends eventually.
const PROBE: Duration = Duration::from_secs(30);

/// The same, while the end of the host's direction is not acknowledged. smoltcp does not repeat an end after three
/// duplicate acknowledgements of the data before it, as a retransmission causes them: its timer is off then. A probe is
/// what makes it send the end again.
const PROBE_END: Duration = Duration::from_secs(1);

/// The time after which a machine's connection to another network is ended if it carries nothing: the minimum for
/// address translation (RFC 5382, REQ-5), so that programs can rely on it. Those of the host are not ended.
const IDLE: Duration = Duration::from_secs(2 * 60 * 60 + 4 * 60);

/// The endpoints in the network.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    /// The endpoint on this side: the gateway's, or the remote one that a machine has connected to.
    pub(super) from: SocketAddr,
    /// The machine's endpoint.
    pub(super) to: SocketAddr,
}

/// Which side has asked for the connection.
#[derive(Debug)]
pub(super) enum Opener {
    /// The host's client: the machine is asked to accept it.
    Host,
    /// The machine, by this frame. The host's side is connected.
    Machine(Vec<u8>),
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Both sides had ended.
    Finished,
    /// The machine refused it, reset it, or timed out.
    ByMachine,
    /// The host's side is gone.
    ByHost,
    /// It carried nothing for too long.
    Idle,
}

/// smoltcp does not take these endpoints.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error("connect: {0}")]
    Connect(#[from] tcp::ConnectError),
    #[error("listen: {0}")]
    Listen(#[from] tcp::ListenError),
}

struct Tunnel {
    clock: Clock,
    stack: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    wire: Wire,
    /// The machine has accepted it.
    connected: bool,
    /// The host has ended its direction.
    host_ended: bool,
    /// The machine has ended its direction.
    machine_ended: bool,
    /// The end of the machine's direction was passed to the host.
    told: bool,
    /// The time at which it ends unless it carries something; none if it may be idle.
    idle_end: Option<Instant>,
}

/// The path to the machine.
pub(super) trait Way {
    /// The machine's Ethernet address, now.
    fn to(&self) -> Address;
    /// Sends a frame.
    fn send(&self, frame: &[u8]);
    /// Whether there is space for more frames. Sending without it will soon lose frames.
    fn has_room(&self) -> bool;
    /// Waits for space.
    async fn drained(&self);
}

/// Forwards one connection until it ends.
pub(super) async fn carry(
    mut host: TcpStream,
    opener: Opener,
    ends: Ends,
    clock: Clock,
    inbox: &Inbox,
    way: &impl Way,
) -> End {
    let mut tunnel = match Tunnel::open(opener, ends, Wire::new(way.to()), clock) {
        Ok(tunnel) => tunnel,
        Err(error) => {
            tracing::error!(%error, to = %ends.to, "cannot make a connection");
            reset(&host);
            return End::ByMachine;
        }
    };
    loop {
        inbox.take(&mut tunnel.wire);
        tunnel.wire.full = !way.has_room();
        tunnel.wire.to = way.to();
        let alive = tunnel.step(&mut host).await;
        for frame in tunnel.wire.sent.drain(..) {
            way.send(&frame);
        }
        match alive {
            Ok(None) => {}
            Ok(Some(End::ByMachine)) => {
                reset(&host);
                return End::ByMachine;
            }
            Ok(Some(end)) => return end,
            Err(error) => {
                tracing::debug!(%error, to = %ends.to, "the host's side of a connection failed");
                tunnel.abort(way);
                return End::ByHost;
            }
        }
        if tunnel.idle_end.is_some_and(|end| end <= Instant::now()) {
            tunnel.abort(way);
            reset(&host);
            return End::Idle;
        }
        tunnel.wait(&host, inbox, way).await;
    }
}

/// Sends the host's client a reset instead of an end.
fn reset(host: &TcpStream) {
    if let Err(error) = host.set_zero_linger() {
        tracing::debug!(%error, "cannot reset a connection of the host");
    }
}

impl Tunnel {
    fn open(opener: Opener, ends: Ends, mut wire: Wire, clock: Clock) -> Result<Self, OpenError> {
        let now = clock.at(Instant::now());
        // There is no other host on this device.
        let mut stack = wire.stack(&alone(ends.from.ip()), now);
        let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        // Small writes are sent as they are.
        socket.set_nagle_enabled(false);
        socket.set_keep_alive(Some(PROBE.into()));
        socket.set_timeout(Some(CONNECT.into()));
        let idle_end = match &opener {
            Opener::Host => {
                socket.connect(
                    stack.context(),
                    IpEndpoint::from(ends.to),
                    IpEndpoint::from(ends.from),
                )?;
                None
            }
            Opener::Machine(_) => {
                socket.listen(IpEndpoint::from(ends.from))?;
                Some(Instant::now() + IDLE)
            }
        };
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        let mut tunnel = Self {
            clock,
            stack,
            sockets,
            handle,
            wire,
            connected: false,
            host_ended: false,
            machine_ended: false,
            told: false,
            idle_end,
        };
        if let Opener::Machine(frame) = opener {
            tunnel.wire.received.push_back(frame);
            // From here on it does not listen any more.
            tunnel.poll();
        }
        Ok(tunnel)
    }

    /// Sends the machine a reset.
    fn abort(&mut self, way: &impl Way) {
        self.socket().abort();
        self.wire.full = false;
        self.poll();
        self.wire.sent.drain(..).for_each(|frame| way.send(&frame));
    }

    /// It has carried something.
    fn moved(&mut self) {
        if let Some(end) = &mut self.idle_end {
            *end = Instant::now() + IDLE;
        }
    }

    fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    fn poll(&mut self) {
        let now = self.clock.at(Instant::now());
        self.stack.poll(now, &mut self.wire, &mut self.sockets);
    }

    /// Does everything that can be done now; returns how the connection ended, if it has.
    async fn step(&mut self, host: &mut TcpStream) -> io::Result<Option<End>> {
        // A finished socket is not polled: after some time it would drop what the host has not read yet.
        if !self.is_done() {
            self.poll();
        }
        self.note_state();
        self.give_host(host)?;
        if self.machine_ended && !self.told && !self.socket().can_recv() {
            self.told = true;
            // TCP's own work is done at once.
            host.shutdown().await?;
        }
        self.take_from_host(host)?;
        if !self.is_done() {
            self.poll();
        }
        if !self.is_done() {
            return Ok(None);
        }
        match (self.host_ended && self.machine_ended, self.told) {
            (true, true) => Ok(Some(End::Finished)),
            (true, false) => Ok(None),
            (false, _) => Ok(Some(End::ByMachine)),
        }
    }

    fn is_done(&mut self) -> bool {
        // A socket that has accepted nothing yet listens again after a reset.
        matches!(
            self.socket().state(),
            State::Closed | State::TimeWait | State::Listen
        )
    }

    fn note_state(&mut self) {
        match self.socket().state() {
            State::Established if !self.connected => {
                self.connected = true;
                self.socket().set_timeout(Some(SILENT.into()));
            }
            State::FinWait2 => self.socket().set_keep_alive(Some(PROBE.into())),
            State::CloseWait | State::LastAck | State::Closing | State::TimeWait => {
                self.machine_ended = true;
            }
            _ => {}
        }
    }

    fn give_host(&mut self, host: &TcpStream) -> io::Result<()> {
        while self.socket().can_recv() {
            let written = self.socket().recv(|bytes| match host.try_write(bytes) {
                Ok(written) => (written, Ok(())),
                Err(error) => (0, Err(error)),
            });
            match written {
                Ok(Ok(())) => self.moved(),
                Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock => break,
                Ok(Err(error)) => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }

    fn take_from_host(&mut self, host: &TcpStream) -> io::Result<()> {
        while !self.host_ended && self.socket().can_send() {
            let read = self.socket().send(|room| match host.try_read(room) {
                Ok(read) => (read, Ok(read)),
                Err(error) => (0, Err(error)),
            });
            match read {
                Ok(Ok(0)) => {
                    self.host_ended = true;
                    self.socket().set_timeout(Some(SILENT_AT_END.into()));
                    self.socket().set_keep_alive(Some(PROBE_END.into()));
                    self.socket().close();
                }
                Ok(Ok(_)) => self.moved(),
                Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock => break,
                Ok(Err(error)) => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Waits until there is something to do.
    async fn wait(&mut self, host: &TcpStream, inbox: &Inbox, way: &impl Way) {
        let done = self.is_done();
        let now = self.clock.at(Instant::now());
        let full = self.wire.full;
        // Pending frames cannot be sent.
        let due = match done || full {
            true => None,
            false => self.stack.poll_delay(now, &self.sockets),
        };
        let reads = !self.host_ended && self.socket().can_send();
        let writes = self.socket().can_recv();
        let interest = match (reads, writes) {
            (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
            (true, false) => Some(Interest::READABLE),
            (false, true) => Some(Interest::WRITABLE),
            (false, false) => None,
        };
        let idle_end = self.idle_end;
        tokio::select! {
            () = inbox.arrived.notified() => {}
            () = at(idle_end), if idle_end.is_some() => {}
            // An error shows at the next attempt to read or write.
            _ = host.ready(interest.unwrap_or(Interest::READABLE)), if interest.is_some() => {}
            () = after(due), if due.is_some() => {}
            () = way.drained(), if full && !done => {}
        }
    }
}

async fn at(time: Option<Instant>) {
    if let Some(time) = time {
        sleep_until(time.into()).await;
    }
}

fn after(due: Option<smoltcp::time::Duration>) -> Sleep {
    sleep(due.map_or(Duration::ZERO, Duration::from))
}

#[cfg(test)]
mod tests;
