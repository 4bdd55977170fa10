//! The store on a machine with a TPM, emulated by swtpm.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use hearth_api::recovery::RecoveryKey;
use hearth_api::recovery::console::RecordChallenger;
use hearth_api::testing::TestCluster;
use hearth_host::layout::Root;
use hearth_tpm::testing::Swtpm;
use hearth_tpm::{Digest, Pcr, PcrSelection, PcrSignatures, SigningKey};
use zeroize::Zeroizing;

use super::super::testing::{founding, registering};
use super::store::{PLAIN, frame};
use super::*;

/// A machine that has booted an image.
pub(crate) struct SealingMachine {
    tpm: Swtpm,
    disk: tempfile::TempDir,
    builder: SigningKey,
}

impl SealingMachine {
    pub(crate) fn new() -> Self {
        let disk = tempfile::tempdir().unwrap();
        fs::create_dir(Root::under(disk.path()).esp.path()).unwrap();
        let machine = Self {
            tpm: Swtpm::start(),
            disk,
            builder: SigningKey::from_pem(SigningKey::generate().unwrap().as_bytes()).unwrap(),
        };
        machine.boot(b"release 1");
        machine
    }

    fn root(&self) -> Root {
        Root::under(self.disk.path())
    }

    /// The firmware measures the image, and the loader passes on what its builder has signed.
    fn boot(&self, image: &[u8]) {
        let mut tpm = self.tpm.tpm();
        tpm.extend(Pcr::KERNEL_IMAGE, &Digest::of(&[image]));
        let values = tpm
            .pcr_values(PcrSelection::of([Pcr::KERNEL_IMAGE]))
            .unwrap();
        let mut signatures = PcrSignatures::default();
        signatures.sign(&self.builder, &values).unwrap();
        let loader = self.root().loader;
        fs::create_dir_all(&loader).unwrap();
        let key = self.builder.public().to_pem();
        fs::write(loader.join("tpm2-pcr-public-key.pem"), key).unwrap();
        fs::write(loader.join("tpm2-pcr-signature.json"), signatures.to_json()).unwrap();
    }

    fn reboot(&mut self, image: &[u8]) {
        self.tpm.restart();
        self.boot(image);
    }

    pub(crate) fn sealer(&self) -> Option<Arc<Sealer>> {
        Some(Arc::new(
            Sealer::new(self.tpm.tpm(), &self.root().loader).unwrap(),
        ))
    }

    fn store(&self) -> SealedStore {
        SealedStore::new(&self.root().esp, self.sealer())
    }

    fn slots(&self) -> [Vec<u8>; 2] {
        let paths = self.root().esp.sealed_configuration().paths();
        paths.map(|path| fs::read(path).unwrap())
    }

    fn phase(&self) -> Result<&'static str, SealedError> {
        Ok(match self.store().load()? {
            Stored::Sealed(sealed) => sealed.phase(),
            other => panic!("{other:?}"),
        })
    }
}

fn with(usage: TpmUsage) -> Founding {
    let founding = Founding::clone(&founding(1, StorageSecurity::Encrypted));
    let mut identity = founding.identity.clone();
    identity.tpm_usage = usage;
    Founding {
        identity,
        ..founding
    }
}

fn has(bytes: &[u8], secret: &[u8]) -> bool {
    bytes.windows(secret.len()).any(|window| window == secret)
}

