//! The slots with power cuts, rot and foreign bytes.
//!
//! # Fault model of the fake disk
//! - A power cut happens in exactly one write; everything after it fails until the "machine" boots
//!   again. What was synced before is durable.
//! - The interrupted write leaves its slot in any state of [`Tear`]: unchanged (content and
//!   directory entry both lost), a prefix of the new bytes over the old ones, truncated, a mixture
//!   of old and new sectors, zeros of the right length (the metadata was written, the data was
//!   not), stale clusters of some other file, or complete (only the acknowledgement was lost).
//! - A write may fail without a power cut: its slot is then in such a state on the disk, while
//!   reads return the new bytes from a cache that is lost with the power. A later write of the same
//!   slot may succeed.
//! - A write never affects the other slot. Rot (bit flips, truncation, loss), however, can affect
//!   either slot at rest.

use std::cell::RefCell;
use std::rc::Rc;
use std::{fs, io};

use proptest::prelude::*;

use super::*;

const FORMAT: SlotFormat = SlotFormat {
    magic: *b"HRTHTEST",
    version: 3,
};

/// A second format of the same pair.
const OTHER: SlotFormat = SlotFormat {
    magic: *b"HRTHTST2",
    version: 3,
};

#[derive(Clone, Copy, Debug)]
enum Tear {
    Untouched,
    Prefix(usize),
    Short(usize),
    Sectors { odd: bool },
    Zeros,
    Stale,
    Whole,
}

/// Small, so that a record spans several of them.
const SECTOR: usize = 16;

impl Tear {
    fn all(length: usize) -> Vec<Self> {
        let mut tears = vec![
            Self::Untouched,
            Self::Sectors { odd: false },
            Self::Sectors { odd: true },
            Self::Zeros,
            Self::Stale,
            Self::Whole,
        ];
        tears.extend((0..length).map(Self::Prefix));
        tears.extend((0..length).map(Self::Short));
        tears
    }

    fn apply(self, old: Option<&[u8]>, new: &[u8]) -> Option<Vec<u8>> {
        let blank = vec![0; new.len()];
        let mut under = old.unwrap_or_default().to_vec();
        if under.len() < new.len() {
            under.resize(new.len(), 0);
        }
        match self {
            Self::Untouched => return old.map(<[u8]>::to_vec),
            Self::Prefix(n) => under[..n].copy_from_slice(&new[..n]),
            Self::Short(n) => return Some(new[..n].to_vec()),
            Self::Sectors { odd } => {
                for (i, (byte, new)) in under.iter_mut().zip(new).enumerate() {
                    if (i / SECTOR % 2 == 1) == odd {
                        *byte = *new;
                    }
                }
            }
            Self::Zeros => return Some(blank),
            Self::Stale => return Some(vec![0xdb; new.len()]),
            Self::Whole => return Some(new.to_vec()),
        }
        Some(under)
    }
}

#[derive(Default)]
struct Disk {
    slots: [Option<Vec<u8>>; 2],
    /// The power cut happens in the write after this many more.
    cut: Option<(usize, Tear)>,
    off: bool,
    read_only: bool,
    /// The write after this many more fails, but the cache shows it as done.
    fails: Option<(usize, Tear)>,
    /// What reads return, if it differs from the content of the disk.
    cache: [Option<Vec<u8>>; 2],
}

#[derive(Clone)]
struct FakeSlot {
    disk: Rc<RefCell<Disk>>,
    index: usize,
}

