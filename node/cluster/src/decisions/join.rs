//! Join: a node that has booted is admitted, or disowned.
//!
//! An unknown join key is not a reason to disown: after a backup was restored, newer nodes are
//! unknown to their cluster. Only a record disowns a node: a tombstone, or the state
//! DECOMMISSIONED.
//!
//! A deleted node that is still an etcd member is told to retry: it would wipe a log that the other
//! members may need in order to remove it.
//!
//! A node that is still heard under another boot ID is told to retry, too: that may be the same
//! machine before a crash, but also another machine with a copy of its disk, and both would get the
//! key. The last boots that were admitted are recorded, so that an operator can see when and from
//! where the key was asked for. It is several of them, since a copy that gets the key while the
//! node is off is followed by the node itself.
//!
//! Nodes that need no key run before they have joined. So which boot is heard is decided with each heartbeat and status, too.

use std::net::IpAddr;
use std::time::Duration;

use hearth_api::identity::{NodeId, PublicKey};
use hearth_api::proofs::AfterRemoval;
use hearth_api::v1::{NodeJoin, NodeState, NodeStatus, TpmUsage};
use hearth_consensus::fenced::Write;

use super::admission::{self, Admission};
use super::{FoundNode, Rejection, Versioned, as_found};
use crate::state::{self, Endorsement, LivenessRecord, NodeRecord, Tombstone};

/// How many joins of a node are recorded.
pub const MOST_JOINS: usize = 8;

/// A validated request.
pub struct Join {
    /// The node's join key, from its TLS certificate.
    pub join_key: PublicKey,
    /// How the node uses its TPM.
    pub tpm_usage: TpmUsage,
    /// The boot of the node.
    pub boot_id: String,
    /// From where it asks.
    pub address: IpAddr,
    /// What it has proven, if the cluster asks for that.
    pub admission: Option<Admission>,
}

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// The node gets its cluster unlock key.
    Admitted(NodeId),
    /// The node is ordered to wipe its keys.
    Disowned(NodeId, AfterRemoval),
}

/// The records for the join key.
pub struct Found {
    /// The node with this join key.
    pub node: Option<NodeRecord>,
    /// The deleted node with this join key.
    pub tombstone: Option<Tombstone>,
    /// Whether etcd has a member for the deleted node.
    pub is_member: bool,
}

/// Decides about a join.
pub fn decide(join: &Join, found: Found) -> Result<Joined, Rejection> {
    let join_key = &join.join_key;
    if let Some(tombstone) = found.tombstone.filter(|t| t.join_key == *join_key) {
        if found.is_member {
            return Err(Rejection::MemberStill(tombstone.id));
        }
        return Ok(Joined::Disowned(tombstone.id, tombstone.afterwards));
    }
    let Some(node) = found.node.filter(|node| node.join_key == *join_key) else {
        return Err(Rejection::UnknownJoinKey(*join_key));
    };
    match node.state {
        NodeState::Decommissioned => {
            return Ok(Joined::Disowned(node.id, AfterRemoval::Wait));
        }
        NodeState::Up => {}
        state => {
            return Err(Rejection::State {
                node: node.id,
                state,
                wanted: "UP: register and commit first",
            });
        }
    }
    if node.tpm_usage != join.tpm_usage {
        return Err(Rejection::TpmChanged {
            node: node.id,
            registered: node.tpm_usage.word(),
            found: join.tpm_usage.word(),
        });
    }
    Ok(Joined::Admitted(node.id))
}

/// What is recorded of a node's boots.
#[derive(Default)]
pub struct Boots {
    /// Which boot is heard, and by which curator.
    pub liveness: Option<Versioned<(LivenessRecord, String)>>,
    /// The last joins, the latest first.
    pub joins: Option<Versioned<Vec<NodeJoin>>>,
    /// The node's TPM, if it has proven anything before.
    pub endorsement: Option<Versioned<Endorsement>>,
}

