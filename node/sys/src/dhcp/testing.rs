//! A client without a network, on a clock that a test moves: for whatever a server may send.

use tokio::time::Instant;

use super::Lease;
use super::machine::{Action, Machine};
use super::message::Message;
use super::wire::{self, CLIENT_PORT, SERVER_PORT};

/// The Ethernet address of [`OfflineClient`].
pub const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// A client that has a carrier. All its exchanges have the ID 0.
pub struct OfflineClient {
    machine: Machine,
    now: Instant,
    lease: Option<Lease>,
}

impl Default for OfflineClient {
    /// It looks for its first lease.
    fn default() -> Self {
        let now = Instant::now();
        let mut client = Self {
            machine: Machine::new(MAC, Box::new(|| 0)),
            now,
            lease: None,
        };
        let actions = client.machine.carrier(true, now);
        client.perform(actions);
        client
    }
}

impl OfflineClient {
    /// Receives an Ethernet frame.
    pub fn receive(&mut self, frame: &[u8]) {
        if let Ok(reply) = wire::parse(frame) {
            let actions = self.machine.received(&reply, self.now);
            self.perform(actions);
        }
    }

    /// Waits until there is something to do.
    pub fn wait(&mut self) {
        if let Some(deadline) = self.machine.deadline() {
            self.now = self.now.max(deadline);
            let actions = self.machine.timeout(self.now);
            self.perform(actions);
        }
    }

    /// The lease that is configured.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    fn perform(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Configure(lease) => self.lease = Some(lease),
                Action::Unconfigure => self.lease = None,
                Action::Broadcast(_) | Action::Renew { .. } | Action::Refuse { .. } => {}
            }
        }
    }
}

/// The frame with which a server sends this message.
pub fn frame_of(message: &[u8]) -> Vec<u8> {
    let server = ([2, 0, 0, 0, 0, 1], [10, 0, 0, 1].into(), SERVER_PORT);
    wire::frame(server, (MAC, [10, 0, 0, 2].into(), CLIENT_PORT), message)
}

/// A message as a client reads it, encoded again; `None` if it is malformed, or has an option in parts, which no encoder
/// here makes.
pub fn encoded_again(message: &[u8]) -> Option<Vec<u8>> {
    let message = Message::decode(message).ok()?;
    message.is_encodable().then(|| message.encode())
}