impl FakeSlot {
    fn change(&self, new: Option<&[u8]>) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        if disk.off || disk.read_only {
            return Err(io::Error::other("power is off, or permission denied"));
        }
        match disk.cut {
            Some((0, tear)) => {
                disk.off = true;
                disk.cut = None;
                let old = disk.slots[self.index].take();
                disk.slots[self.index] = tear.apply(old.as_deref(), new.unwrap_or(&[0; 100]));
                return Err(io::Error::other("power cut"));
            }
            Some((n, tear)) => disk.cut = Some((n - 1, tear)),
            None => {}
        }
        match disk.fails {
            Some((0, tear)) => {
                disk.fails = None;
                let old = disk.slots[self.index].take();
                disk.slots[self.index] = tear.apply(old.as_deref(), new.unwrap_or(&[0; 100]));
                disk.cache[self.index] = new.map(<[u8]>::to_vec);
                return Err(io::Error::other("write failed"));
            }
            Some((n, tear)) => disk.fails = Some((n - 1, tear)),
            None => {}
        }
        disk.cache[self.index] = None;
        disk.slots[self.index] = new.map(<[u8]>::to_vec);
        Ok(())
    }
}

impl SlotStore for FakeSlot {
    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let disk = self.disk.borrow();
        let cached = disk.cache[self.index].as_ref();
        Ok(cached.or(disk.slots[self.index].as_ref()).cloned())
    }
    fn write_sync(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.change(Some(bytes))
    }
    fn erase_sync(&mut self) -> io::Result<()> {
        self.change(None)
    }
    fn capacity(&self) -> usize {
        HEADER_LEN + MAX_PAYLOAD
    }
    fn place(&self) -> String {
        format!("fake slot {}", self.index)
    }
    fn is_ours_alone(&self) -> bool {
        true
    }
}

fn pair(disk: &Rc<RefCell<Disk>>) -> SlotPair<FakeSlot> {
    let slot = |index| FakeSlot {
        disk: disk.clone(),
        index,
    };
    SlotPair::new(&[FORMAT, OTHER], slot(0), slot(1))
}

fn with_slots(a: Option<&[u8]>, b: Option<&[u8]>) -> Rc<RefCell<Disk>> {
    Rc::new(RefCell::new(Disk {
        slots: [a.map(<[u8]>::to_vec), b.map(<[u8]>::to_vec)],
        ..Disk::default()
    }))
}

/// The n-th value: the lengths increase and decrease, so that remnants are detected.
fn value(n: usize) -> Vec<u8> {
    vec![n as u8; [0, 30, 9, 50, 1][n]]
}

/// The format of the n-th value: every change of the value changes it as well.
fn format_of(n: usize) -> SlotFormat {
    if n.is_multiple_of(2) { OTHER } else { FORMAT }
}

fn saved(n: usize) -> Vec<u8> {
    encode(&format_of(n), n as u64, &value(n)).to_vec()
}

fn loaded_value(pair: &mut SlotPair<FakeSlot>) -> Vec<u8> {
    match pair.load().unwrap() {
        Loaded::Value {
            payload, format, ..
        } => {
            let is_saved = |n: &usize| *n > 0 && value(*n) == *payload;
            if let Some(n) = (1..5).find(is_saved) {
                assert_eq!(format, format_of(n));
            }
            payload.to_vec()
        }
        other => panic!("no value: {other:?}"),
    }
}

/// Saves values 1, 2, … until the power cut, or all of them. Returns the last acknowledged and the
/// last attempted one.
fn save_from(disk: &Rc<RefCell<Disk>>, first: usize, last: usize) -> (usize, usize) {
    let mut slots = pair(disk);
    for n in first..=last {
        if slots.save_as(format_of(n), &value(n)).is_err() {
            return (n - 1, n);
        }
    }
    (last, last)
}

/// Boots: the value must be between the last one that was acknowledged or loaded and the last
/// attempted one. Returns the one that must persist from now on.
fn boot(disk: &Rc<RefCell<Disk>>, promised: usize, attempted: usize, what: &str) -> usize {
    disk.borrow_mut().off = false;
    disk.borrow_mut().cache = [None, None];
    match pair(disk).load() {
        Ok(Loaded::Value { payload, whole, .. }) => {
            let found = (promised..=attempted).find(|n| value(*n) == *payload);
            let found = found.unwrap_or_else(|| panic!("{what}: neither old nor new: {payload:?}"));
            // Not whole means that the repair in this load was interrupted.
            if whole { found } else { promised.max(1) }
        }
        Ok(Loaded::Absent | Loaded::NeverCompleted) if promised == 0 => 0,
        other => panic!("{what}: promised {promised}: {other:?}"),
    }
}

