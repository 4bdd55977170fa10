//! Places of which each node has a few, and of which the newest are kept.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_api::identity::NodeId;
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// The places of all nodes.
pub(super) struct NodeSlots {
    what: &'static str,
    most: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    last: u64,
    /// The places of each node that has any, the oldest first.
    nodes: HashMap<NodeId, VecDeque<(u64, CancellationToken)>>,
}

/// A place. Free again when dropped.
pub struct Slot {
    slots: Arc<NodeSlots>,
    node: NodeId,
    number: u64,
    replaced: CancellationToken,
}

impl NodeSlots {
    pub(super) fn new(what: &'static str, most: usize) -> Arc<Self> {
        Arc::new(Self {
            what,
            most,
            taken: Mutex::default(),
        })
    }

    /// Takes a place. If the node has taken all of its own, its oldest one ends.
    pub(super) fn open(self: &Arc<Self>, node: NodeId) -> Slot {
        let replaced = CancellationToken::new();
        let mut taken = self.lock();
        taken.last += 1;
        let number = taken.last;
        let places = taken.nodes.entry(node).or_default();
        if places.len() >= self.most
            && let Some((_, oldest)) = places.pop_front()
        {
            oldest.cancel();
        }
        places.push_back((number, replaced.clone()));
        Slot {
            slots: self.clone(),
            node,
            number,
            replaced,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // No code that holds the lock panics halfway through a change.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Waits until the node has taken more places than it has; returns the reason.
    pub async fn replaced(&self) -> Status {
        self.replaced.cancelled().await;
        let NodeSlots { what, most, .. } = &*self.slots;
        Status::aborted(format!(
            "this node has begun more than {most} {what}: the oldest one ends"
        ))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.lock();
        if let Some(places) = taken.nodes.get_mut(&self.node) {
            places.retain(|(number, _)| *number != self.number);
            if places.is_empty() {
                taken.nodes.remove(&self.node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn the_newest_places_are_kept() {
        let slots = NodeSlots::new("tests", 2);
        let id = |number| NodeId::from_bytes([number; 16]);
        let is_replaced = |slot: &Slot| slot.replaced().now_or_never().is_some();
        let other = slots.open(id(9));
        let first = slots.open(id(1));
        let second = slots.open(id(1));
        assert!(!is_replaced(&first) && !is_replaced(&second));
        let third = slots.open(id(1));
        assert!(is_replaced(&first) && !is_replaced(&second));
        // A place that was given back is free.
        drop(third);
        let fourth = slots.open(id(1));
        assert!(!is_replaced(&second) && !is_replaced(&fourth));
        assert!(!is_replaced(&other));
        drop((other, first, second, fourth));
        assert!(slots.lock().nodes.is_empty());
    }
}
