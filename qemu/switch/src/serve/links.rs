//! The machines' connections: one task for each port, and the way on which connections send to a machine.

use std::io;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{ReadHalf, WriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;

use super::{ACCEPT_AGAIN, Machine, Shared};
use crate::framing::Decoder;
use crate::learning::Address;
use crate::tunnel::Way;

/// Bytes per read.
const CHUNK: usize = 64 << 10;

/// Serves the machines of a port, one at a time.
pub(super) async fn serve_port(
    shared: Rc<Shared>,
    port: usize,
    name: String,
    listener: UnixListener,
) {
    let mut next = None;
    loop {
        let mut stream = match next.take() {
            Some(stream) => stream,
            None => accept(&listener, &name).await,
        };
        shared.fabric.borrow_mut().plug(port, true);
        tracing::info!(port = name, "plugged in");
        tokio::select! {
            end = converse(&shared, port, &mut stream) => match end {
                Ok(()) => tracing::info!(port = name, "unplugged"),
                Err(error) => tracing::warn!(port = name, %error, "unplugged"),
            },
            // A machine that was killed and has already restarted. Its old connection may still exist.
            newer = accept(&listener, &name) => {
                tracing::info!(port = name, "replaced by a new connection");
                next = Some(newer);
            }
        }
        shared.fabric.borrow_mut().plug(port, false);
    }
}

async fn accept(listener: &UnixListener, name: &str) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                // There is no notification of free resources.
                tracing::warn!(port = name, %error, "cannot accept a connection");
                sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn converse(shared: &Shared, port: usize, stream: &mut UnixStream) -> io::Result<()> {
    let (input, output) = stream.split();
    tokio::select! {
        end = listen(shared, port, input) => end,
        end = speak(shared, port, output) => end,
    }
}

async fn listen(shared: &Shared, port: usize, mut input: ReadHalf<'_>) -> io::Result<()> {
    let mut decoder = Decoder::default();
    loop {
        let buffer = decoder.buffer();
        buffer.reserve(CHUNK);
        if input.read_buf(buffer).await? == 0 {
            return Ok(());
        }
        let now = Instant::now();
        let mut fabric = shared.fabric.borrow_mut();
        while let Some(frame) = decoder.next().map_err(io::Error::other)? {
            fabric.take_from_machine(port, frame, now);
        }
    }
}

async fn speak(shared: &Shared, port: usize, mut output: WriteHalf<'_>) -> io::Result<()> {
    let waiting = shared.fabric.borrow().waiting(port);
    loop {
        let taken = shared.fabric.borrow_mut().take(port);
        if taken.is_empty() {
            waiting.notified().await;
        } else {
            output.write_all(&taken).await?;
        }
    }
}

/// The way to a machine.
pub(super) struct WayTo<'a> {
    shared: &'a Shared,
    machine: Machine,
    /// The way is that to the holder of this address, `machine` the first holder. As other hosts do, a connection
    /// follows the address: one that was not accepted yet is by the new holder, and all others are reset by it.
    followed: Option<Ipv4Addr>,
}

impl<'a> WayTo<'a> {
    pub(super) fn new(shared: &'a Shared, machine: Machine) -> Self {
        Self {
            shared,
            machine,
            followed: None,
        }
    }

    pub(super) fn holder_of(shared: &'a Shared, address: Ipv4Addr, machine: Machine) -> Self {
        Self {
            shared,
            machine,
            followed: Some(address),
        }
    }

    fn machine(&self) -> Machine {
        let holder = self
            .followed
            .and_then(|address| self.shared.holder(address));
        holder.unwrap_or(self.machine)
    }
}

impl Way for WayTo<'_> {
    fn to(&self) -> Address {
        self.machine().mac.0
    }

    fn send(&self, frame: &[u8]) {
        let now = Instant::now();
        self.shared
            .fabric
            .borrow_mut()
            .take_from_gateway(frame, now);
    }

    fn has_room(&self) -> bool {
        self.shared.fabric.borrow().has_room(self.machine().port)
    }

    async fn drained(&self) {
        let drained = self.shared.fabric.borrow().drained(self.machine().port);
        // No other task has run between this and the check.
        drained.notified().await;
    }
}