#[test]
fn a_power_cut_in_any_write_leaves_the_old_value_or_the_new() {
    const SAVES: usize = 3;
    let longest = saved(3).len();
    for write in 0..2 * SAVES {
        for tear in Tear::all(longest - 50 + 1) {
            for second in [
                Tear::Untouched,
                Tear::Short(0),
                Tear::Short(60),
                Tear::Stale,
            ] {
                let what = format!("{tear:?} in write {write}, then {second:?}");
                let disk = with_slots(None, None);
                disk.borrow_mut().cut = Some((write, tear));
                let (acknowledged, attempted) = save_from(&disk, 1, SAVES);
                assert!(disk.borrow().off, "{what}: no power cut");
                // A second power cut interrupts the repair of the first boot.
                disk.borrow_mut().cut = Some((0, second));
                let seen = boot(&disk, acknowledged, attempted, &what);
                disk.borrow_mut().cut = None;
                let seen = boot(&disk, seen, attempted, &what);
                // The node continues.
                save_from(&disk, seen + 1, seen + 1);
                boot(&disk, seen + 1, seen + 1, &what);
            }
        }
    }
}

#[test]
fn a_failed_write_is_not_built_upon() {
    // Values 1 and 2 are saved; the save of 3 fails in either write; the node loads (or not) and
    // saves 4, with a power cut in any write.
    for fails in [0, 1] {
        for tear in [Tear::Untouched, Tear::Short(30), Tear::Stale, Tear::Whole] {
            for loads in [false, true] {
                for cut in 0..3 {
                    let what = format!("{tear:?} in {fails}, load {loads}, cut at {cut}");
                    let disk = with_slots(None, None);
                    save_from(&disk, 1, 2);
                    let mut slots = pair(&disk);
                    disk.borrow_mut().fails = Some((fails, tear));
                    slots.save(&value(3)).unwrap_err();
                    disk.borrow_mut().cut = Some((cut, Tear::Short(30)));
                    let mut seen = 2;
                    if loads
                        && let Ok(Loaded::Value {
                            payload,
                            whole: true,
                            ..
                        }) = slots.load()
                    {
                        seen = if *payload == value(3) { 3 } else { 2 };
                    }
                    let saved = slots.save(&value(4)).is_ok();
                    let promised = if saved { 4 } else { seen };
                    boot(&disk, promised, 4, &what);
                }
            }
        }
    }
}

#[test]
fn a_first_save_that_failed_can_be_tried_again() {
    let disk = with_slots(None, None);
    let mut slots = pair(&disk);
    disk.borrow_mut().fails = Some((0, Tear::Stale));
    slots.save(&value(1)).unwrap_err();
    assert!(matches!(slots.load().unwrap(), Loaded::NeverCompleted));
    slots.save(&value(1)).unwrap();
    assert_eq!(loaded_value(&mut slots), value(1));
}

#[test]
fn an_acknowledged_value_survives_the_loss_of_either_slot() {
    for lost in [0, 1] {
        let disk = with_slots(None, None);
        save_from(&disk, 1, 3);
        disk.borrow_mut().slots[lost] = None;
        let mut slots = pair(&disk);
        let Loaded::Value {
            payload, repaired, ..
        } = slots.load().unwrap()
        else {
            panic!("the value is lost");
        };
        assert_eq!(*payload, value(3));
        assert!(repaired);
        // The slot is repaired: now the other one may be lost.
        disk.borrow_mut().slots[1 - lost] = Some(Vec::new());
        assert_eq!(loaded_value(&mut pair(&disk)), value(3));
    }
}

