//! What a consumer keeps of the objects of a kind, within limits.
//!
//! Users decide how many objects there are, and how large they are. What is kept of them is limited
//! for each namespace ([`NAMESPACE_LIMIT`]), so that nobody who may write to one takes the memory of
//! all nodes. There is no limit for all namespaces together: one of them could use it up, and the
//! others would lose their names. Objects of a namespace that is full are ignored, and the log says so;
//! [`Full`] tells the watch to list again later, when there may be room for them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is kept of a namespace, in bytes. Five thousand services, as many as Kubernetes supports in
/// one, need a part of it.
pub const NAMESPACE_LIMIT: usize = 32 << 20;
/// What an object needs besides its name and what is kept of it, in bytes.
const OVERHEAD: usize = 128;

/// Namespace and name of an object.
pub type Key = (String, String);

/// What is kept of an object.
pub trait Kept {
    /// About how many bytes it needs, apart from its key.
    fn bytes(&self) -> usize;
}

/// That it exists.
impl Kept for () {
    fn bytes(&self) -> usize {
        0
    }
}

/// Labels, for example.
impl Kept for BTreeMap<String, String> {
    fn bytes(&self) -> usize {
        self.iter()
            .map(|(key, value)| 64 + key.len() + value.len())
            .sum()
    }
}

impl<T: Kept> Kept for Vec<T> {
    fn bytes(&self) -> usize {
        self.iter().map(Kept::bytes).sum()
    }
}

/// An event of a watch, with what the consumer keeps of objects.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<T> {
    /// All objects that exist; those that are missing have been deleted.
    All(Store<T>),
    /// The object is new or has changed.
    Changed(Key, T),
    /// The object has been deleted, or the consumer does not want it (any more).
    Gone(Key),
}

/// What is kept of objects, by their keys.
#[derive(Clone, Debug)]
pub struct Store<T> {
    objects: BTreeMap<Key, T>,
    /// Bytes by namespace.
    used: HashMap<String, usize>,
    /// Namespaces of which objects are ignored.
    full: BTreeSet<String>,
}

impl<T> Default for Store<T> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            used: HashMap::new(),
            full: BTreeSet::new(),
        }
    }
}

impl<T: PartialEq> PartialEq for Store<T> {
    fn eq(&self, other: &Self) -> bool {
        self.objects == other.objects
    }
}

impl<T: Kept> FromIterator<(Key, T)> for Store<T> {
    fn from_iter<I: IntoIterator<Item = (Key, T)>>(all: I) -> Self {
        let mut store = Self::default();
        for (key, value) in all {
            store.insert(key, value);
        }
        store
    }
}

impl<T> Store<T> {
    /// All objects.
    pub fn objects(&self) -> &BTreeMap<Key, T> {
        &self.objects
    }

    /// The same by value.
    pub fn into_objects(self) -> BTreeMap<Key, T> {
        self.objects
    }

    /// Whether objects have been ignored.
    pub(super) fn is_full(&self) -> bool {
        !self.full.is_empty()
    }
}

impl<T: Kept> Store<T> {
    /// Adds or replaces an object. If its namespace is full, it is ignored, and what was kept of it
    /// is removed.
    pub(super) fn insert(&mut self, key: Key, value: T) {
        self.remove(&key);
        let bytes = need(&key, &value);
        let (namespace, name) = &key;
        let used = self.used.get(namespace).copied().unwrap_or(0);
        if used + bytes > NAMESPACE_LIMIT {
            if self.full.insert(namespace.clone()) {
                tracing::warn!(
                    "the objects of namespace {namespace} are too large for this node: ignoring \
                     {name}, and those that follow"
                );
            }
            return;
        }
        self.used.insert(namespace.clone(), used + bytes);
        self.objects.insert(key, value);
    }

    fn remove(&mut self, key: &Key) -> Option<T> {
        let value = self.objects.remove(key)?;
        let used = self.used.get_mut(&key.0)?;
        *used -= need(key, &value);
        if *used == 0 {
            self.used.remove(&key.0);
        }
        Some(value)
    }
}

fn need((namespace, name): &Key, value: &impl Kept) -> usize {
    OVERHEAD + namespace.len() + name.len() + value.bytes()
}