/// Fails with a reason for which the machine stops, and which says all of `parts`.
fn is_locked(machine: &SealingMachine, parts: &[&str]) {
    let before = machine.slots();
    let error = machine.store().load().unwrap_err();
    assert!(error.is_locked() && !error.is_transient(), "{error}");
    let message = hearth_api::chain(&error);
    for part in parts {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(machine.slots(), before);
}

#[test]
fn keys_of_a_node_that_uses_its_tpm_are_not_on_the_disk() {
    let mut machine = SealingMachine::new();
    let founding = with(TpmUsage::PresentAndUsed);
    let secrets = [
        *founding.identity.node_unlock_key.expose(),
        *founding.cluster_unlock_key.expose(),
    ];
    machine
        .store()
        .save(&Sealed::Founding(Arc::new(founding)))
        .unwrap();
    for slot in machine.slots() {
        assert!(slot.starts_with(b"HRTHTPSC"));
        assert!(secrets.iter().all(|secret| !has(&slot, secret)));
    }
    assert_eq!(machine.phase().unwrap(), "FOUNDING");
    // The next release of the same builder.
    machine.reboot(b"release 2");
    assert_eq!(machine.phase().unwrap(), "FOUNDING");
}

#[test]
fn a_node_that_does_not_use_its_tpm_has_a_plain_record() {
    let machine = SealingMachine::new();
    let founding = Arc::new(with(TpmUsage::PresentButUnused));
    machine.store().save(&Sealed::Founding(founding)).unwrap();
    assert!(machine.slots()[0].starts_with(b"HRTHPLSC"));
    // It opens without the TPM, too.
    let without = SealedStore::new(&machine.root().esp, None);
    assert!(matches!(without.load().unwrap(), Stored::Sealed(_)));
}

#[test]
fn a_registration_is_sealed_before_the_cluster_has_said_how() {
    let machine = SealingMachine::new();
    let store = machine.store();
    let asking = registering(1, None);
    store.save(&Sealed::Registering(asking)).unwrap();
    assert!(machine.slots().iter().all(|s| s.starts_with(b"HRTHTPSC")));
    // The cluster does not want it.
    let answered = registering(1, Some(StorageSecurity::Encrypted));
    store.save(&Sealed::Registering(answered)).unwrap();
    assert!(machine.slots().iter().all(|s| s.starts_with(b"HRTHPLSC")));
    assert_eq!(machine.phase().unwrap(), "REGISTERING");
    // And back: nothing of the plain record is left.
    let member = with(TpmUsage::PresentAndUsed);
    let secret = *member.identity.node_unlock_key.expose();
    store.save(&Sealed::Founding(Arc::new(member))).unwrap();
    assert!(machine.slots().iter().all(|slot| !has(slot, &secret)));
}

/// The length of what a slot says it has: a file is not made shorter.
fn length(slot: &[u8]) -> u32 {
    u32::from_le_bytes(slot[20..24].try_into().unwrap())
}

/// What a power cut can leave of a save, which writes one slot after the other.
fn cuts(before: &[Vec<u8>; 2], after: &[Vec<u8>; 2]) -> Vec<[Vec<u8>; 2]> {
    let [a, b] = [0, 1].map(|slot| {
        let (old, new) = (&before[slot], &after[slot]);
        let lengths = [0, 1, new.len() / 2, new.len() - 1];
        let torn = lengths.into_iter().flat_map(move |written| {
            let truncated = new[..written].to_vec();
            let overwritten = [&truncated[..], old.get(written..).unwrap_or_default()].concat();
            [truncated, overwritten]
        });
        torn.collect::<Vec<_>>()
    });
    let first = a.into_iter().map(|a| [a, before[1].clone()]);
    let second = b.into_iter().map(|b| [after[0].clone(), b]);
    first.chain(second).collect()
}

#[test]
fn a_power_cut_in_any_step_of_a_save_leaves_the_former_or_the_new_value() {
    let machine = SealingMachine::new();
    let paths = machine.root().esp.sealed_configuration().paths();
    let of = |usage| Arc::new(with(usage));
    let ca = TestCluster::new().ca().clone();
    let member = |usage| Sealed::Member(Arc::new(of(usage).into_member(ca.clone())));
    // Sealed anew, sealed for the first time, and not sealed any more.
    for (from, to) in [
        (TpmUsage::PresentAndUsed, TpmUsage::PresentAndUsed),
        (TpmUsage::PresentButUnused, TpmUsage::PresentAndUsed),
        (TpmUsage::PresentAndUsed, TpmUsage::PresentButUnused),
    ] {
        machine.store().save(&Sealed::Founding(of(from))).unwrap();
        let before = machine.slots();
        machine.store().save(&member(to)).unwrap();
        let after = machine.slots();
        let mut seen = BTreeSet::new();
        for slots in cuts(&before, &after) {
            for (path, slot) in paths.iter().zip(&slots) {
                fs::write(path, slot).unwrap();
            }
            let phase = machine.phase().unwrap();
            seen.insert(phase);
            // Loading has completed what was begun, or undone it.
            let whole = match phase {
                "MEMBER" => &after,
                _ => &before,
            };
            let lengths = machine.slots().map(|slot| length(&slot));
            assert_eq!(lengths, [0, 1].map(|n| length(&whole[n])));
            assert_eq!(machine.phase().unwrap(), phase);
        }
        assert_eq!(Vec::from_iter(seen), ["FOUNDING", "MEMBER"]);
    }
}

#[test]
fn a_power_cut_in_the_first_save_leaves_nothing_or_all() {
    let machine = SealingMachine::new();
    let founding = Arc::new(with(TpmUsage::PresentAndUsed));
    machine.store().save(&Sealed::Founding(founding)).unwrap();
    let [a, b] = machine.root().esp.sealed_configuration().paths();
    let [whole, _] = machine.slots();
    for written in [0, 1, whole.len() / 2, whole.len() - 1] {
        fs::remove_file(&b).ok();
        fs::write(&a, &whole[..written]).unwrap();
        let loaded = machine.store().load().unwrap();
        assert!(matches!(loaded, Stored::NeverCompleted), "{loaded:?}");
    }
    fs::write(&a, &whole).unwrap();
    assert_eq!(machine.phase().unwrap(), "FOUNDING");
    assert!(b.exists(), "not repaired");
}

/// A power cut between the slots leaves one of each format: the newer one counts.
#[test]
fn a_pair_of_both_formats_has_the_newer_value() {
    let machine = SealingMachine::new();
    let store = machine.store();
    store
        .save(&Sealed::Registering(registering(1, None)))
        .unwrap();
    let [old, _] = machine.slots();
    let founding = Arc::new(with(TpmUsage::PresentButUnused));
    store.save(&Sealed::Founding(founding)).unwrap();
    let [_, b] = machine.root().esp.sealed_configuration().paths();
    fs::write(b, old).unwrap();
    assert_eq!(machine.phase().unwrap(), "FOUNDING");
    assert!(machine.slots()[1].starts_with(b"HRTHPLSC"), "not repaired");
}

#[test]
fn a_machine_in_another_state_does_not_open_and_says_why() {
    let mut machine = SealingMachine::new();
    let founding = Arc::new(with(TpmUsage::PresentAndUsed));
    machine.store().save(&Sealed::Founding(founding)).unwrap();

    let without = SealedStore::new(&machine.root().esp, None);
    let error = without.load().unwrap_err();
    assert!(error.is_locked(), "{error}");

    // swtpm serves one connection at a time.
    let found = {
        let mut tpm = machine.tpm.tpm();
        tpm.extend(Pcr::SECURE_BOOT, &Digest::of(&[b"another key"]));
        let values = tpm.pcr_values(PcrSelection::of([Pcr::SECURE_BOOT]));
        values.unwrap().get(Pcr::SECURE_BOOT).unwrap().to_string()
    };
    is_locked(&machine, &["PCR 7: expected ", &format!("got {found}")]);

    // An image that somebody else has changed brings the signature of the original.
    machine.reboot(b"release 1");
    let changed = Digest::of(&[b"one byte"]);
    machine.tpm.tpm().extend(Pcr::KERNEL_IMAGE, &changed);
    is_locked(&machine, &["signature", "PCR 11"]);

    machine.reboot(b"release 1");
    assert_eq!(machine.phase().unwrap(), "FOUNDING");
    machine.tpm.tpm().clear();
    is_locked(&machine, &["another TPM, or one that was cleared"]);
}

#[test]
fn a_disk_in_another_machine_does_not_open() {
    let machine = SealingMachine::new();
    let founding = Arc::new(with(TpmUsage::PresentAndUsed));
    machine.store().save(&Sealed::Founding(founding)).unwrap();
    let mut other = SealingMachine::new();
    // Both run images of one builder.
    other.builder = SigningKey::from_pem(SigningKey::generate().unwrap().as_bytes()).unwrap();
    for (slot, path) in machine
        .slots()
        .iter()
        .zip(other.root().esp.sealed_configuration().paths())
    {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, slot).unwrap();
    }
    is_locked(&other, &["another TPM"]);
}

