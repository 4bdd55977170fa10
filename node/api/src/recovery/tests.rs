use proptest::prelude::*;

use super::*;

pub(super) struct World {
    pub(super) recovery: RecoveryKey,
    pub(super) owner: OwnerKey,
    pub(super) key: ClusterUnlockKey,
    join_key: JoinKey,
    node: WrappedFor,
}

impl World {
    pub(super) fn new() -> Self {
        let join_key = JoinKey::generate();
        Self {
            recovery: RecoveryKey::generate(),
            owner: OwnerKey::generate(),
            key: ClusterUnlockKey::generate(),
            node: WrappedFor {
                cluster_id: ClusterId::generate(),
                node_id: NodeId::from_bytes([3; 16]),
                join_key: join_key.public(),
                key_epoch: 0,
            },
            join_key,
        }
    }

    fn wrapped(&self) -> WrappedKey {
        wrap(&self.recovery.recipient(), &self.node, &self.key)
    }

    pub(super) fn challenger(&self) -> Challenger {
        Challenger::new(self.node.clone(), self.wrapped(), &self.join_key)
    }
}

#[test]
fn an_owner_with_both_keys_unlocks_a_node() {
    let world = World::new();
    let challenger = world.challenger();
    let received = Challenge::parse(&challenger.challenge().to_message()).expect("valid");
    assert_eq!(received.node(), &world.node);
    let answer = received
        .answered(&world.recovery, &world.owner)
        .expect("opens");
    let key = challenger
        .accept(&answer, &world.owner.public())
        .expect("accepted");
    assert_eq!(key, world.key);
}

#[test]
fn a_wrapped_key_opens_for_its_node_and_recovery_key_only() {
    let world = World::new();
    let wrapped = world.wrapped();
    assert_eq!(
        world.recovery.open(&world.node, &wrapped).ok(),
        Some(world.key.clone())
    );
    let others = [
        WrappedFor {
            cluster_id: ClusterId::generate(),
            ..world.node.clone()
        },
        WrappedFor {
            node_id: NodeId::from_bytes([4; 16]),
            ..world.node.clone()
        },
        WrappedFor {
            join_key: JoinKey::generate().public(),
            ..world.node.clone()
        },
        WrappedFor {
            key_epoch: 1,
            ..world.node.clone()
        },
    ];
    for other in others {
        let opened = world.recovery.open(&other, &wrapped);
        assert_eq!(opened, Err(RecoveryError::Wrapped), "{other:?}");
    }
    let stranger = RecoveryKey::generate();
    assert_eq!(
        stranger.open(&world.node, &wrapped),
        Err(RecoveryError::Wrapped)
    );
}

/// Who has no join key of the node, but its wrapped key, gets nothing from the owner.
#[test]
fn a_challenge_in_the_name_of_a_node_is_not_answered() {
    let world = World::new();
    let stranger = JoinKey::generate();
    let own = WrappedFor {
        join_key: stranger.public(),
        ..world.node.clone()
    };
    let forged = Challenger::new(own, world.wrapped(), &stranger);
    let received = Challenge::parse(&forged.challenge().to_message()).expect("well-formed");
    assert_eq!(
        received.answered(&world.recovery, &world.owner),
        Err(RecoveryError::Wrapped)
    );
    // With the node's public join key, but not its private half.
    let forged = Challenger::new(world.node.clone(), world.wrapped(), &stranger);
    assert_eq!(
        Challenge::parse(&forged.challenge().to_message()),
        Err(RecoveryError::Challenge)
    );
}

#[test]
fn an_answer_is_for_one_challenge_and_of_the_owner() {
    let world = World::new();
    let (first, second) = (world.challenger(), world.challenger());
    let answer = first
        .challenge()
        .answered(&world.recovery, &world.owner)
        .expect("opens");
    let owner = world.owner.public();
    assert_eq!(second.accept(&answer, &owner), Err(RecoveryError::Answer));
    let other = OwnerKey::generate();
    assert_eq!(
        first.accept(&answer, &other.public()),
        Err(RecoveryError::Answer)
    );
    let of_other = first
        .challenge()
        .answered(&world.recovery, &other)
        .expect("opens");
    assert_eq!(first.accept(&of_other, &owner), Err(RecoveryError::Answer));
    assert_eq!(
        first.accept(&UnlockRequest::default(), &owner),
        Err(RecoveryError::Field {
            field: "wrapped_key",
            expected: "80 bytes",
            found: "0 bytes".into()
        })
    );
}

#[test]
fn recipients_of_small_order_are_rejected() {
    let mut order_eight = [0; 32];
    order_eight[0] = 1;
    for bytes in [[0; 32], order_eight] {
        let error = RecoveryRecipient::try_from(&bytes[..]).expect_err("rejected");
        assert!(
            error.to_string().starts_with("recipient: expected"),
            "{error}"
        );
    }
    assert!(RecoveryRecipient::try_from(&[9; 31][..]).is_err());
    assert!(!format!("{:?}", RecoveryKey::generate()).contains(char::is_numeric));
}

#[test]
fn the_digest_of_the_settings_differs_when_they_do() {
    let recipients = [
        None,
        Some(RecoveryKey::from_bytes([1; 32]).recipient()),
        Some(RecoveryKey::from_bytes([2; 32]).recipient()),
    ];
    let owners = [
        None,
        Some(OwnerKey::from_seed([1; 32]).public()),
        Some(OwnerKey::from_seed([2; 32]).public()),
    ];
    let mut seen = Vec::new();
    for policy in 0..4 {
        let cold_start_policy = ColdStartPolicy::try_from(policy).expect("a policy");
        for (recovery_recipient, owner) in recipients
            .iter()
            .flat_map(|one| owners.map(|other| (*one, other)))
        {
            let settings = UnlockSettings {
                cold_start_policy,
                recovery_recipient,
                owner,
            };
            assert_eq!(settings.digest(), settings.digest());
            assert!(settings.digest() != 0 && !seen.contains(&settings.digest()));
            seen.push(settings.digest());
        }
    }
    // Nodes and curators of different releases compare it.
    assert_eq!(seen[0], 0xdfbb_1ca4_d8a8_e2e2);
}

proptest! {
    /// Each byte that is not the signature is signed.
    #[test]
    fn a_changed_challenge_is_rejected(field in 0..7usize, position in 0..80usize, bit in 0..8u32) {
        let world = World::new();
        let challenger = world.challenger();
        let mut message = challenger.challenge().to_message();
        let bytes = match field {
            0 => &mut message.cluster_id,
            1 => &mut message.join_key,
            2 => &mut message.wrapped_key,
            3 => &mut message.nonce,
            4 => &mut message.answer_recipient,
            5 => &mut message.signature,
            _ => {
                message.key_epoch ^= 1 << bit;
                prop_assert!(Challenge::parse(&message).is_err());
                return Ok(());
            }
        };
        let position = position % bytes.len();
        bytes[position] ^= 1 << bit;
        // The highest bit of an X25519 key has no meaning, but is signed.
        prop_assert!(Challenge::parse(&message).is_err());
    }
}
