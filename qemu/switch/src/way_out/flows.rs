//! A bounded table of flows: how many there may be, for each machine and in total, and which one is idle longest.

use std::collections::HashMap;

use super::Flow;
use crate::learning::Address;

/// How many there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Of one machine.
    pub(crate) machine: usize,
    /// Of all machines.
    pub(crate) total: usize,
}

/// Counts what machines use of something limited.
#[derive(Debug)]
pub(crate) struct Quota {
    limits: Limits,
    used: HashMap<Address, usize>,
    total: usize,
}

impl Quota {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            used: HashMap::new(),
            total: 0,
        }
    }

    fn of(&self, machine: Address) -> usize {
        self.used.get(&machine).copied().unwrap_or_default()
    }

    /// Takes one for a machine; `false` if there is none for it.
    pub(crate) fn take(&mut self, machine: Address) -> bool {
        if self.total >= self.limits.total || self.of(machine) >= self.limits.machine {
            return false;
        }
        self.total += 1;
        *self.used.entry(machine).or_default() += 1;
        true
    }

    /// Returns one that a machine has taken.
    pub(crate) fn release(&mut self, machine: Address) {
        let Some(used) = self.used.get_mut(&machine) else {
            return;
        };
        *used -= 1;
        self.total -= 1;
        if *used == 0 {
            self.used.remove(&machine);
        }
    }

    /// The machine that has to give one up for another: itself at its own limit, otherwise the one that has most.
    fn debtor(&self, machine: Address) -> Address {
        if self.of(machine) >= self.limits.machine {
            return machine;
        }
        let most = self.used.iter().max_by_key(|(_, used)| **used);
        most.map_or(machine, |(debtor, _)| *debtor)
    }
}

/// Flows with their values.
#[derive(Debug)]
pub(crate) struct Flows<V> {
    quota: Quota,
    entries: HashMap<Flow, Entry<V>>,
    /// Counts up at each use.
    time: u64,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    used: u64,
}

impl<V> Flows<V> {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            quota: Quota::new(limits),
            entries: HashMap::new(),
            time: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The value of a flow, which counts as a use of it.
    pub(crate) fn get(&mut self, flow: &Flow) -> Option<&V> {
        let entry = self.entries.get_mut(flow)?;
        self.time += 1;
        entry.used = self.time;
        Some(&entry.value)
    }

    /// Adds a flow that is not in the table.
    ///
    /// # Errors
    /// With the value, if that would be too many.
    pub(crate) fn insert(&mut self, flow: Flow, value: V) -> Result<(), V> {
        debug_assert!(!self.entries.contains_key(&flow), "{flow:?}");
        if !self.quota.take(flow.mac) {
            return Err(value);
        }
        self.time += 1;
        let used = self.time;
        self.entries.insert(flow, Entry { value, used });
        Ok(())
    }

    pub(crate) fn remove(&mut self, flow: &Flow) -> Option<V> {
        let entry = self.entries.remove(flow)?;
        self.quota.release(flow.mac);
        Some(entry.value)
    }

    /// Removes the flow that has to make way for another one of this machine, if there is one.
    pub(crate) fn evict_for(&mut self, machine: Address) -> Option<V> {
        let debtor = self.quota.debtor(machine);
        let of_debtor = self.entries.iter().filter(|(flow, _)| flow.mac == debtor);
        let (&flow, _) = of_debtor.min_by_key(|(_, entry)| entry.used)?;
        self.remove(&flow)
    }

    /// Removes a flow if it has this value.
    pub(crate) fn remove_if(&mut self, flow: &Flow, has: impl FnOnce(&V) -> bool) {
        if self
            .entries
            .get(flow)
            .is_some_and(|entry| has(&entry.value))
        {
            self.remove(flow);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::{Ipv4Addr, SocketAddr};

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::Protocol;
    use super::*;

    const LIMITS: Limits = Limits {
        machine: 4,
        total: 8,
    };

    fn flow(machine: u8, port: u16) -> Flow {
        Flow {
            mac: [2, 0, 0, 0, 0, machine],
            protocol: Protocol::Udp,
            machine: SocketAddr::new(Ipv4Addr::new(10, 98, 0, machine).into(), port),
            remote: SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), 123),
        }
    }