/// A founding node that uses its TPM, and the key of its owner.
fn recoverable() -> (Arc<Founding>, RecoveryKey) {
    let owner = RecoveryKey::generate();
    let mut founding = with(TpmUsage::PresentAndUsed);
    let key = founding.cluster_unlock_key.clone();
    founding.recovery = founding.identity.recovery(Some(owner.recipient()), &key);
    (Arc::new(founding), owner)
}

/// What the owner enters at the console of a machine that shows the challenge of this store.
fn key_from_owner(store: &SealedStore, owner: &RecoveryKey) -> Zeroizing<[u8; 32]> {
    let wrapped = store.recovery().unwrap().expect("the owner's key");
    let challenger = RecordChallenger::new(wrapped);
    let answer = challenger.console_challenge().answered(owner).unwrap();
    challenger.accept_at_console(&answer).unwrap()
}

#[test]
fn the_owner_opens_what_the_tpm_does_not_and_it_is_sealed_anew() {
    let mut machine = SealingMachine::new();
    let (founding, owner) = recoverable();
    machine.store().save(&Sealed::Founding(founding)).unwrap();
    let other_key = Digest::of(&[b"another key of Secure Boot"]);
    machine.tpm.tpm().extend(Pcr::SECURE_BOOT, &other_key);
    is_locked(&machine, &["PCR 7"]);

    let store = machine.store();
    let key = key_from_owner(&store, &owner);
    let before = machine.slots();
    assert!(store.recover(&[7; 32]).is_err());
    assert_eq!(machine.slots(), before, "another key changes nothing");
    assert!(store.load().is_err());
    store.recover(&key).unwrap();
    assert!(matches!(store.load().unwrap(), Stored::Sealed(_)));
    drop(store);
    // It opens in this state of the machine from now on, and not in the former one.
    assert_eq!(machine.phase().unwrap(), "FOUNDING");
    machine.reboot(b"release 1");
    is_locked(&machine, &["PCR 7"]);
}