/// Decides whether a boot of the node is heard: whether its heartbeats and its status count. While another one, `heard`, is
/// heard, it is refused: two machines with one disk would otherwise take turns. A boot that calls from an address of the
/// other one, as that has reported in `status`, follows it on the same machine and need not wait: an address is at one
/// machine. `silence` is the time without heartbeats after which a boot has ended.
///
/// No key depends on this, so it may be less strict than [`admit`].
pub fn hear(
    heard: Option<&str>,
    status: Option<&NodeStatus>,
    boot_id: &str,
    address: IpAddr,
    silence: Duration,
) -> Result<(), Rejection> {
    let Some(heard) = heard.filter(|heard| *heard != boot_id) else {
        return Ok(());
    };
    let address = address.to_canonical().to_string();
    let is_its_own = |status: &&NodeStatus| {
        status.boot_id == heard
            && (status.external_address == address || status.second_address == address)
    };
    match status.filter(is_its_own) {
        Some(_) => Ok(()),
        None => Err(Rejection::OtherBoot { silence }),
    }
}

/// Decides whether this boot of the node is the one that gets the key. `silence` is the time without
/// heartbeats after which a boot has ended, `time` the Unix time in seconds. The write records the
/// join; `None` if it is recorded, since a running node joins repeatedly.
pub fn admit(
    join: &Join,
    found: &FoundNode,
    boots: &Boots,
    silence: Duration,
    time: i64,
) -> Result<Option<Write>, Rejection> {
    if let Some(liveness) = &boots.liveness
        && let (LivenessRecord::HeardBy(_), heard) = &liveness.content
        && *heard != join.boot_id
    {
        return Err(Rejection::OtherBoot { silence });
    }
    let this = NodeJoin {
        time,
        address: join.address.to_canonical().to_string(),
        boot_id: join.boot_id.clone(),
        image: join
            .admission
            .iter()
            .flat_map(|admission| admission.image.0)
            .collect(),
    };
    let before = boots.joins.as_ref().map_or(&[][..], |joins| &joins.content);
    let admission = join.admission.as_ref();
    let endorsement = boots.endorsement.as_ref();
    if let (Some(admission), Some(known)) = (admission, endorsement) {
        admission::is_own(found.id(), admission, Some(&known.content))?;
    }
    let is_recorded = |last: &NodeJoin| {
        NodeJoin {
            time,
            ..last.clone()
        } == this
    };
    if before.first().is_some_and(is_recorded) {
        return Ok(None);
    }
    let joins = [this].into_iter().chain(before.iter().cloned());
    let joins = joins.take(MOST_JOINS).collect();
    let (liveness_key, joins_key) = (
        state::liveness_key(found.id()),
        state::joins_key(found.id()),
    );
    let write = admission::bind(found.unchanged(), found.id(), admission, endorsement)?;
    let write = write
        .and(as_found(liveness_key, boots.liveness.as_ref()))
        .and(as_found(joins_key.clone(), boots.joins.as_ref()))
        .put(joins_key, state::encode_joins(joins));
    Ok(Some(write))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use hearth_api::identity::SigningKey;
    use hearth_api::private::StoredNode;
    use hearth_consensus::fenced::Condition;
    use prost::Message as _;

    use super::*;
    use crate::state::FullRecord;

    fn key(seed: u8) -> PublicKey {
        SigningKey::from_seed([seed; 32]).public()
    }

    fn id() -> NodeId {
        NodeId::from_public_key(&key(1))
    }

    fn join(boot_id: &str) -> Join {
        Join {
            join_key: key(2),
            tpm_usage: TpmUsage::NotPresent,
            boot_id: boot_id.into(),
            address: Ipv4Addr::new(192, 0, 2, 1).into(),
            admission: None,
        }
    }

    fn full(node_state: NodeState) -> FullRecord {
        let stored = StoredNode {
            version: state::VERSION,
            id: id().to_string(),
            public_key: key(1).as_bytes().to_vec(),
            join_key: key(2).as_bytes().to_vec(),
            state: node_state.into(),
            tpm_usage: TpmUsage::NotPresent.into(),
            ..StoredNode::default()
        };
        FullRecord::decode(&state::node_key(id()), &stored.encode_to_vec()).unwrap()
    }

    fn found(node_state: NodeState) -> Found {
        Found {
            node: Some(full(node_state).node),
            tombstone: None,
            is_member: false,
        }
    }

    #[test]
    fn one_boot_of_a_node_is_heard_unless_the_other_follows_at_its_address() {
        let own = IpAddr::from(Ipv4Addr::new(192, 0, 2, 1));
        let mapped = IpAddr::from(Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped());
        let other = IpAddr::from(Ipv4Addr::new(192, 0, 2, 2));
        let second = "2001:db8::1".parse().unwrap();
        let of = |boot: &str| NodeStatus {
            boot_id: boot.into(),
            external_address: own.to_string(),
            second_address: "2001:db8::1".into(),
            ..NodeStatus::default()
        };
        let (current, stale) = (of("first"), of("older"));
        let silence = Duration::from_secs(10);
        let heard = |heard, status, address| hear(heard, status, "second", address, silence);
        for (before, status, address, counts) in [
            (None, Some(&current), other, true),
            (Some("second"), None, other, true),
            (Some("first"), Some(&current), own, true),
            (Some("first"), Some(&current), mapped, true),
            (Some("first"), Some(&current), second, true),
            (Some("first"), Some(&current), other, false),
            // Nothing is known of where the first one is.
            (Some("first"), Some(&stale), own, false),
            (Some("first"), None, own, false),
        ] {
            let result = heard(before, status, address);
            assert_eq!(result.is_ok(), counts, "{before:?} {status:?} {address}");
        }
    }

    #[test]
    fn a_deleted_node_keeps_its_log_as_long_as_it_is_a_member() {
        let found = |is_member, afterwards| Found {
            node: None,
            tombstone: Some(Tombstone {
                id: id(),
                public_key: key(1),
                join_key: key(2),
                afterwards,
            }),
            is_member,
        };
        for afterwards in [AfterRemoval::Wait, AfterRemoval::Reset] {
            let decide = |is_member| decide(&join("boot"), found(is_member, afterwards));
            assert_eq!(decide(true), Err(Rejection::MemberStill(id())));
            assert_eq!(decide(false), Ok(Joined::Disowned(id(), afterwards)));
        }
    }

    #[test]
    fn a_node_that_is_up_joins_with_the_tpm_usage_it_has_registered_with() {
        let up = decide(&join("boot"), found(NodeState::Up));
        assert_eq!(up, Ok(Joined::Admitted(id())));
        let out = decide(&join("boot"), found(NodeState::Decommissioned));
        assert_eq!(out, Ok(Joined::Disowned(id(), AfterRemoval::Wait)));
        let changed = Join {
            tpm_usage: TpmUsage::PresentAndUsed,
            ..join("boot")
        };
        let changed = decide(&changed, found(NodeState::Up));
        assert!(matches!(changed, Err(Rejection::TpmChanged { .. })));
    }

    /// A liveness record of this boot, written at revision 5.
    fn liveness(record: LivenessRecord, boot_id: &str) -> Boots {
        Boots {
            liveness: Some(Versioned {
                content: (record, boot_id.into()),
                revision: 5,
            }),
            joins: None,
            endorsement: None,
        }
    }

    fn admitted(join: &Join, boots: &Boots, time: i64) -> Result<Option<Write>, Rejection> {
        let found = FoundNode {
            full: Versioned {
                content: full(NodeState::Up),
                revision: 3,
            },
            intent: None,
        };
        admit(join, &found, boots, Duration::from_secs(10), time)
    }

    /// The joins that a write records.
    fn recorded(write: &Write) -> Vec<NodeJoin> {
        let (_, parts) = write.parts();
        let [(key, Some(value))] = &parts[..] else {
            panic!("{} parts", parts.len());
        };
        assert_eq!(*key, state::joins_key(id()));
        state::decode_joins(key, value).unwrap()
    }

    #[test]
    fn another_boot_waits_as_long_as_one_is_heard() {
        let heard = |boot_id| liveness(LivenessRecord::HeardBy(id()), boot_id);
        for boots in [
            Boots::default(),
            heard("boot"),
            liveness(LivenessRecord::GivenUp, "other"),
            liveness(LivenessRecord::Ended, "other"),
        ] {
            assert!(matches!(admitted(&join("boot"), &boots, 7), Ok(Some(_))));
        }
        let Err(rejection) = admitted(&join("boot"), &heard("other"), 7) else {
            panic!("another boot was admitted");
        };
        let status = tonic::Status::from(rejection);
        assert_eq!(status.code(), tonic::Code::Unavailable);
        assert_eq!(
            status.message(),
            "the cluster still hears another boot of this node: this one can join when that one has \
             been silent for 10 s"
        );
        let again = hearth_api::pushback::of(&status);
        assert_eq!(again, Some(Duration::from_secs(2)));
    }

    /// If a boot begins to be heard between the decision and the write, nothing is written.
    #[test]
    fn an_admission_holds_for_what_was_found() {
        let mut boots = liveness(LivenessRecord::GivenUp, "other");
        let conditions = |boots: &Boots| {
            let write = admitted(&join("boot"), boots, 7).ok().flatten();
            write.expect("a write").parts().0.to_vec()
        };
        let node = Condition::Unchanged(state::node_key(id()), 3);
        let (liveness, joins) = (state::liveness_key(id()), state::joins_key(id()));
        let found = [
            node.clone(),
            Condition::Unchanged(liveness.clone(), 5),
            Condition::Absent(joins.clone()),
        ];
        assert_eq!(conditions(&boots), found);
        boots.liveness = None;
        boots.joins = Some(Versioned {
            content: Vec::new(),
            revision: 9,
        });
        let found = [
            node,
            Condition::Absent(liveness),
            Condition::Unchanged(joins, 9),
        ];
        assert_eq!(conditions(&boots), found);
    }

    #[test]
    fn each_boot_is_recorded_once_and_the_last_ones_are_kept() {
        let mut boots = Boots::default();
        let mut admitted = |join: &Join, time| {
            let write = admitted(join, &boots, time).ok()?;
            let joins = recorded(&write?);
            boots.joins = Some(Versioned {
                content: joins.clone(),
                revision: time,
            });
            Some(joins)
        };
        let first = NodeJoin {
            time: 1,
            address: "192.0.2.1".into(),
            boot_id: "boot".into(),
            image: Vec::new(),
        };
        assert_eq!(admitted(&join("boot"), 1), Some(vec![first]));
        assert_eq!(admitted(&join("boot"), 2), None);
        // By IPv4 on an IPv6 socket: the same address.
        let mapped = Join {
            address: Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped().into(),
            ..join("boot")
        };
        assert_eq!(admitted(&mapped, 3), None);
        let moved = Join {
            address: Ipv4Addr::new(192, 0, 2, 2).into(),
            ..join("boot")
        };
        assert_eq!(admitted(&moved, 4).map(|joins| joins.len()), Some(2));
        let mut last = Vec::new();
        for time in 5..30 {
            last = admitted(&join(&format!("boot-{time}")), time).expect("not recorded");
        }
        let times: Vec<_> = last.iter().map(|join| join.time).collect();
        assert_eq!(times, [29, 28, 27, 26, 25, 24, 23, 22]);
        // An old boot that comes again is news.
        assert!(admitted(&join("boot-28"), 30).is_some());
    }
}
