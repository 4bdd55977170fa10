use std::fs;

use hearth_api::identity::{ClusterId, SigningKey};
use hearth_api::v1::{StorageSecurityPolicy, TpmMode, node_roles};
use proptest::prelude::*;

use super::{super::testing::founding, *};
use crate::layout::Root;

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
        store: SealedStore::new(&root.esp),
        root,
        _dir: dir,
    }
}

fn ca() -> CertificateDer<'static> {
    CertificateDer::from(b"an authority".to_vec())
}

fn all_phases() -> Vec<Sealed> {
    let founding = founding(1, StorageSecurity::Encrypted);
    let registering = Registering {
        enrolment_id: founding.identity.enrolment_id,
        node_id: founding.identity.node_id,
        node_key: founding.node_key.clone(),
        node_unlock_key: founding.identity.node_unlock_key.clone(),
        cluster_unlock_key: founding.cluster_unlock_key.clone(),
        join_key: founding.identity.join_key.clone(),
        cluster_ca: ca(),
        network: None,
    };
    let with_ca = Founding {
        cluster_ca: Some(ca()),
        ..Founding::clone(&founding)
    };
    vec![
        Sealed::Member(Arc::new(founding.into_member(ca()))),
        Sealed::Founding(founding),
        Sealed::Founding(Arc::new(with_ca)),
        Sealed::Registering(Arc::new(registering)),
    ]
}

fn loaded(place: &Place) -> Sealed {
    match place.store.load().unwrap() {
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
    long.labels = (0..64)
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
            founding.first_contact_secret.expose().as_slice(),
            b"label-63",
        ] {
            assert!(!bytes.windows(secret.len()).any(|window| window == secret));
        }
        // The file has not shrunk away from them either.
        assert!(bytes.len() > 4096, "{}", bytes.len());
    }
}

/// FAULTS 5, 6, 7, 11: one slot damaged is mended, both are refused.
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
        let error = place.store.load().unwrap_err();
        assert!(!error.is_transient(), "{error}");
        assert!(
            place.store.save(sealed).is_err(),
            "not overwritten by accident"
        );
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
fn what_a_tpm_sealed_is_never_tried_as_plain() {
    let place = place();
    place.store.save(&all_phases()[0]).unwrap();
    for path in place.root.esp.sealed_configuration().paths() {
        let mut bytes = fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(TPM_MAGIC);
        fs::write(&path, bytes).unwrap();
        let error = place.store.load().unwrap_err();
        assert!(matches!(error, SealedError::SealedByTpm { .. }), "{error}");
        assert!(!error.is_transient());
    }
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
    let [member, founding, ..] = &all_phases()[..] else {
        unreachable!("four of them");
    };
    let (member, founding) = (member.to_message(), founding.to_message());
    let change = |message: &SealedConfiguration, change: fn(&mut SealedConfiguration)| {
        let mut message = message.clone();
        change(&mut message);
        message
    };
    for (message, field) in [
        (
            change(&member, |m| m.cluster_unlock_key = vec![1; 32]),
            "cluster_unlock_key",
        ),
        (change(&member, |m| m.node_key = vec![1; 32]), "node_key"),
        (change(&member, |m| m.cluster_ca.clear()), "cluster_ca"),
        (
            change(&member, |m| m.founding = Some(private::Founding::default())),
            "founding",
        ),
        (change(&member, |m| m.phase = 0), "phase"),
        (change(&member, |m| m.version = 2), "version"),
        (
            change(&member, |m| m.storage_security = 0),
            "storage_security",
        ),
        (change(&member, |m| m.node_id = "x".into()), "node_id"),
        (change(&founding, |m| m.founding = None), "founding"),
        (change(&founding, |m| m.node_key.truncate(31)), "node_key"),
        (
            change(&founding, |m| m.cluster_unlock_key.clear()),
            "cluster_unlock_key",
        ),
        (
            change(&founding, |m| m.enrolment_id.push(0)),
            "enrolment_id",
        ),
    ] {
        assert_eq!(refused(&message), field);
    }
}

#[test]
fn what_a_founding_was_asked_for_is_kept() {
    let base = founding(1, StorageSecurity::Insecure);
    let asked = Founding {
        recovery_recipient: Some([7; 32]),
        configuration: ClusterConfiguration {
            cluster_domain: "example.internal".into(),
            tpm_mode: TpmMode::Disabled.into(),
            storage_security_policy: StorageSecurityPolicy::NeedsInsecure.into(),
            cold_start_policy: ColdStartPolicy::None.into(),
        },
        roles: NodeRoles {
            consensus_member: Some(node_roles::ConsensusMember::default()),
            ..NodeRoles::default()
        },
        owner: SigningKey::from_seed([9; 32]).public(),
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
    assert_eq!(again.recovery_recipient, asked.recovery_recipient);
    assert_eq!(again.configuration, asked.configuration);
    assert_eq!(again.roles, asked.roles);
    assert_eq!(again.owner, asked.owner);
    assert_eq!(again.identity.cluster_id, ClusterId::from_bytes([1; 16]));
}

#[test]
fn no_secret_is_printed() {
    let printed = format!("{:?}", all_phases());
    // The keys of the founding are made of these bytes.
    for secret in [0xb1_u8, 0xb2, 0xb3, 0xb4] {
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
