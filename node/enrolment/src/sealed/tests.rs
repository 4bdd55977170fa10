use std::fs;

use hearth_api::identity::{ClusterId, SigningKey};
use hearth_api::manifests::Manifest;
use hearth_api::private::{self, SealedConfiguration};
use hearth_api::recovery::RecoveryKey;
use hearth_api::v1::{ClusterConfiguration, StorageSecurityPolicy, TpmMode, node_roles};
use hearth_host::layout::Root;
use hearth_sys::slots::HEADER_LEN;
use proptest::prelude::*;
use prost::Message as _;

use super::super::testing::{founding, registering};
use super::store::{BLOCK, frame, unframe};
use super::*;

struct Place {
    _dir: tempfile::TempDir,
    root: Root,
    store: SealedStore,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::under(dir.path());
    fs::create_dir(root.esp.path()).unwrap();
    Place {
        store: SealedStore::new(&root.esp, None),
        root,
        _dir: dir,
    }
}

fn ca() -> CertificateDer<'static> {
    CertificateDer::from(b"an authority".to_vec())
}

fn all_phases() -> Vec<Sealed> {
    let founding = founding(1, StorageSecurity::Encrypted);
    let with_ca = Founding {
        cluster_ca: Some(ca()),
        ..Founding::clone(&founding)
    };
    let member = founding.into_member(ca());
    let disowned = member.into_disowned(AfterRemoval::Wait);
    vec![
        Sealed::Member(Arc::new(member)),
        Sealed::Founding(founding),
        Sealed::Founding(Arc::new(with_ca)),
        Sealed::Registering(registering(1, None)),
        Sealed::Registering(registering(1, Some(StorageSecurity::Encrypted))),
        Sealed::Disowned(disowned),
    ]
}

