//! Decides which of the locked nodes are unlocked, so that the cluster has a quorum: pure.
//!
//! A node that waits for its key knows the curators that its cluster had when it was last running,
//! and two nodes may have been stopped at different times. So there may be several lists of
//! curators, and nothing here says which is the current one: a plan gives each of them a quorum, if
//! the locked nodes suffice. Usually there is one list, and then no node is unlocked that is not
//! needed.

use std::collections::BTreeSet;

use hearth_api::identity::NodeId;

/// How far the consensus members of a cluster are from a quorum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quorum {
    /// Number of consensus members.
    pub voters: usize,
    /// Number of those that are up.
    pub up: usize,
    /// Those that are not.
    pub missing: BTreeSet<NodeId>,
}

impl Quorum {
    /// Of these consensus members, if these nodes are up.
    fn of(voters: &BTreeSet<NodeId>, up: &BTreeSet<NodeId>) -> Self {
        Self {
            voters: voters.len(),
            up: voters.intersection(up).count(),
            missing: voters.difference(up).copied().collect(),
        }
    }

    /// Of the list that is farthest from a quorum, if these nodes are up.
    pub fn least(directories: &[BTreeSet<NodeId>], up: &BTreeSet<NodeId>) -> Self {
        let all = directories.iter().map(|voters| Self::of(voters, up));
        let least = all.max_by_key(|quorum| quorum.needed().saturating_sub(quorum.up));
        least.unwrap_or_else(|| Self::of(&BTreeSet::new(), up))
    }

    /// Number of consensus members that must be up.
    pub fn needed(&self) -> usize {
        self.voters / 2 + 1
    }

    /// Whether enough of them are up.
    pub fn is_reached(&self) -> bool {
        self.up >= self.needed()
    }
}

/// What to unlock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The nodes to unlock.
    pub unlock: BTreeSet<NodeId>,
    /// The quorum once they are unlocked.
    pub quorum: Quorum,
}

/// As many of the locked nodes as a quorum of each of these lists needs, or all of those that help
/// if there are too few. A node in both sets is locked: it has said so itself.
pub fn plan(
    directories: &[BTreeSet<NodeId>],
    locked: &BTreeSet<NodeId>,
    running: &BTreeSet<NodeId>,
) -> Plan {
    let mut up: BTreeSet<NodeId> = running.difference(locked).copied().collect();
    let mut unlock = BTreeSet::new();
    for &node in locked {
        let mut of_it = directories.iter().filter(|voters| voters.contains(&node));
        if of_it.any(|voters| !Quorum::of(voters, &up).is_reached()) {
            up.insert(node);
            unlock.insert(node);
        }
    }
    Plan {
        unlock,
        quorum: Quorum::least(directories, &up),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;

    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId::from_bytes([number; 16])
    }

    fn nodes(numbers: &[u8]) -> BTreeSet<NodeId> {
        numbers.iter().copied().map(node).collect()
    }

    fn some_nodes(at_least: usize) -> impl Strategy<Value = BTreeSet<NodeId>> {
        btree_set((0..9_u8).prop_map(node), at_least..9)
    }

    #[test]
    fn a_majority_is_unlocked_and_not_more() {
        /// Voters, locked, running; unlocked, reached.
        type Case<'a> = (&'a [u8], &'a [u8], &'a [u8], &'a [u8], bool);
        let cases: [Case<'_>; 8] = [
            (&[1], &[1], &[], &[1], true),
            (&[1, 2, 3], &[1, 2, 3], &[], &[1, 2], true),
            (&[1, 2, 3], &[2, 3], &[1], &[2], true),
            (&[1, 2, 3], &[3], &[1, 2], &[], true),
            (&[1, 2, 3], &[3], &[], &[3], false),
            (&[1, 2, 3, 4], &[1, 2, 3, 4], &[], &[1, 2, 3], true),
            // A node that is no voter does not help.
            (&[1, 2], &[1, 9], &[], &[1], false),
            // A node that says that it is locked is not running.
            (&[1], &[1], &[1], &[1], true),
        ];
        for (voters, locked, running, unlocked, reached) in cases {
            let plan = plan(&[nodes(voters)], &nodes(locked), &nodes(running));
            assert_eq!(plan.unlock, nodes(unlocked), "{voters:?} {locked:?}");
            assert_eq!(plan.quorum.is_reached(), reached, "{voters:?} {locked:?}");
        }
    }

    #[test]
    fn who_is_missing_is_named() {
        let plan = plan(&[nodes(&[1, 2, 3, 4, 5])], &nodes(&[2]), &nodes(&[1]));
        let quorum = plan.quorum;
        assert_eq!((quorum.voters, quorum.needed(), quorum.up), (5, 3, 2));
        assert_eq!(quorum.missing, nodes(&[3, 4, 5]));
    }

    proptest! {
        #[test]
        fn what_the_locked_nodes_suffice_for_is_reached(
            directories in vec(some_nodes(1), 1..4),
            locked in some_nodes(0),
            running in some_nodes(0),
        ) {
            let plan = plan(&directories, &locked, &running);
            prop_assert!(plan.unlock.is_subset(&locked));
            let running: BTreeSet<NodeId> = running.difference(&locked).copied().collect();
            let up: BTreeSet<NodeId> = running.union(&plan.unlock).copied().collect();
            let most: BTreeSet<NodeId> = running.union(&locked).copied().collect();
            for voters in &directories {
                let possible = voters.intersection(&most).count() > voters.len() / 2;
                let reached = voters.intersection(&up).count() > voters.len() / 2;
                prop_assert_eq!(possible, reached);
            }
            let all = directories.iter().all(|voters| Quorum::of(voters, &up).is_reached());
            prop_assert_eq!(plan.quorum.is_reached(), all);
            for node in &plan.unlock {
                prop_assert!(directories.iter().any(|voters| voters.contains(node)));
            }
        }

        #[test]
        fn with_one_list_nobody_is_unlocked_who_is_not_needed(
            voters in some_nodes(1),
            locked in some_nodes(0),
            running in some_nodes(0),
        ) {
            let plan = plan(std::slice::from_ref(&voters), &locked, &running);
            let running = running.difference(&locked).filter(|node| voters.contains(node)).count();
            let wanted = (voters.len() / 2 + 1).saturating_sub(running);
            prop_assert_eq!(plan.unlock.len(), wanted.min(locked.intersection(&voters).count()));
            prop_assert_eq!(plan.quorum.up + plan.quorum.missing.len(), voters.len());
        }
    }
}
