//! Which machine is behind which port: learned from source addresses.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Addresses expire after this time without a frame, as in other switches.
const AGE: Duration = Duration::from_secs(300);

/// More than any of our networks has; a machine that forges source addresses cannot fill the memory. Frames to
/// addresses that are not in the table go to all ports.
const MOST: usize = 4096;

/// An Ethernet address, as in a frame.
pub(super) type Address = [u8; 6];

/// Bytes of the shortest frame: two addresses and a type.
pub(super) const HEADER: usize = 14;

/// Whether an address is a multicast or broadcast address.
pub(super) fn is_group(address: Address) -> bool {
    address[0] & 1 != 0
}

/// The ports of addresses.
#[derive(Debug)]
pub(super) struct Table<P> {
    seen: HashMap<Address, (P, Instant)>,
}

impl<P> Default for Table<P> {
    fn default() -> Self {
        Self {
            seen: HashMap::new(),
        }
    }
}

impl<P: Copy + PartialEq> Table<P> {
    /// A frame with this source address arrived at this port.
    pub(super) fn learn(&mut self, address: Address, port: P, now: Instant) {
        if is_group(address) {
            return;
        }
        if self.seen.len() >= MOST && !self.seen.contains_key(&address) {
            self.seen.retain(|_, (_, at)| now.duration_since(*at) < AGE);
            if self.seen.len() >= MOST {
                return;
            }
        }
        self.seen.insert(address, (port, now));
    }

    /// The port where this address was last seen.
    pub(super) fn find(&self, address: Address, now: Instant) -> Option<P> {
        let (port, at) = self.seen.get(&address)?;
        (now.duration_since(*at) < AGE).then_some(*port)
    }

    /// Removes all addresses of this port.
    pub(super) fn forget(&mut self, port: P) {
        self.seen.retain(|_, (at, _)| *at != port);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u16) -> Address {
        let [high, low] = number.to_be_bytes();
        [2, 0, 0, 0, high, low]
    }

    #[test]
    fn the_last_place_counts_and_grows_old() {
        let (mut table, start) = (Table::default(), Instant::now());
        assert_eq!(table.find(address(1), start), None);
        table.learn(address(1), 'a', start);
        table.learn(address(2), 'b', start);
        assert_eq!(table.find(address(1), start), Some('a'));
        let later = start + AGE / 2;
        table.learn(address(1), 'b', later);
        assert_eq!(table.find(address(1), start + AGE), Some('b'));
        assert_eq!(table.find(address(2), start + AGE), None);
        assert_eq!(table.find(address(1), later + AGE), None);
        table.learn(address(1), 'b', later);
        table.learn(address(3), 'c', later);
        table.forget('b');
        assert_eq!(table.find(address(1), later), None);
        assert_eq!(table.find(address(3), later), Some('c'));
    }

    #[test]
    fn groups_are_nowhere() {
        let (mut table, now) = (Table::default(), Instant::now());
        table.learn([0xff; 6], 'a', now);
        assert_eq!(table.find([0xff; 6], now), None);
    }

    #[test]
    fn made_up_senders_find_no_place_and_go_with_time() {
        let (mut table, start) = (Table::default(), Instant::now());
        for number in 0..10_000 {
            table.learn(address(number), 'a', start);
        }
        assert_eq!(table.seen.len(), MOST);
        // An address in the table can still move.
        table.learn(address(1), 'b', start);
        assert_eq!(table.find(address(1), start), Some('b'));
        assert_eq!(table.find(address(9_999), start), None);
        table.learn(address(9_999), 'c', start + AGE);
        assert_eq!(table.find(address(9_999), start + AGE), Some('c'));
        assert_eq!(table.seen.len(), 1);
    }
}