/// What the next boot finds.
fn loaded(place: &Place) -> Sealed {
    match SealedStore::new(&place.root.esp, None).load().unwrap() {
        Stored::Sealed(sealed) => sealed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_phase_is_kept_whole() {
    let place = place();
    assert!(matches!(place.store.load().unwrap(), Stored::Absent));
    for sealed in all_phases() {
        place.store.save(&sealed).unwrap();
        let again = loaded(&place);
        assert!(again.is_same(&sealed), "{again:?}");
        assert_eq!(again.phase(), sealed.phase());
        assert_eq!(again.enrolment_id(), sealed.enrolment_id());
    }
    place.store.erase().unwrap();
    assert!(matches!(place.store.load().unwrap(), Stored::Absent));
}

#[test]
fn a_member_leaves_no_byte_of_what_it_was() {
    let place = place();
    let founding = founding(1, StorageSecurity::Encrypted);
    let mut long = Founding::clone(&founding);
    long.seed.labels = (0..64)
        .map(|i| Label {
            key: format!("label-{i}"),
            value: "v".repeat(60),
        })
        .collect();
    place.store.save(&Sealed::Founding(Arc::new(long))).unwrap();
    place
        .store
        .save(&Sealed::Member(Arc::new(founding.into_member(ca()))))
        .unwrap();
    let paths = place.root.esp.sealed_configuration().paths();
    for path in &paths {
        let bytes = fs::read(path).unwrap();
        for secret in [
            founding.cluster_unlock_key.expose().as_slice(),
            founding.node_key.expose_seed().as_slice(),
            founding.seed.first_contact_secret.expose().as_slice(),
            b"label-63",
        ] {
            assert!(!bytes.windows(secret.len()).any(|window| window == secret));
        }
        // The file has not shrunk away from them either.
        assert!(bytes.len() > 4096, "{}", bytes.len());
    }
}

/// A DISOWNED configuration leaves no key in any byte of either slot.
#[test]
fn a_disowned_node_keeps_no_key() {
    let place = place();
    let founding = founding(1, StorageSecurity::Encrypted);
    let member = founding.into_member(ca());
    let disowned = member.into_disowned(AfterRemoval::Reset);
    place.store.save(&Sealed::Member(Arc::new(member))).unwrap();
    place.store.save(&Sealed::Disowned(disowned)).unwrap();
    for path in place.root.esp.sealed_configuration().paths() {
        let bytes = fs::read(path).unwrap();
        for secret in [
            founding.identity.node_unlock_key.expose().as_slice(),
            founding.identity.join_key.expose_seed().as_slice(),
        ] {
            assert!(!bytes.windows(secret.len()).any(|window| window == secret));
        }
    }
    let Sealed::Disowned(again) = loaded(&place) else {
        panic!("another phase");
    };
    assert_eq!(again, disowned);
}

/// A slot that cannot be written is told as long as that is so, by a save and by the repair of the next boot.
#[test]
fn a_slot_that_cannot_be_written_is_told_until_it_is_mended() {
    let place = place();
    let [founding, member] = [1, 0].map(|index| all_phases()[index].clone());
    place.store.save(&founding).unwrap();
    assert!(!place.store.last_write().failed());
    let [_, b] = place.root.esp.sealed_configuration().paths();
    fs::remove_file(&b).unwrap();
    fs::create_dir(&b).unwrap();
    place.store.save(&member).unwrap_err();
    assert!(place.store.last_write().failed());

    let store = SealedStore::new(&place.root.esp, None);
    let Stored::Sealed(sealed) = store.load().unwrap() else {
        panic!("nothing");
    };
    store.repair().unwrap();
    assert!(store.last_write().failed());
    fs::remove_dir(&b).unwrap();
    store.repair().unwrap();
    assert!(!store.last_write().failed());
    assert!(
        loaded(&place).is_same(&sealed),
        "repaired with what was loaded"
    );
}

/// FAULTS 5, 6, 7, 11: one damaged slot is repaired, two are refused.
#[test]
fn damage_is_told_from_absence() {
    for damage in [b"".as_slice(), b"HRTHPLSC", &[0xff; 4096]] {
        let place = place();
        let sealed = &all_phases()[0];
        place.store.save(sealed).unwrap();
        let [a, b] = place.root.esp.sealed_configuration().paths();
        for slot in [&a, &b] {
            fs::write(slot, damage).unwrap();
            assert!(loaded(&place).is_same(sealed));
        }
        fs::write(&a, damage).unwrap();
        fs::write(&b, damage).unwrap();
        let store = SealedStore::new(&place.root.esp, None);
        let error = store.load().unwrap_err();
        assert!(!error.is_transient(), "{error}");
        assert!(store.save(sealed).is_err(), "not overwritten by accident");
    }
}

#[test]
fn a_first_save_that_was_cut_off_is_neither_absent_nor_corrupt() {
    let place = place();
    place.root.esp.make_directories().unwrap();
    let [a, _] = place.root.esp.sealed_configuration().paths();
    fs::write(&a, b"").unwrap();
    assert!(matches!(
        place.store.load().unwrap(),
        Stored::NeverCompleted
    ));
    place.store.save(&all_phases()[1]).unwrap();
    assert_eq!(loaded(&place).phase(), "FOUNDING");
}

#[test]
fn a_file_that_cannot_be_read_is_worth_another_try() {
    let place = place();
    place.root.esp.make_directories().unwrap();
    let [a, _] = place.root.esp.sealed_configuration().paths();
    fs::create_dir(a).unwrap();
    let error = place.store.load().unwrap_err();
    assert!(error.is_transient(), "{error}");
}

#[test]
fn a_slot_that_cannot_be_read_is_made_good_by_the_other_one() {
    let place = place();
    place.store.save(&all_phases()[0]).unwrap();
    for path in place.root.esp.sealed_configuration().paths() {
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(loaded(&place).phase(), "MEMBER");
        fs::remove_dir(&path).unwrap();
        assert_eq!(loaded(&place).phase(), "MEMBER");
    }
}

#[test]
fn a_phase_has_its_own_fields_and_no_others() {
    let refused = |message: &SealedConfiguration| match Sealed::decode(&message.encode_to_vec()) {
        Err(SealedError::Content { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    let messages: Vec<_> = all_phases().iter().map(Sealed::to_message).collect();
    let [member, founding, _, registering, answered, disowned] = &messages[..] else {
        unreachable!("six of them");
    };
    let change = |message: &SealedConfiguration, change: fn(&mut SealedConfiguration)| {
        let mut message = message.clone();
        change(&mut message);
        message
    };
    for (message, field) in [
        (
            change(member, |m| m.cluster_unlock_key = vec![1; 32]),
            "cluster_unlock_key",
        ),
        (change(member, |m| m.node_key = vec![1; 32]), "node_key"),
        (change(member, |m| m.cluster_ca.clear()), "cluster_ca"),
        (
            change(member, |m| m.founding = Some(private::Founding::default())),
            "founding",
        ),
        (change(member, |m| m.phase = 0), "phase"),
        (change(member, |m| m.version = 2), "version"),
        (
            change(member, |m| m.storage_security = 0),
            "storage_security",
        ),
        (change(member, |m| m.node_id = "x".into()), "node_id"),
        (change(founding, |m| m.founding = None), "founding"),
        (change(founding, |m| m.node_key.truncate(31)), "node_key"),
        (
            change(founding, |m| m.cluster_unlock_key.clear()),
            "cluster_unlock_key",
        ),
        (change(founding, |m| m.enrolment_id.push(0)), "enrolment_id"),
        (
            change(member, |m| {
                m.registering = Some(private::Registering::default());
            }),
            "registering",
        ),
        (
            change(founding, |m| {
                m.registering = Some(private::Registering::default());
            }),
            "registering",
        ),
        (change(registering, |m| m.registering = None), "registering"),
        (
            change(registering, |m| {
                m.founding = Some(private::Founding::default());
            }),
            "founding",
        ),
        (change(registering, |m| m.cluster_ca.clear()), "cluster_ca"),
        (
            change(registering, |m| m.owner_public_key = vec![1; 32]),
            "owner_public_key",
        ),
        // An incomplete answer is an error.
        (
            change(registering, |m| m.cluster_id = vec![1; 16]),
            "storage_security",
        ),
        (change(answered, |m| m.cluster_id.clear()), "cluster_id"),
        (change(answered, |m| m.tpm_usage = 0), "tpm_usage"),
        (
            change(answered, |m| m.cold_start_policy = 0),
            "cold_start_policy",
        ),
        (change(disowned, |m| m.join_key = vec![1; 32]), "join_key"),
        (
            change(disowned, |m| m.node_unlock_key = vec![1; 32]),
            "node_unlock_key",
        ),
        (change(disowned, |m| m.node_id.clear()), "node_id"),
    ] {
        assert_eq!(refused(&message), field);
    }
}

#[test]
fn what_a_founding_was_asked_for_is_kept() {
    let base = founding(1, StorageSecurity::Insecure);
    let manifest = r#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"shop"}}"#;
    let manifest = Manifest::parse("manifest", manifest);
    let asked = Founding {
        roles: NodeRoles {
            consensus_member: Some(node_roles::ConsensusMember::default()),
            ..NodeRoles::default()
        },
        seed: ClusterSeed {
            recovery_recipient: Some(RecoveryKey::from_bytes([7; 32]).recipient()),
            configuration: ClusterConfiguration {
                cluster_domain: "example.internal".into(),
                tpm_mode: TpmMode::Disabled.into(),
                storage_security_policy: StorageSecurityPolicy::NeedsInsecure.into(),
                cold_start_policy: ColdStartPolicy::None.into(),
                kubernetes: None,
                curator_session_seconds: 0,
                time_servers: Vec::new(),
                certificate_lifetime_seconds: 0,
                certificate_names: Vec::new(),
                admission_policy: 0,
                damaged_member_policy: 0,
            },
            owner: SigningKey::from_seed([9; 32]).public(),
            manifests: vec![manifest.unwrap()],
            ..base.seed.clone()
        },
        ..Founding::clone(&base)
    };
    let place = place();
    place
        .store
        .save(&Sealed::Founding(Arc::new(asked.clone())))
        .unwrap();
    let Sealed::Founding(again) = loaded(&place) else {
        panic!("another phase");
    };
    assert_eq!(again.seed.recovery_recipient, asked.seed.recovery_recipient);
    assert_eq!(again.seed.configuration, asked.seed.configuration);
    assert_eq!(again.seed.manifests, asked.seed.manifests);
    assert_eq!(again.roles, asked.roles);
    assert_eq!(again.seed.owner, asked.seed.owner);
    assert_eq!(again.identity.cluster_id, ClusterId::from_bytes([1; 16]));
}

#[test]
fn no_secret_is_printed() {
    let printed = format!("{:?}", all_phases());
    // The keys of the bootstrap consist of these bytes.
    for secret in [0xb1_u8, 0xb2, 0xb3, 0xb4, 0xb6] {
        for form in [format!("{secret}, {secret}"), hex::encode([secret; 4])] {
            assert!(!printed.contains(&form), "{form} in {printed}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_records_never_panic(bytes: Vec<u8>) {
        let _ = unframe(&bytes).and_then(Sealed::decode);
        let _ = Sealed::decode(&bytes);
    }

    #[test]
    fn frames_keep_their_message(message: Vec<u8>, former in 0_usize..20_000) {
        let record = frame(&message, former);
        prop_assert_eq!(unframe(&record).unwrap(), &message[..]);
        prop_assert!(record.len() + HEADER_LEN >= former);
        prop_assert_eq!((record.len() + HEADER_LEN) % BLOCK, 0);
    }
}