    #[test]
    fn the_one_that_is_idle_longest_makes_way() {
        let mut flows = Flows::new(LIMITS);
        for port in 1..=4 {
            flows.insert(flow(1, port), port).expect("room");
        }
        assert_eq!(flows.insert(flow(1, 5), 5), Err(5));
        flows.get(&flow(1, 1));
        assert_eq!(flows.evict_for(flow(1, 5).mac), Some(2));
        flows.insert(flow(1, 5), 5).expect("room");
        // Another machine is not affected.
        flows.insert(flow(2, 1), 21).expect("room");
        assert_eq!(flows.len(), 5);
    }

    #[test]
    fn a_machine_with_few_flows_does_not_make_way_for_one_with_many() {
        let mut flows = Flows::new(LIMITS);
        flows.insert(flow(3, 1), 31).expect("room");
        for port in 1..=4 {
            flows.insert(flow(1, port), port).expect("room");
        }
        for port in 1..=3 {
            flows.insert(flow(2, port), 20 + port).expect("room");
        }
        assert_eq!(flows.insert(flow(2, 4), 24), Err(24));
        assert_eq!(flows.evict_for(flow(2, 4).mac), Some(1));
        flows.insert(flow(2, 4), 24).expect("room");
        assert_eq!(flows.get(&flow(3, 1)), Some(&31));
    }

    #[test]
    fn an_old_flow_does_not_remove_its_successor() {
        let mut flows = Flows::new(LIMITS);
        flows.insert(flow(1, 1), 7).expect("room");
        flows.remove_if(&flow(1, 1), |value| *value == 6);
        assert_eq!(flows.get(&flow(1, 1)), Some(&7));
        flows.remove_if(&flow(1, 1), |value| *value == 7);
        assert_eq!(flows.len(), 0);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u8, u16),
        Remove(u8, u16),
        Use(u8, u16),
        Evict(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        let (machine, port) = (0..4_u8, 0..8_u16);
        prop_oneof![
            4 => (machine.clone(), port.clone()).prop_map(|(m, p)| Step::Insert(m, p)),
            1 => (machine.clone(), port.clone()).prop_map(|(m, p)| Step::Remove(m, p)),
            1 => (machine.clone(), port).prop_map(|(m, p)| Step::Use(m, p)),
            2 => machine.prop_map(Step::Evict),
        ]
    }

    proptest! {
        /// The limits hold, the counts are right, and after an eviction there is room for whom it was made.
        #[test]
        fn limits_hold(steps in vec(step(), 0..200)) {
            let mut flows = Flows::new(LIMITS);
            let mut model = HashSet::new();
            for step in steps {
                match step {
                    Step::Insert(m, p) if !model.contains(&(m, p)) => {
                        let of_machine = model.iter().filter(|(of, _)| *of == m).count();
                        let fits = model.len() < LIMITS.total && of_machine < LIMITS.machine;
                        prop_assert_eq!(flows.insert(flow(m, p), (m, p)).is_ok(), fits);
                        if fits {
                            model.insert((m, p));
                        }
                    }
                    Step::Insert(..) => {}
                    Step::Remove(m, p) => {
                        let removed = flows.remove(&flow(m, p)).is_some();
                        prop_assert_eq!(removed, model.remove(&(m, p)));
                    }
                    Step::Use(m, p) => {
                        prop_assert_eq!(flows.get(&flow(m, p)).is_some(), model.contains(&(m, p)));
                    }
                    Step::Evict(m) => {
                        let evicted = flows.evict_for(flow(m, 0).mac);
                        prop_assert_eq!(evicted.is_none(), model.is_empty());
                        if let Some(evicted) = evicted {
                            prop_assert!(model.remove(&evicted));
                            prop_assert!(flows.insert(flow(m, 100), (m, 100)).is_ok());
                            flows.remove(&flow(m, 100));
                        }
                    }
                }
                prop_assert_eq!(flows.len(), model.len());
            }
        }
    }
}