/// Whether objects have been ignored since the watch has listed them: set by [`Known`], and read by
/// the watch.
#[derive(Clone, Debug, Default)]
pub struct Full(Arc<AtomicBool>);

impl Full {
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was set; it is not afterwards.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// What a watch has returned so far.
#[derive(Debug)]
pub struct Known<T> {
    /// `None` before the first list.
    store: Option<Store<T>>,
    full: Full,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self {
            store: None,
            full: Full::default(),
        }
    }
}

impl<T: Kept + PartialEq> Known<T> {
    /// For the watch whose events it takes.
    pub fn full(&self) -> Full {
        self.full.clone()
    }

    /// All objects; `None` before the first list.
    pub fn all(&self) -> Option<&BTreeMap<Key, T>> {
        self.store.as_ref().map(Store::objects)
    }

    /// Applies an event. Returns whether the content has changed.
    pub fn take(&mut self, event: Event<T>) -> bool {
        let news = match (event, &mut self.store) {
            (Event::All(all), store) => {
                let news = store.as_ref() != Some(&all);
                *store = Some(all);
                news
            }
            // There are no changes before the first list.
            (_, None) => false,
            (Event::Changed(key, value), Some(store)) => {
                let news = store.objects.get(&key) != Some(&value);
                if news {
                    store.insert(key, value);
                }
                news
            }
            (Event::Gone(key), Some(store)) => store.remove(&key).is_some(),
        };
        if self.store.as_ref().is_some_and(Store::is_full) {
            self.full.set();
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A number that needs that many bytes.
    #[derive(Clone, Debug, PartialEq)]
    struct Bytes(usize);

    impl Kept for Bytes {
        fn bytes(&self) -> usize {
            self.0
        }
    }

    fn at(namespace: &str, name: &str) -> Key {
        (namespace.to_owned(), name.to_owned())
    }

    #[test]
    fn a_full_namespace_takes_nothing_of_another() {
        let half = Bytes(NAMESPACE_LIMIT / 2);
        let mut known = Known::default();
        let all = [("a", "1"), ("a", "2"), ("b", "1")];
        let all = all.map(|(namespace, name)| (at(namespace, name), half.clone()));
        assert!(known.take(Event::All(all.into_iter().collect())));
        let kept = [at("a", "1"), at("b", "1")];
        assert!(known.all().unwrap().keys().eq(&kept));
        assert!(known.full().take() && !known.full().take());

        // An object that grows is ignored as well, rather than kept as it was.
        assert!(known.take(Event::Changed(at("a", "1"), Bytes(NAMESPACE_LIMIT))));
        assert!(known.all().unwrap().keys().eq(&kept[1..]));
        // There is room again.
        assert!(known.take(Event::Changed(at("a", "2"), half)));
        assert!(known.take(Event::Gone(at("b", "1"))));
        assert!(known.all().unwrap().keys().eq(&[at("a", "2")]));
    }

    proptest! {
        /// The store has the same content as a plain map that got the same events, and counts what
        /// it has.
        #[test]
        fn what_is_known_is_what_was_told(
            steps in prop::collection::vec((0..3_u8, "[a-c]", 0..3_usize), 0..20),
        ) {
            let mut known = Known::default();
            let mut model = BTreeMap::new();
            known.take(Event::All(Store::default()));
            for (what, name, value) in steps {
                let before = model.clone();
                let (key, value) = (at("n", &name), Bytes(value));
                let event = match what {
                    0 => {
                        model.clear();
                        model.insert(key.clone(), value.clone());
                        Event::All([(key, value)].into_iter().collect())
                    }
                    1 => {
                        model.insert(key.clone(), value.clone());
                        Event::Changed(key, value)
                    }
                    _ => {
                        model.remove(&key);
                        Event::Gone(key)
                    }
                };
                prop_assert_eq!(known.take(event), model != before);
                prop_assert_eq!(known.all(), Some(&model));
                let used: usize = model.iter().map(|(key, value)| need(key, value)).sum();
                let counted = known.store.as_ref().and_then(|store| store.used.get("n")).copied();
                prop_assert_eq!(counted.unwrap_or(0), used);
            }
        }
    }
}