#[test]
fn the_owner_opens_what_a_lost_tpm_has_sealed_at_every_boot() {
    let machine = SealingMachine::new();
    let (founding, owner) = recoverable();
    machine.store().save(&Sealed::Founding(founding)).unwrap();
    let before = machine.slots();
    for _ in 0..2 {
        let without = SealedStore::new(&machine.root().esp, None);
        assert!(without.load().unwrap_err().is_locked());
        without.recover(&key_from_owner(&without, &owner)).unwrap();
        assert!(matches!(without.load().unwrap(), Stored::Sealed(_)));
        assert_eq!(machine.slots(), before);
    }
}

#[test]
fn a_record_without_a_recovery_recipient_opens_by_its_tpm_only() {
    let machine = SealingMachine::new();
    let founding = Arc::new(with(TpmUsage::PresentAndUsed));
    machine.store().save(&Sealed::Founding(founding)).unwrap();
    assert_eq!(machine.store().recovery().unwrap(), None);
}

#[test]
fn a_plain_record_of_a_node_that_uses_its_tpm_is_refused() {
    let machine = SealingMachine::new();
    let used = Sealed::Founding(Arc::new(with(TpmUsage::PresentAndUsed)));
    let root = machine.root();
    // A machine without a TPM does not write one.
    let error = SealedStore::new(&root.esp, None).save(&used).unwrap_err();
    assert!(matches!(error, SealedError::NoTpm), "{error}");
    // Somebody else does.
    root.esp.make_directories().unwrap();
    let mut slots = root.esp.sealed_configuration().slots(&[PLAIN]);
    slots.save(&frame(&used.encode(), 0)).unwrap();
    let error = machine.store().load().unwrap_err();
    assert!(error.to_string().contains("sealed by the TPM"), "{error}");
    assert!(!error.is_transient() && !error.is_locked());
}

#[test]
fn a_record_with_any_byte_changed_is_refused() {
    let machine = SealingMachine::new();
    let founding = Arc::new(with(TpmUsage::PresentAndUsed));
    machine.store().save(&Sealed::Founding(founding)).unwrap();
    let sealer = machine.sealer().unwrap();
    let slot = &machine.slots()[0];
    let record = &slot[hearth_sys::slots::HEADER_LEN..];
    assert!(sealer.unseal(record).is_ok());
    for at in (0..record.len()).step_by(89) {
        let mut changed = record.to_vec();
        changed[at] ^= 0x10;
        let error = sealer.unseal(&changed).expect_err("a changed record");
        assert!(!error.to_string().is_empty());
    }
    for length in [0, 3, 4, 200, record.len() - 1] {
        assert!(sealer.unseal(&record[..length]).is_err());
    }
}

#[test]
fn an_image_that_is_not_signed_cannot_seal() {
    let machine = SealingMachine::new();
    let loader = machine.root().loader;
    let new = || Sealer::new(machine.tpm.tpm(), &loader);
    let key = loader.join("tpm2-pcr-public-key.pem");
    fs::write(&key, "not a key").unwrap();
    assert!(matches!(new(), Err(SealerError::Key { .. })));
    fs::remove_file(&key).unwrap();
    assert!(matches!(new(), Err(SealerError::NoKey(_))));
    assert!(matches!(
        Sealer::new(machine.tpm.tpm(), Path::new("/missing")),
        Err(SealerError::NoKey(_))
    ));
}
