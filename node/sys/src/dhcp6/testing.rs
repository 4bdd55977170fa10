//! A client without a network, on a clock that a test moves: for whatever a server may send.

use std::net::Ipv6Addr;
use std::time::Duration;

use tokio::time::Instant;

use super::machine::{Action, Lease, Machine};
use super::message::Answer;
use crate::router_advertisements::Offered;

/// The Ethernet address of [`OfflineClient`].
pub const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

/// A client that has a cable.
pub struct OfflineClient {
    machine: Machine,
    now: Instant,
    sent: Vec<Vec<u8>>,
    lease: Option<Lease>,
}

impl OfflineClient {
    /// In a network whose routers say this. Its numbers are the same each time.
    pub fn new(offered: Offered) -> Self {
        let mut number = 0_u64;
        let random = move || {
            number = number.wrapping_add(0x0123_4567_89ab_cdef);
            number
        };
        let (client, association) = super::identifiers(MAC);
        let mut client = Self {
            machine: Machine::new(client, association, Box::new(random)),
            now: Instant::now(),
            sent: Vec::new(),
            lease: None,
        };
        client.offered(offered);
        client
    }

    /// Routers say this from now on.
    pub fn offered(&mut self, offered: Offered) {
        let actions = self.machine.offered(offered, self.now);
        self.perform(actions);
    }

    /// Receives a message. Whether it is one for this client.
    pub fn receive(&mut self, message: &[u8]) -> bool {
        let (client, association) = self.machine.identifiers();
        let Some(answer) = Answer::decode(message, client, association) else {
            return false;
        };
        let actions = self.machine.received(&answer, self.now);
        self.perform(actions);
        true
    }

    /// Waits until there is something to do; returns how long. `None`: there is nothing, for ever.
    pub fn wait(&mut self) -> Option<Duration> {
        let next = self.machine.deadline()?.max(self.now);
        let waited = next - self.now;
        self.now = next;
        let actions = self.machine.timeout(self.now);
        self.perform(actions);
        Some(waited)
    }

    /// Whether there is something left to do.
    pub fn has_deadline(&self) -> bool {
        self.machine.deadline().is_some()
    }

    /// The cable was interrupted.
    pub fn reconnect(&mut self) {
        let actions = self.machine.reconnected(self.now);
        self.perform(actions);
    }

    /// Another machine has the address.
    pub fn claim(&mut self) {
        let actions = self.machine.claimed(self.now);
        self.perform(actions);
    }

    /// All messages that were sent.
    pub fn sent(&self) -> &[Vec<u8>] {
        &self.sent
    }

    /// The lease that is configured.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    fn perform(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send(message) => self.sent.push(message),
                Action::Configure(lease) => self.lease = Some(lease),
                Action::Unconfigure => {
                    assert!(self.lease.take().is_some(), "there was nothing");
                }
            }
        }
    }
}

/// A message of a server to [`OfflineClient`], in the transaction with this identifier.
pub fn message(kind: u8, transaction: [u8; 3], server: u8, options: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind];
    bytes.extend(transaction);
    let (client, _) = super::identifiers(MAC);
    bytes.extend(option(1, &client));
    bytes.extend(option(2, &[server; 4]));
    bytes.extend(options);
    bytes
}

/// An option.
pub fn option(code: u16, content: &[u8]) -> Vec<u8> {
    let length = content.len() as u16;
    [&code.to_be_bytes()[..], &length.to_be_bytes(), content].concat()
}

/// The association of [`OfflineClient`], with T1, T2 and these options.
pub fn association(times: [u32; 2], options: &[u8]) -> Vec<u8> {
    let (_, association) = super::identifiers(MAC);
    let numbers = [association, times[0], times[1]];
    let content: Vec<u8> = numbers.iter().flat_map(|it| it.to_be_bytes()).collect();
    option(3, &[&content, options].concat())
}

/// An address, with its preferred and its valid lifetime in seconds.
pub fn granted(address: Ipv6Addr, lifetimes: [u32; 2]) -> Vec<u8> {
    let mut content = address.octets().to_vec();
    content.extend(lifetimes.iter().flat_map(|it| it.to_be_bytes()));
    option(5, &content)
}
