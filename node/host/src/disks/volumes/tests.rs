use std::fs::File;
use std::os::unix::fs::FileExt;

use hearth_base::event::value;
use hearth_sys::block::Disk;
use proptest::prelude::*;

use super::super::choice::testing::disk as candidate;
use super::*;
use crate::layout::Root;
use crate::storage::keys::Mode;
use crate::storage::testing::{Files, volume};

/// Disks in files. What they look like is looked up, as on a machine.
#[derive(Clone, Default)]
struct Shelf(Arc<Mutex<Vec<(Candidate, Files)>>>);

impl Shelf {
    fn plug(&self, candidate: Candidate, files: Files) {
        self.0.lock().unwrap().push((candidate, files));
    }

    fn unplug(&self, name: &str) -> (Candidate, Files) {
        let mut all = self.0.lock().unwrap();
        let at = all.iter().position(|(it, _)| it.name == name).unwrap();
        all.remove(at)
    }
}

impl Disks for Shelf {
    type Backend = Files;

    fn all(&self) -> Result<Vec<Known>, BlockError> {
        let all = self.0.lock().unwrap();
        let known = all.iter().map(|(candidate, files)| {
            let path = files.device_path();
            let size = fs::metadata(path).unwrap().len();
            let content = Content::of(&File::open(path).unwrap(), size, 512).unwrap();
            Known {
                disk: Disk {
                    name: candidate.name.clone(),
                    path: path.to_owned(),
                    size,
                    sector_size: 512,
                    read_only: false,
                },
                candidate: Candidate {
                    content,
                    ..candidate.clone()
                },
            }
        });
        Ok(known.collect())
    }

    fn volume(&self, disk: &Known, _: &str) -> Files {
        let all = self.0.lock().unwrap();
        let mut found = all
            .iter()
            .filter(|(_, files)| files.device_path() == disk.disk.path);
        found.next().unwrap().1.clone()
    }
}

/// A machine with disks, and a data partition.
struct Machine {
    folder: tempfile::TempDir,
    shelf: Shelf,
    worker: Worker<Shelf>,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shelf = Shelf::default();
        let root = Root::under(folder.path());
        fs::create_dir_all(root.data.node().path()).unwrap();
        let worker = worker(&shelf, root.data);
        Self {
            folder,
            shelf,
            worker,
        }
    }

    /// An empty disk with this name; its serial number is the name in capitals.
    fn plug(&self, name: &str) -> Files {
        let directory = self.folder.path().join(name);
        fs::create_dir(&directory).unwrap();
        let files = Files::new(&directory);
        self.shelf.plug(candidate(name), files.clone());
        files
    }

    /// After a power cut: nothing is mounted.
    fn reboot(&mut self) {
        for (_, files) in self.shelf.0.lock().unwrap().iter_mut() {
            files.fail_after(u32::MAX);
            *files = files.rebooted();
        }
        let data = self.worker.data.clone();
        data.remove_mount_points();
        self.worker = worker(&self.shelf, data);
    }

    fn apply(&self, wanted: &[(&str, DiskConditions)]) -> Vec<String> {
        self.apply_for(wanted, 1)
    }

    fn apply_for(&self, wanted: &[(&str, DiskConditions)], enrolment: u8) -> Vec<String> {
        let wanted = wanted
            .iter()
            .map(|(name, it)| ((*name).to_owned(), it.clone()));
        let owner = volume(Some(Mode::Encrypted), enrolment);
        self.worker.apply(&wanted.collect(), &owner)
    }

    /// The name of the disk on which a volume is.
    fn is_on(&self, name: &str) -> Option<String> {
        self.worker.with_mounted(|mounted| {
            let one = mounted.get(name)?;
            Some(one.disk.candidate.name.clone())
        })
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.worker.data.disk(name).join("file")
    }
}

fn worker(shelf: &Shelf, data: layout::Data) -> Worker<Shelf> {
    Worker {
        disks: shelf.clone(),
        data,
        node_settings: value().1,
        data_volume: value().1,
        disk_problems: value().0,
        mounted: Mutex::default(),
    }
}

fn serial(serial: &str) -> DiskConditions {
    DiskConditions {
        serial: Some(serial.into()),
        ..DiskConditions::default()
    }
}

const NOTHING: [String; 0] = [];

#[test]
fn a_disk_is_chosen_once_and_found_again_under_any_name() {
    let mut machine = Machine::new();
    machine.plug("sdb");
    let wanted = [("scratch", DiskConditions::default())];
    assert_eq!(machine.apply(&wanted), NOTHING);
    assert_eq!(machine.is_on("scratch").as_deref(), Some("sdb"));
    fs::write(machine.file("scratch"), "kept").unwrap();
    // Another empty disk is there, and the kernel finds it first.
    let (old, files) = machine.shelf.unplug("sdb");
    machine.plug("sdc");
    let renamed = Candidate {
        name: "sdd".into(),
        ..old
    };
    machine.shelf.plug(renamed, files);
    machine.reboot();
    assert_eq!(machine.apply(&wanted), NOTHING);
    assert_eq!(machine.is_on("scratch").as_deref(), Some("sdd"));
    assert_eq!(fs::read_to_string(machine.file("scratch")).unwrap(), "kept");
}

