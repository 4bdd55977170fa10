//! The state of each API server, and the order in which servers are tried. Without clock or
//! network.

use std::net::SocketAddr;

use tokio_util::sync::CancellationToken;

/// Number of consecutive failed probes after which the connections to a server are closed. A single
/// one may fail because the machine is busy.
const FAILURES_TO_CUT: u32 = 2;

/// The state of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Nothing,
    Answers,
    /// Number of consecutive failed probes.
    Fails(u32),
}

struct Server {
    address: SocketAddr,
    seen: Seen,
    /// Closes its connections.
    cut: CancellationToken,
}

impl Server {
    fn fails(&self) -> bool {
        matches!(self.seen, Seen::Fails(_))
    }

    fn entry(&self) -> (SocketAddr, CancellationToken) {
        (self.address, self.cut.clone())
    }
}

/// The current servers.
#[derive(Default)]
pub(super) struct Table {
    /// The server on this node is first, if there is one.
    servers: Vec<Server>,
    own_is_first: bool,
    /// Counter for round robin.
    turn: usize,
}

impl Table {
    /// Sets the servers. The state of those that stay is kept; connections to those that are
    /// removed are closed.
    pub(super) fn set(&mut self, own: Option<SocketAddr>, others: &[SocketAddr]) {
        let mut old = std::mem::take(&mut self.servers);
        let mut addresses: Vec<SocketAddr> = own.into_iter().collect();
        for other in others {
            if !addresses.contains(other) {
                addresses.push(*other);
            }
        }
        for address in addresses {
            let known = old.iter().position(|server| server.address == address);
            self.servers.push(match known {
                Some(index) => old.swap_remove(index),
                None => Server {
                    address,
                    seen: Seen::Nothing,
                    cut: CancellationToken::new(),
                },
            });
        }
        self.own_is_first = own.is_some();
        for gone in old {
            gone.cut.cancel();
        }
    }

