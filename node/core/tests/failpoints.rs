//! A failpoint in one crate is there when another crate's feature asks for it: `failpoint!` is expanded where it stands,
//! and that crate has no such feature.
//!
//! There is one armed failpoint in a process, so this is one test in a program of its own.

use std::fs;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use hearth_enrolment::disowning;
use hearth_host::failpoint;
use hearth_host::layout::Root;

#[test]
fn the_armed_one_stands_still_in_a_crate_without_the_feature() {
    let directory = tempfile::tempdir().unwrap();
    let root = Root::under(directory.path());
    fs::create_dir_all(root.data.path()).unwrap();
    root.data.make_directories().unwrap();
    let roles = root.data.node().roles();
    fs::write(&roles, "roles").unwrap();

    let (printed, lines) = mpsc::channel();
    let name = "disowning.wiped.before";
    failpoint::arm(name, move |report| {
        printed.send(report.to_string()).unwrap()
    })
    .unwrap();
    let (ended, end) = mpsc::channel();
    let data = root.data.clone();
    thread::spawn(move || ended.send(disowning::wipe(&data).is_ok()));
    let line = lines.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(line, format!("hearth: failpoint {name}"));
    // For ever, and nothing that follows it has happened.
    end.recv_timeout(Duration::from_millis(200)).unwrap_err();
    assert!(roles.exists());
}