#[test]
fn what_a_load_returned_is_never_taken_back() {
    // The second save was interrupted between the slots; the node has loaded its value. Then the
    // slot from which it was loaded is corrupted.
    let disk = with_slots(Some(&saved(2)), Some(&saved(1)));
    assert_eq!(loaded_value(&mut pair(&disk)), value(2));
    disk.borrow_mut().slots[0] = Some(vec![0; 70]);
    assert_eq!(loaded_value(&mut pair(&disk)), value(2));
}

#[test]
fn truncation_at_every_byte_is_found() {
    let whole = saved(3);
    for index in [0, 1] {
        for length in 0..whole.len() {
            let disk = with_slots(Some(&whole), Some(&whole));
            disk.borrow_mut().slots[index] = Some(whole[..length].to_vec());
            assert_eq!(loaded_value(&mut pair(&disk)), value(3), "{length}");
            // Both slots: an error, and the slots are not changed.
            let short = Some(&whole[..length]);
            let disk = with_slots(short, short);
            let error = pair(&disk).load().unwrap_err();
            assert!(matches!(error, SlotError::Corrupt { .. }), "{error}");
            let error = pair(&disk).save(b"new").unwrap_err();
            assert!(matches!(error, SlotError::Corrupt { .. }), "{error}");
            assert_eq!(disk.borrow().slots[0].as_deref(), short);
        }
    }
}

#[test]
fn a_flipped_bit_at_every_place_is_found() {
    let whole = saved(3);
    for index in [0, 1] {
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let disk = with_slots(Some(&whole), Some(&whole));
            disk.borrow_mut().slots[index] = Some(flipped.clone());
            let mut slots = pair(&disk);
            assert_eq!(loaded_value(&mut slots), value(3), "bit {bit}");
            let disk = with_slots(Some(&flipped), Some(&flipped));
            assert!(pair(&disk).load().is_err(), "bit {bit}");
        }
    }
}

#[test]
fn the_newest_of_two_valid_generations_wins() {
    for (a, b) in [(2, 3), (3, 2)] {
        let disk = with_slots(Some(&saved(a)), Some(&saved(b)));
        assert_eq!(loaded_value(&mut pair(&disk)), value(3));
        // A save continues from the newest generation.
        assert_eq!(pair(&disk).save(b"next").unwrap(), 4);
    }
}

#[test]
fn a_slot_that_cannot_be_read_is_not_one_that_was_never_completed() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("state.0")).unwrap();
    let mut pair = SlotPair::in_directory(&[FORMAT], directory.path(), "state");
    for error in [pair.load().unwrap_err(), pair.save(b"new").unwrap_err()] {
        let unreadable = matches!(
            &error,
            SlotError::Corrupt {
                a: Damage::Unreadable(_),
                b: Damage::Absent,
                ..
            }
        );
        assert!(unreadable, "{error}");
    }
}

#[test]
fn a_peek_gives_the_value_and_mends_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut pair = SlotPair::in_directory(&[FORMAT], directory.path(), "state");
    pair.save(b"kept").unwrap();
    let second = directory.path().join("state.1");
    fs::write(&second, b"damaged").unwrap();
    for _ in 0..2 {
        let Loaded::Value { payload, whole, .. } = pair.peek().unwrap() else {
            panic!("no value");
        };
        assert_eq!((payload.as_slice(), whole), (b"kept".as_slice(), false));
        assert_eq!(fs::read(&second).unwrap(), b"damaged");
    }
    pair.load().unwrap();
    let whole = pair.peek().unwrap();
    assert!(matches!(whole, Loaded::Value { whole: true, .. }));
}