    /// The addresses of all servers.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.servers.iter().map(|server| server.address).collect()
    }

    /// The number of servers that are ready.
    pub(super) fn answering(&self) -> usize {
        let answers = |server: &&Server| server.seen == Seen::Answers;
        self.servers.iter().filter(answers).count()
    }

    /// The order in which a new connection tries the servers: those that are ready, beginning with
    /// the one on this node; then those whose state is unknown. Each with the token that closes its
    /// connections.
    pub(super) fn order(&mut self) -> Vec<(SocketAddr, CancellationToken)> {
        self.turn = self.turn.wrapping_add(1);
        let own = usize::from(self.own_is_first);
        let (own, others) = self.servers.split_at(own.min(self.servers.len()));
        let (late, early) = others.split_at(self.turn.checked_rem(others.len()).unwrap_or(0));
        let mut order: Vec<&Server> = own.iter().chain(early).chain(late).collect();
        order.retain(|server| !server.fails());
        // The sort is stable: round robin is kept within each group.
        order.sort_by_key(|server| server.seen == Seen::Nothing);
        order.into_iter().map(Server::entry).collect()
    }

    /// The servers whose probes fail; the state may be outdated.
    pub(super) fn last_resort(&self) -> Vec<(SocketAddr, CancellationToken)> {
        let failing = self.servers.iter().filter(|server| server.fails());
        failing.map(Server::entry).collect()
    }

    /// A probe has succeeded. Returns whether the state has changed.
    pub(super) fn answers(&mut self, address: SocketAddr) -> bool {
        let Some(server) = self.find(address) else {
            return false;
        };
        let news = server.seen != Seen::Answers;
        server.seen = Seen::Answers;
        news
    }

    /// A server has not accepted a connection: others are tried before it until a probe succeeds.
    /// No connections are closed, because the machine may only be busy.
    pub(super) fn refuses(&mut self, address: SocketAddr) {
        if let Some(server) = self.find(address)
            && !server.fails()
        {
            server.seen = Seen::Fails(0);
        }
    }

    /// A probe has failed. Returns whether the state has changed. After [`FAILURES_TO_CUT`]
    /// failures the connections are closed, if another server is ready: clients would wait much
    /// longer.
    pub(super) fn fails(&mut self, address: SocketAddr) -> bool {
        let others = self
            .servers
            .iter()
            .any(|server| server.address != address && server.seen == Seen::Answers);
        let Some(server) = self.find(address) else {
            return false;
        };
        let times = match server.seen {
            Seen::Fails(times) => times.saturating_add(1),
            _ => 1,
        };
        let news = times == 1;
        server.seen = Seen::Fails(times);
        if times >= FAILURES_TO_CUT && others {
            server.cut.cancel();
            server.cut = CancellationToken::new();
        }
        news
    }

    fn find(&mut self, address: SocketAddr) -> Option<&mut Server> {
        self.servers
            .iter_mut()
            .find(|server| server.address == address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: u8) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, last], 6443))
    }

    fn last(entries: Vec<(SocketAddr, CancellationToken)>) -> Vec<u8> {
        let last = |(address, _): (SocketAddr, _)| match address.ip() {
            std::net::IpAddr::V4(ip) => ip.octets()[3],
            std::net::IpAddr::V6(_) => 0,
        };
        entries.into_iter().map(last).collect()
    }

    fn order(table: &mut Table) -> Vec<u8> {
        last(table.order())
    }

    fn last_resort(table: &Table) -> Vec<u8> {
        last(table.last_resort())
    }

    #[test]
    fn those_that_answer_come_first_and_take_turns() {
        let mut table = Table::default();
        assert!(order(&mut table).is_empty());
        table.set(None, &[at(1), at(2), at(3)]);
        let first: Vec<_> = (0..6).map(|_| order(&mut table)[0]).collect();
        assert_eq!(first, [3, 1, 2, 3, 1, 2]);
        assert!(table.answers(at(2)));
        assert!(!table.answers(at(2)), "no news");
        assert!(table.answers(at(3)));
        assert!(table.fails(at(1)));
        for _ in 0..6 {
            let order = order(&mut table);
            assert!(order.len() == 2 && !order.contains(&1), "{order:?}");
        }
        assert_eq!(last_resort(&table), [1]);
        table.fails(at(2));
        table.fails(at(3));
        assert!(order(&mut table).is_empty());
        assert_eq!(last_resort(&table), [1, 2, 3]);
        assert_eq!(table.answering(), 0);
    }

    #[test]
    fn the_own_one_is_preferred_while_it_answers() {
        let mut table = Table::default();
        table.set(Some(at(9)), &[at(1), at(9), at(2)]);
        assert_eq!(table.addresses(), [at(9), at(1), at(2)]);
        for last in [1, 2, 9] {
            table.answers(at(last));
        }
        for _ in 0..4 {
            assert_eq!(order(&mut table)[0], 9);
        }
        table.fails(at(9));
        assert!(!order(&mut table).contains(&9));
        table.answers(at(9));
        assert_eq!(order(&mut table)[0], 9);
    }

    #[test]
    fn connections_are_cut_where_they_can_go_elsewhere() {
        let mut table = Table::default();
        table.set(None, &[at(1), at(2)]);
        let cut = |table: &mut Table, address| {
            let all = table.order().into_iter().chain(table.last_resort());
            all.into_iter()
                .find(|(a, _)| *a == address)
                .map(|(_, cut)| cut)
                .unwrap()
        };
        let one = cut(&mut table, at(1));
        for _ in 0..5 {
            table.fails(at(1));
        }
        assert!(!one.is_cancelled(), "no other server is ready");
        table.answers(at(2));
        table.fails(at(1));
        assert!(one.is_cancelled());
        let two = cut(&mut table, at(2));
        table.answers(at(1));
        table.fails(at(2));
        assert!(!two.is_cancelled(), "once is not enough");
        // Refused connections are not enough, either.
        table.answers(at(2));
        for _ in 0..5 {
            table.refuses(at(2));
        }
        assert!(!two.is_cancelled());
        assert_eq!((last_resort(&table), table.answering()), (vec![2], 1));
        table.fails(at(2));
        table.answers(at(2));
        table.fails(at(2));
        assert!(!two.is_cancelled(), "not in a row");
        table.fails(at(2));
        assert!(two.is_cancelled());
        let again = cut(&mut table, at(2));
        assert!(!again.is_cancelled(), "what comes later is not cut");

        // A server that is removed, whatever its state.
        table.set(None, &[at(2)]);
        let one = cut(&mut table, at(2));
        assert!(!one.is_cancelled());
        table.set(None, &[at(3)]);
        assert!(one.is_cancelled());
        assert!(!table.fails(at(2)), "it is forgotten");
    }
}