#[test]
fn without_its_disk_a_volume_has_none() {
    let mut machine = Machine::new();
    machine.plug("sdb");
    let wanted = [("scratch", DiskConditions::default())];
    assert_eq!(machine.apply(&wanted), NOTHING);
    let (candidate, files) = machine.shelf.unplug("sdb");
    fs::remove_file(files.device_path()).unwrap();
    assert!(!machine.worker.are_all_there());
    let expected = "disk.scratch: expected the disk that it was formatted on, got none";
    files.fail_after(0);
    assert_eq!(machine.apply(&wanted), ["disk.scratch: its disk is gone"]);
    files.fail_after(u32::MAX);
    let problems = machine.apply(&wanted);
    assert!(problems[0].starts_with(expected), "{problems:?}");
    machine.reboot();
    machine.plug("sdc");
    let problems = machine.apply(&wanted);
    assert!(problems[0].starts_with(expected), "{problems:?}");
    assert!(!machine.worker.data.disk("scratch").exists());
    // A new one is chosen by new conditions.
    assert_eq!(machine.apply(&[("scratch", serial("SDC"))]), NOTHING);
    assert_eq!(machine.is_on("scratch").as_deref(), Some("sdc"));
    drop(candidate);
}

#[test]
fn what_somebody_has_is_never_written_unless_it_is_named() {
    let mut machine = Machine::new();
    let files = machine.plug("sdb");
    let disk = File::options()
        .write(true)
        .open(files.device_path())
        .unwrap();
    disk.write_all_at(b"XFSB", 0).unwrap();
    let before = fs::read(files.device_path()).unwrap();
    let problems = machine.apply(&[("scratch", serial("SDB"))]);
    assert!(problems[0].contains("expected an empty disk, got a file system (xfs)"));
    assert_eq!(fs::read(files.device_path()).unwrap(), before);
    let named = DiskConditions {
        overwrite: Some("SDB".into()),
        ..DiskConditions::default()
    };
    let wanted = [("scratch", named)];
    assert_eq!(machine.apply(&wanted), NOTHING);
    fs::write(machine.file("scratch"), "kept").unwrap();
    // Once it is this node's, nothing is overwritten any more.
    machine.reboot();
    assert_eq!(machine.apply(&wanted), NOTHING);
    assert!(machine.file("scratch").exists());
    // A node with another enrolment has no record of it, and does not get it unasked.
    machine.reboot();
    fs::remove_dir_all(machine.worker.data.node().path().join("disks")).unwrap();
    let before = fs::read(files.device_path()).unwrap();
    let problems = machine.apply_for(&[("scratch", serial("SDB"))], 2);
    assert!(
        problems[0].contains("a volume of a Hearth node"),
        "{problems:?}"
    );
    assert_eq!(fs::read(files.device_path()).unwrap(), before);
}

#[test]
fn a_volume_that_is_not_wanted_any_more_keeps_its_data_for_later() {
    let machine = Machine::new();
    let files = machine.plug("sdb");
    machine.plug("sdc");
    let (one, two) = (("one", serial("SDB")), ("two", serial("SDC")));
    assert_eq!(machine.apply(&[one.clone(), two.clone()]), NOTHING);
    fs::write(machine.file("one"), "kept").unwrap();
    // It is unmounted, and cannot be closed, because something still uses it.
    files.fail_after(1);
    let problems = machine.apply(std::slice::from_ref(&two));
    assert!(
        problems[0].starts_with("disk.one: cannot use sdb"),
        "{problems:?}"
    );
    files.fail_after(u32::MAX);
    assert!(!machine.file("one").exists());
    assert_eq!(machine.apply(&[one.clone(), two.clone()]), NOTHING);
    assert!(machine.file("one").exists());
    assert_eq!(machine.apply(std::slice::from_ref(&two)), NOTHING);
    assert_eq!(machine.is_on("one"), None);
    assert!(!machine.worker.data.disk("one").exists());
    // Under another name, too.
    fs::remove_file(machine.worker.data.node().disk("one")).unwrap();
    assert_eq!(machine.apply(&[("other", serial("SDB")), two]), NOTHING);
    assert!(machine.file("other").exists());
}

#[test]
fn a_removed_node_leaves_empty_disks() {
    let mut machine = Machine::new();
    let (own, foreign) = (machine.plug("sdb"), machine.plug("sdc"));
    assert_eq!(machine.apply(&[("scratch", serial("SDB"))]), NOTHING);
    assert_eq!(machine.apply_for(&[("other", serial("SDC"))], 2), NOTHING);
    let size = fs::metadata(own.device_path()).unwrap().len();
    let disk = File::options().write(true).open(own.device_path()).unwrap();
    disk.write_all_at(b"of the payload", size - 100).unwrap();
    machine.reboot();
    let before = fs::read(foreign.device_path()).unwrap();
    erase_all(&machine.shelf, &volume(None, 1).owner).unwrap();
    let contents: Vec<Content> = machine
        .shelf
        .all()
        .unwrap()
        .into_iter()
        .map(|it| it.candidate.content)
        .collect();
    assert_eq!(contents[0], Content::Empty);
    assert_eq!(fs::read(foreign.device_path()).unwrap(), before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whenever the power is cut, the next boot completes the volume, on the same disk, and keeps what was in it.
    #[test]
    fn a_power_cut_leaves_a_disk_that_is_completed(cuts in prop::collection::vec(0_u32..12, 1..4)) {
        let mut machine = Machine::new();
        machine.plug("sdb");
        let wanted = [("scratch", serial("SDB"))];
        let mut was_complete = false;
        for cut in cuts {
            for (_, files) in machine.shelf.0.lock().unwrap().iter() {
                files.fail_after(cut);
            }
            let problems = machine.apply(&wanted);
            if problems.is_empty() {
                prop_assert!(!was_complete || machine.file("scratch").exists());
                fs::write(machine.file("scratch"), "kept").unwrap();
                was_complete = true;
            }
            machine.reboot();
        }
        prop_assert_eq!(machine.apply(&wanted), NOTHING);
        prop_assert!(!was_complete || machine.file("scratch").exists());
    }
}