#[test]
fn the_pairs_without_a_value() {
    let damaged: Option<&[u8]> = Some(b"HRTHTEST and no more");
    let empty: Option<&[u8]> = Some(b"");
    let load = |a, b| pair(&with_slots(a, b)).load();
    assert!(matches!(load(None, None).unwrap(), Loaded::Absent));
    for a in [damaged, empty] {
        assert!(matches!(load(a, None).unwrap(), Loaded::NeverCompleted));
        assert!(matches!(load(None, a), Err(SlotError::Corrupt { .. })));
        for b in [damaged, empty] {
            let error = load(a, b).unwrap_err();
            assert!(error.to_string().contains("fake slot 1"), "{error}");
        }
    }
    // A save overwrites a first save that never completed.
    let disk = with_slots(empty, None);
    assert_eq!(pair(&disk).save(b"first").unwrap(), 1);
    assert_eq!(loaded_value(&mut pair(&disk)), b"first");
}

#[test]
fn another_version_is_refused_even_beside_a_readable_slot() {
    let newer = SlotFormat {
        version: 4,
        ..FORMAT
    };
    let newer = encode(&newer, 9, b"of the future");
    for (a, b) in [
        (Some(&newer[..]), Some(&saved(2)[..])),
        (Some(&saved(2)[..]), Some(&newer[..])),
        (Some(&newer[..]), None),
    ] {
        let disk = with_slots(a, b);
        for error in [
            pair(&disk).load().unwrap_err(),
            pair(&disk).save(b"x").unwrap_err(),
        ] {
            assert!(
                matches!(
                    error,
                    SlotError::OtherVersion {
                        found: 4,
                        known: 3,
                        ..
                    }
                ),
                "{error}"
            );
        }
        assert_eq!(disk.borrow().slots[0].as_deref(), a);
    }
}

#[test]
fn one_generation_with_two_contents_is_refused() {
    let other = encode(&FORMAT, 2, b"something else");
    let disk = with_slots(Some(&saved(2)), Some(&other));
    let error = pair(&disk).load().unwrap_err();
    assert!(matches!(
        error,
        SlotError::Contradiction { generation: 2, .. }
    ));
}

#[test]
fn a_state_that_cannot_be_mended_is_still_read_and_says_so() {
    let disk = with_slots(Some(&saved(2)), None);
    disk.borrow_mut().read_only = true;
    let loaded = pair(&disk).load().unwrap();
    assert!(matches!(
        loaded,
        Loaded::Value {
            repaired: false,
            whole: false,
            ..
        }
    ));
    let error = pair(&disk).save(b"x").unwrap_err();
    assert!(matches!(error, SlotError::Io { .. }), "{error}");
}

#[test]
fn an_erasure_cut_off_anywhere_is_not_corrupt() {
    for write in [0, 1] {
        for tear in Tear::all(100) {
            let disk = with_slots(Some(&saved(2)), Some(&saved(2)));
            disk.borrow_mut().cut = Some((write, tear));
            pair(&disk).erase().unwrap_err();
            disk.borrow_mut().off = false;
            pair(&disk)
                .load()
                .unwrap_or_else(|error| panic!("{tear:?} in {write}: {error}"));
            pair(&disk).erase().unwrap();
            assert!(matches!(pair(&disk).load().unwrap(), Loaded::Absent));
        }
    }
}

#[test]
fn a_payload_beyond_the_bound_is_refused_before_anything_is_written() {
    let disk = with_slots(None, None);
    let error = pair(&disk).save(&vec![0; MAX_PAYLOAD + 1]).unwrap_err();
    assert!(matches!(error, SlotError::TooLarge { .. }), "{error}");
    assert!(matches!(pair(&disk).load().unwrap(), Loaded::Absent));
    pair(&disk).save(&vec![0; MAX_PAYLOAD]).unwrap();
}

