//! The stored entries, bounded in number and bytes, per name and in total.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use super::stream::Queue;
use super::{Backlog, Entry, Filter, Options};

/// Memory of one entry beside its texts: the structure itself, its slots in the two indices, the
/// headers of its shared strings, and its share of the cost of a name.
const ENTRY_OVERHEAD: usize = size_of::<Entry>() + 128;

impl Entry {
    /// What the entry counts against the limits in bytes. The name counts each time although it is
    /// stored once: an entry may be the only one of its name.
    pub(super) fn weight(&self) -> usize {
        ENTRY_OVERHEAD + self.dn.len() + self.message.len()
    }
}

#[derive(Debug, Default)]
struct Named {
    /// Sequence numbers, ascending.
    entries: VecDeque<u64>,
    bytes: usize,
}

/// All entries in order, an index by name, and the followers.
#[derive(Debug)]
pub(super) struct Journal {
    entries: BTreeMap<u64, Entry>,
    names: HashMap<Arc<str>, Named>,
    bytes: usize,
    next: u64,
    pub(super) followers: Vec<Arc<Queue>>,
    max_entries: usize,
    max_bytes: usize,
    max_entries_per_dn: usize,
    max_bytes_per_dn: usize,
}

impl Journal {
    pub(super) fn new(options: &Options) -> Journal {
        Journal {
            entries: BTreeMap::new(),
            names: HashMap::new(),
            bytes: 0,
            next: 0,
            followers: Vec::new(),
            max_entries: options.max_entries,
            max_bytes: options.max_bytes,
            max_entries_per_dn: options.max_entries_per_dn,
            max_bytes_per_dn: options.max_bytes_per_dn,
        }
    }

    /// Stores an entry, assigns its number, and drops the oldest entries that exceed the limits
    /// (never the new entry itself).
    pub(super) fn append(&mut self, mut entry: Entry) -> Entry {
        // One shared string per name, even if each entry brings its own.
        if let Some((name, _)) = self.names.get_key_value(&entry.dn) {
            entry.dn = name.clone();
        }
        entry.sequence = self.next;
        self.next += 1;
        let named = self.names.entry(entry.dn.clone()).or_default();
        named.entries.push_back(entry.sequence);
        named.bytes += entry.weight();
        self.bytes += entry.weight();
        self.entries.insert(entry.sequence, entry.clone());
        while let Some(oldest) = self.too_many_of(&entry.dn) {
            self.remove(oldest);
        }
        while self.entries.len() > 1
            && (self.entries.len() > self.max_entries || self.bytes > self.max_bytes)
            && let Some((&oldest, _)) = self.entries.first_key_value()
        {
            self.remove(oldest);
        }
        entry
    }

    /// The oldest entry of this name, if the name exceeds its limits.
    fn too_many_of(&self, dn: &str) -> Option<u64> {
        let named = self.names.get(dn)?;
        let count = named.entries.len();
        let over = count > self.max_entries_per_dn || named.bytes > self.max_bytes_per_dn;
        (over && count > 1).then(|| named.entries.front().copied())?
    }

    /// Removes an entry that is the oldest of its name (the oldest of all always is).
    fn remove(&mut self, sequence: u64) {
        let Some(entry) = self.entries.remove(&sequence) else {
            return;
        };
        self.bytes -= entry.weight();
        let Some(named) = self.names.get_mut(&entry.dn) else {
            return;
        };
        named.bytes -= entry.weight();
        debug_assert_eq!(named.entries.front(), Some(&sequence));
        named.entries.pop_front();
        if named.entries.is_empty() {
            self.names.remove(&entry.dn);
        }
    }

    /// The stored entries that pass the filter, oldest first.
    pub(super) fn backlog(&self, filter: &Filter, backlog: Backlog) -> Vec<Entry> {
        let limit = match backlog {
            Backlog::None => return Vec::new(),
            Backlog::Count(count) => count,
            Backlog::All => usize::MAX,
        };
        let mut found: Vec<Entry> = if filter.subtree {
            let newest_first = self.entries.values().rev();
            let matching = newest_first.filter(|entry| filter.matches(entry));
            matching.take(limit).cloned().collect()
        } else {
            let own = self.names.get(filter.dn.as_str());
            let newest_first = own.into_iter().flat_map(|named| named.entries.iter().rev());
            let entries = newest_first.filter_map(|sequence| self.entries.get(sequence));
            let matching = entries.filter(|entry| filter.matches(entry));
            matching.take(limit).cloned().collect()
        };
        found.reverse();
        found
    }

    /// Bytes that count against the limit.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Entries stored under one name.
    #[cfg(test)]
    pub(super) fn count_of(&self, dn: &str) -> usize {
        self.names.get(dn).map_or(0, |named| named.entries.len())
    }
}
