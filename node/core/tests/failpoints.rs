//! A failpoint in one crate is compiled in when the feature of another crate enables it:
//! `failpoint!` is expanded in the crate that uses it, which has no such feature itself.
//!
//! A process can arm one failpoint, so this test has its own test binary.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::sync::mpsc;
use std::time::Duration;
use std::{fs, thread};

use hearth_api::console::Report;
use hearth_api::names;
use hearth_enrolment::disowning;
use hearth_host::failpoint::{ArmError, arm, arm_from_fw_cfg, reach};
use hearth_host::layout::Root;
use hearth_sys::fw_cfg::FwCfg;

/// In `hearth-enrolment`.
const NAME: &str = "disowning.wiped.before";

#[test]
fn the_armed_one_reports_and_stands_still_wherever_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let fw_cfg = FwCfg::at(directory.path());
    assert!(arm_from_fw_cfg(&fw_cfg, |_| ()).unwrap().is_none());
    let item = directory
        .path()
        .join("by_name")
        .join(names::fw_cfg::FAILPOINT);
    fs::create_dir_all(&item).unwrap();
    fs::write(item.join("raw"), "storage.header_red.after").unwrap();
    let error = arm_from_fw_cfg(&fw_cfg, |_| ()).unwrap_err();
    assert!(matches!(error, ArmError::Unknown(_)), "{error}");

    fs::write(item.join("raw"), format!("{NAME}\n")).unwrap();
    let (printed, lines) = mpsc::channel();
    let print = move |report: &Report| printed.send(report.to_string()).unwrap();
    let armed = arm_from_fw_cfg(&fw_cfg, print).unwrap();
    assert_eq!(armed.as_deref(), Some(NAME));
    assert!(matches!(arm(NAME, |_| ()), Err(ArmError::Again)));

    let root = Root::under(directory.path());
    fs::create_dir_all(root.data.path()).unwrap();
    root.data.make_directories().unwrap();
    let roles = root.data.node().roles();
    fs::write(&roles, "roles").unwrap();
    let (passed, marks) = mpsc::channel();
    let data = root.data.clone();
    thread::spawn(move || {
        reach("disowning.wiped.after");
        passed.send("another one").unwrap();
        let wiped = disowning::wipe(&data);
        passed.send(if wiped.is_ok() { "wiped" } else { "failed" })
    });
    let bound = Duration::from_secs(30);
    assert_eq!(marks.recv_timeout(bound), Ok("another one"));
    let line = lines.recv_timeout(bound).unwrap();
    assert_eq!(line, format!("hearth: failpoint {NAME}"));
    // The thread is blocked there, and nothing after the failpoint has been executed.
    let still = marks.recv_timeout(Duration::from_millis(200));
    assert_eq!(still, Err(mpsc::RecvTimeoutError::Timeout));
    assert!(roles.exists());
}