#[test]
fn files_keep_a_state_and_nothing_but_two_fixed_names() {
    let dir = tempfile::tempdir().unwrap();
    // Slots use neither renames nor temporary files; a stray longer file is ignored.
    fs::write(dir.path().join(".state.0.tmp"), [b'x'; 5000]).unwrap();
    let mut slots = SlotPair::in_directory(&[FORMAT], dir.path(), "state");
    assert!(matches!(slots.load().unwrap(), Loaded::Absent));
    slots.save(&[7; 500]).unwrap();
    slots.save(b"shorter").unwrap();
    let mut again = SlotPair::in_directory(&[FORMAT], dir.path(), "state");
    let Loaded::Value {
        generation,
        payload,
        ..
    } = again.load().unwrap()
    else {
        panic!("the value is lost");
    };
    assert_eq!((generation, payload.as_slice()), (2, b"shorter".as_slice()));
    let mut names: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, [".state.0.tmp", "state.0", "state.1"]);
    again.erase().unwrap();
    again.erase().unwrap();
    assert!(matches!(again.load().unwrap(), Loaded::Absent));
}

#[test]
fn a_file_slot_that_cannot_be_read_is_damage_not_absence() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("state.0")).unwrap();
    fs::create_dir(dir.path().join("state.1")).unwrap();
    let mut slots = SlotPair::in_directory(&[FORMAT], dir.path(), "state");
    let error = slots.load().unwrap_err();
    assert!(matches!(error, SlotError::Corrupt { .. }), "{error}");
}

fn regions(device: &Path) -> SlotPair<RegionSlot> {
    SlotPair::new(
        &[FORMAT],
        RegionSlot::new(device, 4096, 4096),
        RegionSlot::new(device, 8192, 4096),
    )
}

#[test]
fn regions_keep_a_state_and_leave_their_neighbours_alone() {
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("device");
    let mut bytes = vec![0xee; 16384];
    bytes[4096..12288].fill(0);
    fs::write(&device, &bytes).unwrap();
    let mut slots = regions(&device);
    assert!(matches!(slots.load().unwrap(), Loaded::Absent));
    assert!(slots.save(&[1; 4096 - HEADER_LEN + 1]).is_err());
    slots.save(&[1; 4096 - HEADER_LEN]).unwrap();
    slots.save(b"short").unwrap();
    let after = fs::read(&device).unwrap();
    assert_eq!(after[..4096], bytes[..4096]);
    assert_eq!(after[12288..], bytes[12288..]);
    // Nothing of the longer state remains.
    assert!(after[4096 + HEADER_LEN + 5..8192].iter().all(|b| *b == 0));
    slots.erase().unwrap();
    assert_eq!(fs::read(&device).unwrap(), bytes);
}

#[test]
fn foreign_bytes_in_a_region_are_corrupt_and_a_torn_first_save_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("device");
    let mut bytes = vec![0; 16384];
    bytes[4096..4100].copy_from_slice(b"XFSB");
    fs::write(&device, &bytes).unwrap();
    assert!(matches!(
        regions(&device).load(),
        Err(SlotError::Corrupt { .. })
    ));
    bytes[4096..4100].copy_from_slice(b"HRTH");
    fs::write(&device, &bytes).unwrap();
    assert!(matches!(
        regions(&device).load().unwrap(),
        Loaded::NeverCompleted
    ));
}

#[test]
fn a_loaded_value_does_not_show_its_payload() {
    let disk = with_slots(None, None);
    pair(&disk).save(b"secret").unwrap();
    let shown = format!("{:?}", pair(&disk).load().unwrap());
    assert!(!shown.contains("115"), "{shown}"); // 's'
    assert!(shown.contains("payload_len: 6"), "{shown}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn arbitrary_bytes_are_never_a_value(
        a in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..200)),
        b in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..200)),
        ours in any::<bool>(),
    ) {
        let claim = |slot: Option<Vec<u8>>| slot.map(|mut bytes| {
            if ours && bytes.len() >= 12 {
                bytes[..8].copy_from_slice(&FORMAT.magic);
                bytes[8..12].copy_from_slice(&FORMAT.version.to_le_bytes());
            }
            bytes
        });
        let disk = with_slots(claim(a).as_deref(), claim(b).as_deref());
        let loaded = pair(&disk).load();
        let is_value = matches!(loaded, Ok(Loaded::Value { .. }));
        prop_assert!(!is_value);
    }
}
