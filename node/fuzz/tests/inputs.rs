//! Every committed input of every target, and mutations of them, without a fuzzer.
//!
//! `corpus/TARGET/` has the seeds of a target, `regressions/TARGET/` what once broke a promise. libFuzzer finds more,
//! because it sees which code an input reaches; here a change that breaks a decoder is to be found soon.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a test uses plain files, and what fails fails it"
)]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, fs};

use hearth_fuzz::{TARGETS, Target};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, Reason, TestError, TestRunner};

/// Mutated inputs for each target.
const MUTATIONS: u32 = 500;

/// A run counts the allocations of the whole process, so only one of these tests runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn folder(kind: &str, target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(kind)
        .join(target)
}

/// The files of a folder by their names; none if it does not exist.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let Ok(entries) = fs::read_dir(folder) else {
        return BTreeMap::new();
    };
    let file = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    };
    entries.map(|entry| file(entry.unwrap())).collect()
}

/// The committed inputs of a target: seeds and regressions.
fn committed(target: &Target) -> BTreeMap<String, Vec<u8>> {
    let mut all = files(&folder("corpus", target.name));
    all.extend(files(&folder("regressions", target.name)));
    all
}

#[test]
fn committed_inputs_break_no_promise() {
    let _alone = alone();
    for target in TARGETS {
        for (name, input) in committed(target) {
            let run = catch_unwind(AssertUnwindSafe(|| target.run(&input)));
            assert!(run.is_ok(), "{}: {name} breaks a promise", target.name);
        }
    }
}

#[test]
fn mutated_inputs_break_no_promise() {
    let _alone = alone();
    let config = Config {
        cases: MUTATIONS,
        failure_persistence: None,
        ..Config::default()
    };
    for target in TARGETS {
        let inputs: Vec<Vec<u8>> = committed(target).into_values().collect();
        let mutated = (any::<Index>(), vec(edit(), 1..8)).prop_map(|(index, edits)| {
            let start = index.get(&inputs).clone();
            edits.into_iter().fold(start, apply)
        });
        let run = |input: Vec<u8>| {
            target.run(&input);
            Ok(())
        };
        match TestRunner::new(config.clone()).run(&mutated, run) {
            Err(TestError::Fail(reason, input)) => panic!("{}", kept(target, &input, &reason)),
            other => other.unwrap(),
        }
    }
}

/// Keeps an input, and says what to do with it.
fn kept(target: &Target, input: &[u8], reason: &Reason) -> String {
    let (name, path) = (target.name, Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = path.join(format!("fuzz-{name}"));
    fs::write(&path, input).unwrap();
    format!(
        "{name}: {reason}\n  repeat: cargo xtask fuzz {name} --input {path}\n  \
         commit: node/fuzz/regressions/{name}/, with a name that says what was wrong",
        path = path.display()
    )
}

/// A change at a place.
#[derive(Clone, Debug)]
enum Edit {
    Set(Index, u8),
    Flip(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    /// Copies bytes of the input to another place in it.
    Copy(Index, Index, usize),
    Truncate(Index),
}

fn edit() -> impl Strategy<Value = Edit> {
    let place = any::<Index>;
    let byte = prop_oneof![Just(0), Just(0xff), Just(0x7f), Just(0x80), any::<u8>()];
    prop_oneof![
        4 => (place(), byte).prop_map(|(at, byte)| Edit::Set(at, byte)),
        4 => (place(), 0_u8..8).prop_map(|(at, bit)| Edit::Flip(at, bit)),
        2 => (place(), vec(any::<u8>(), 1..16)).prop_map(|(at, bytes)| Edit::Insert(at, bytes)),
        2 => (place(), 1_usize..32).prop_map(|(at, count)| Edit::Remove(at, count)),
        2 => (place(), place(), 1_usize..64).prop_map(|(from, to, count)| Edit::Copy(from, to, count)),
        1 => place().prop_map(Edit::Truncate),
    ]
}

fn apply(mut bytes: Vec<u8>, edit: Edit) -> Vec<u8> {
    let length = bytes.len();
    // A place in the input, or its end.
    let place = |index: Index| index.index(length + 1);
    let up_to = |at: usize, count: usize| at..(at + count).min(length);
    match edit {
        Edit::Set(at, byte) => bytes[up_to(place(at), 1)].fill(byte),
        Edit::Flip(at, bit) => {
            let byte = bytes.get_mut(place(at));
            byte.into_iter().for_each(|byte| *byte ^= 1 << bit);
        }
        Edit::Insert(at, more) => drop(bytes.splice(place(at)..place(at), more)),
        Edit::Remove(at, count) => drop(bytes.drain(up_to(place(at), count))),
        Edit::Copy(from, to, count) => {
            let copy = bytes[up_to(place(from), count)].to_vec();
            bytes.splice(place(to)..place(to), copy);
        }
        Edit::Truncate(at) => bytes.truncate(place(at)),
    }
    bytes
}

/// The folders have what the targets say, and nothing of targets that are no more.
#[test]
fn the_seeds_are_committed() {
    let _alone = alone();
    for target in TARGETS {
        let folder = folder("corpus", target.name);
        let seeds = target.seeds().into_iter();
        let seeds = seeds.map(|(name, seed)| (name.to_owned(), seed));
        let seeds: BTreeMap<String, Vec<u8>> = seeds.collect();
        if env::var_os("HEARTH_WRITE_SEEDS").is_some() {
            write(&folder, &seeds);
        }
        let is_same = files(&folder) == seeds;
        assert!(is_same, "{}: {ADVICE}", folder.display());
    }
    for kind in ["corpus", "regressions"] {
        for entry in fs::read_dir(folder(kind, "")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(
                Target::named(&name).is_some(),
                "{kind}/{name}: no such target"
            );
        }
    }
}

const ADVICE: &str =
    "expected the seeds of the target; HEARTH_WRITE_SEEDS=1 cargo test -p hearth-fuzz writes them";

fn write(folder: &Path, seeds: &BTreeMap<String, Vec<u8>>) {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).unwrap();
    for (name, seed) in seeds {
        fs::write(folder.join(name), seed).unwrap();
    }
}
