//! What a node reports of itself, compared with what is known of it.

use hearth_api::v1::{MemberStarts, NodeStatus};

/// Keeps what is known of a node's starts of etcd, unless the node has counted on, or has another member. A node that has not
/// started etcd yet says nothing, and one whose disk went back in time says less.
pub(super) fn keep_starts(known: Option<MemberStarts>, status: &mut NodeStatus) {
    let Some(known) = known else {
        return;
    };
    let is_news = |new: MemberStarts| new.member_id != known.member_id || new.count > known.count;
    if !status.etcd_starts.is_some_and(is_news) {
        status.etcd_starts = Some(known);
    }
}

/// Whether two statuses are equal, apart from the time at which they were sent.
pub(super) fn same(known: &NodeStatus, new: &NodeStatus) -> bool {
    let NodeStatus {
        external_address,
        curator_port,
        version,
        boot_id,
        sent_at: _,
        cluster_state,
        consensus,
        address_counter,
        conditions,
        recorded_settings,
        time,
        second_address,
        damaged_member_id,
        etcd_starts,
        storage,
    } = known;
    *external_address == new.external_address
        && *curator_port == new.curator_port
        && *version == new.version
        && *boot_id == new.boot_id
        && *cluster_state == new.cluster_state
        && *consensus == new.consensus
        && *address_counter == new.address_counter
        && *conditions == new.conditions
        && *recorded_settings == new.recorded_settings
        && *time == new.time
        && *second_address == new.second_address
        && *damaged_member_id == new.damaged_member_id
        && *etcd_starts == new.etcd_starts
        && *storage == new.storage
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(member_id: u64, count: u64) -> Option<MemberStarts> {
        Some(MemberStarts { member_id, count })
    }

    #[test]
    fn the_starts_of_a_member_are_never_less_than_before() {
        for (known, reported, kept) in [
            (None, None, None),
            (None, starts(7, 1), starts(7, 1)),
            (starts(7, 3), None, starts(7, 3)),
            (starts(7, 3), starts(7, 2), starts(7, 3)),
            (starts(7, 3), starts(7, 4), starts(7, 4)),
            (starts(7, 3), starts(8, 1), starts(8, 1)),
        ] {
            let mut status = NodeStatus {
                etcd_starts: reported,
                ..NodeStatus::default()
            };
            keep_starts(known, &mut status);
            assert_eq!(status.etcd_starts, kept, "{known:?} {reported:?}");
        }
    }
}
