//! Single machines under a real QEMU.

mod guest;

use std::process::Stdio;
use std::time::{Duration, Instant};

use hearth_api::console::{Milestone, Report};
use hearth_qemu::accel::{Accel, Choice, choose};
use hearth_qemu::command::{Boot, Machine, OnReset, Rtc, TpmInterface, WatchdogAction};
use hearth_qemu::disk::{Cache, Disk, Format};
use hearth_qemu::firmware::Firmware;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::network::{Forward, Link, Mac, Nic, UserNetwork};
use hearth_qemu::run_dir::RunDir;
use hearth_qemu::tpm;
use hearth_qemu::vm::{Cause, DiskFault, Lifetime, Shutdown, StartError, Vm, Why};
use hearth_write_log::{Cut, Log, Pick, Replay};
use tokio::net::TcpStream;

use guest::{BOUND, Then, gone, line, machine, runs};

async fn start(machine: &Machine, run_dir: &RunDir) -> Vm {
    Vm::start(machine, run_dir, Lifetime::KillWithParent)
        .await
        .expect("a machine")
}

#[tokio::test]
async fn a_guest_is_heard_counts_its_power_cuts_and_shuts_down() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut machine, run_dir) = machine(folder.path(), Then::PowerButton);
    machine.disks[0].cache = Cache::Writeback;
    let vm = start(&machine, &run_dir).await;
    let reached = vm
        .reached(Milestone::Kernel, BOUND)
        .await
        .expect("it speaks");
    assert!(reached.at > Duration::ZERO);
    let said = vm
        .wait_for("its line", BOUND, |text| text == line(1))
        .await
        .expect("it speaks");
    assert!(said.at >= reached.at);
    let usage = vm.usage().expect("its usage");
    assert!(usage.peak_rss > 16 << 20, "{usage:?}");
    assert!(usage.cpu >= usage.guest_cpu, "{usage:?}");
    let exit = vm.power_cut().await.expect("cut");
    assert_eq!(exit.cause, Cause::PowerCut);
    assert_eq!(vm.exit(), Some(exit));

    // A reader that subscribes after the end still gets it.
    let mut reports = vm.console().reports();
    let first = reports.next().await.expect("a report");
    assert_eq!(
        first.report,
        Report::Reached(Milestone::Kernel, String::new())
    );

    let vm = start(&machine, &run_dir).await;
    vm.wait_for_report("the second start", BOUND, |report| {
        report.to_string() == line(2)
    })
    .await
    .expect("its disk is as it was");
    let (shutdown, exit) = vm.shutdown(BOUND).await.expect("shut down");
    assert_eq!(
        (shutdown, exit.cause),
        (Shutdown::Clean, Cause::GuestShutdown)
    );
    assert!(
        run_dir.file("serial.1.log").exists(),
        "the log of the first start is kept"
    );
    let log = std::fs::read_to_string(run_dir.qmp_log()).expect("the log of QMP");
    assert!(
        log.contains("system_powerdown") && log.contains("guest-shutdown"),
        "{log}"
    );
}

/// The guest counts its starts in sector 1.
#[tokio::test]
async fn a_disk_fails_and_is_well_again_while_its_machine_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut machine, run_dir) = machine(folder.path(), Then::Halt);
    machine.on_reset = OnReset::Reboot;
    let vm = start(&machine, &run_dir).await;
    let starts = async |count: u8, times: usize| {
        let mut seen = 0;
        vm.wait_for("its line", BOUND, |text| {
            seen += usize::from(text == line(count));
            seen == times
        })
        .await
        .expect("it speaks");
    };
    let faulty = async |fault: Option<DiskFault>| {
        let set = vm.set_disk_fault(0, fault.as_ref()).await;
        set.expect("a fault");
        vm.reset().await.expect("reset");
    };
    let failing = |sectors: &[u64]| {
        Some(DiskFault::FailingWrites {
            sectors: sectors.to_vec(),
        })
    };
    starts(1, 1).await;
    faulty(failing(&[7, 1])).await;
    starts(2, 1).await;
    // That count was not written.
    faulty(failing(&[2])).await;
    starts(2, 2).await;
    faulty(Some(DiskFault::SlowWrites { per_second: 1 })).await;
    starts(3, 1).await;
    faulty(None).await;
    starts(4, 1).await;
    faulty(None).await;
    starts(5, 1).await;
    vm.set_disk_fault(1, None)
        .await
        .expect_err("it has one disk");
}

#[tokio::test]
async fn the_ways_to_end_are_told_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    for (then, cause) in [
        (Then::Shutdown, Cause::GuestShutdown),
        (Then::Reset, Cause::GuestReset),
    ] {
        let (machine, run_dir) = machine(folder.path(), then);
        let vm = start(&machine, &run_dir).await;
        assert_eq!(vm.exited(BOUND).await.expect("it ends").cause, cause);
    }

    let (machine, run_dir) = machine(folder.path(), Then::Halt);
    let vm = start(&machine, &run_dir).await;
    vm.qmp()
        .execute("quit", serde_json::Value::Null)
        .await
        .expect("told");
    assert_eq!(vm.exited(BOUND).await.expect("it ends").cause, Cause::Quit);

    let vm = start(&machine, &run_dir).await;
    vm.reset().await.expect("reset");
    let exit = vm.exited(BOUND).await.expect("it ends");
    assert_eq!(exit.cause, Cause::Other("host-qmp-system-reset".to_owned()));
}

#[tokio::test]
async fn a_guest_that_resets_boots_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut machine, run_dir) = machine(folder.path(), Then::Reset);
    machine.on_reset = OnReset::Reboot;
    let vm = start(&machine, &run_dir).await;
    vm.wait_for("its second start", BOUND, |text| text == line(2))
        .await
        .expect("it boots again");
    assert_eq!(vm.exit(), None);
    let mut events = vm.qmp().events();
    let reset = tokio::time::timeout(BOUND, async {
        loop {
            let event = events.next().await.expect("an event");
            if event.name == "RESET" {
                return event;
            }
        }
    });
    assert_eq!(reset.await.expect("an event").data["reason"], "guest-reset");
}

#[tokio::test]
async fn a_wait_ends_with_what_the_machine_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let (silent, silent_dir) = machine(folder.path(), Then::Halt);
    let vm = start(&silent, &silent_dir).await;
    vm.wait_for("its line", BOUND, |text| text == line(1))
        .await
        .expect("it speaks");
    let asked = Instant::now();
    let error = vm
        .reached(Milestone::Home, Duration::from_millis(50))
        .await
        .expect_err("it never becomes HOME");
    assert!(asked.elapsed() < BOUND);
    assert!(matches!(error.why, Why::Timeout(_)), "{error}");
    let text = error.to_string();
    assert!(
        text.starts_with("machine \"guest\": waiting for home failed: timed out after 0.1 s"),
        "{text}"
    );
    assert!(text.ends_with(&line(1)), "{text}");
    // Where it stands is kept: this guest sleeps.
    let asked = std::fs::read_to_string(silent_dir.qmp_log()).expect("a log");
    assert!(asked.contains("info registers -a"), "{asked}");
    assert!(asked.contains(" HLT=1"), "{asked}");
    assert!(asked.contains("apic"), "{asked}");
    // A guest without support for the power button is ended forcibly.
    let (shutdown, exit) = vm
        .shutdown(Duration::from_millis(50))
        .await
        .expect("shut down");
    assert_eq!((shutdown, exit.cause), (Shutdown::Quit, Cause::Quit));

    let (gone, gone_dir) = machine(folder.path(), Then::Shutdown);
    let vm = start(&gone, &gone_dir).await;
    let error = vm
        .reached(Milestone::Home, BOUND)
        .await
        .expect_err("it switches itself off");
    assert!(
        matches!(&error.why, Why::Exited(exit) if exit.cause == Cause::GuestShutdown),
        "{error}"
    );
    let never = vm
        .while_running("an answer", BOUND, std::future::pending::<()>())
        .await;
    assert!(matches!(never.expect_err("it is gone").why, Why::Exited(_)));
}

#[tokio::test]
async fn a_machine_stands_still_and_goes_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let (machine, run_dir) = machine(folder.path(), Then::PowerButton);
    let vm = start(&machine, &run_dir).await;
    vm.pause().await.expect("paused");
    assert_eq!(vm.qmp().status().await.expect("a status"), "paused");
    vm.resume().await.expect("resumed");
    assert_eq!(vm.qmp().status().await.expect("a status"), "running");
    vm.wait_for("its line", BOUND, |text| text == line(1))
        .await
        .expect("it speaks");
    // A shutdown resumes a paused machine, which has to react.
    vm.pause().await.expect("paused");
    let (shutdown, _) = vm.shutdown(BOUND).await.expect("shut down");
    assert_eq!(shutdown, Shutdown::Clean);
}

/// Every device at once, and ports that QEMU chose.
#[tokio::test]
async fn qemu_takes_all_that_the_builder_writes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut machine, _) = machine(&folder.path().join("a,b=c"), Then::Halt);
    let run_dir = RunDir::create(folder.path().join("a,b=c/guest")).expect("a run dir");
    let user = UserNetwork {
        restricted: true,
        forwards: vec![Forward::any(7835), Forward::any(7836)],
    };
    machine.cpus = 2;
    machine.nics = vec![
        Nic {
            mac: Mac::of_machine(0),
            link: Link::User(user),
        },
        Nic {
            mac: Mac::of_machine(1),
            link: Link::Unplugged,
        },
    ];
    machine.fw_cfg = vec![
        Item::bytes("opt/test/bytes", *b"").expect("a name"),
        Item::bytes("opt/test/more", vec![0; 1 << 20]).expect("a name"),
        Item::text("opt/test/text", "x,y=z").expect("a name"),
        Item::file("opt/test/file", run_dir.file("disk.img")).expect("a name"),
    ];
    for (index, cache) in [Cache::Unsafe, Cache::Writeback].into_iter().enumerate() {
        let path = run_dir.file(&format!("more,{index}"));
        std::fs::write(&path, vec![0; 1 << 20]).expect("a disk");
        machine.disks.push(Disk {
            cache,
            ..Disk::new(path, Format::Raw)
        });
    }
    machine.watchdog = WatchdogAction::Pause;
    machine.rtc = Rtc::From("2038-01-19T03:14:00".to_owned());
    let vm = start(&machine, &run_dir).await;
    vm.wait_for("its line", BOUND, |text| text == line(1))
        .await
        .expect("it speaks");

    let ports = [7835, 7836].map(|guest| vm.forwarded(guest).expect("a port"));
    assert_ne!(ports[0], ports[1]);
    assert_eq!(vm.forwarded(1), None);
    for port in ports {
        assert!(port.ip().is_loopback());
        TcpStream::connect(port).await.expect("QEMU listens");
    }
    let cpus = vm
        .qmp()
        .execute("query-cpus-fast", serde_json::Value::Null)
        .await
        .expect("CPUs");
    assert_eq!(cpus.as_array().map(Vec::len), Some(2));

    // The same port for another machine is refused before it starts.
    let mut other = machine.clone();
    let Link::User(user) = &mut other.nics[0].link else {
        panic!("it was a user network");
    };
    user.forwards[0].host = ports[0].port();
    let other_dir = RunDir::create(folder.path().join("other")).expect("a run dir");
    let error = Vm::start(&other, &other_dir, Lifetime::KillWithParent)
        .await
        .expect_err("taken");
    assert!(
        matches!(error, StartError::PortTaken { port, .. } if port == ports[0].port()),
        "{error}"
    );
}

#[tokio::test]
async fn what_a_guest_writes_is_in_the_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut machine, run_dir) = machine(folder.path(), Then::Halt);
    let disk = machine.disks[0].path.clone();
    let before = std::fs::read(&disk).expect("a disk");
    let path = folder.path().join("writes.log");
    std::fs::File::create(&path).expect("a log");
    machine.disks[0].log = Some(path.clone());
    let vm = start(&machine, &run_dir).await;
    vm.wait_for("its line", BOUND, |text| text == line(1))
        .await
        .expect("it speaks");
    // What the guest knows to be written is there, while QEMU still runs.
    let source = std::fs::File::open(&path).expect("a log");
    let log = Log::parse(&source, before.len() as u64).expect("a log");
    let writes: Vec<_> = log
        .entries()
        .iter()
        .filter(|entry| entry.changes())
        .collect();
    assert!(
        writes
            .iter()
            .all(|entry| entry.sector == 1 && entry.sectors == 1)
    );
    assert!(!writes.is_empty());
    vm.power_cut().await.expect("cut");

    let copy = folder.path().join("copy.img");
    std::fs::write(&copy, &before).expect("a copy");
    let file = std::fs::File::options().read(true).write(true).open(&copy);
    let mut replay = Replay::new(source, file.expect("the copy"));
    let (after, pick) = (log.promise_count(), Pick::All);
    replay.cut(&log, Cut { after, pick }).expect("replayed");
    assert_eq!(
        std::fs::read(&copy).expect("the copy"),
        std::fs::read(&disk).expect("the disk")
    );
    assert_ne!(std::fs::read(&copy).expect("the copy"), before);
}

#[tokio::test]
async fn what_qemu_does_not_like_is_told_in_its_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut machine, run_dir) = machine(folder.path(), Then::Halt);
    machine.disks[0].path = "/nonexistent/disk".into();
    let error = Vm::start(&machine, &run_dir, Lifetime::KillWithParent)
        .await
        .expect_err("no disk");
    assert!(matches!(error, StartError::Ended { .. }), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("/nonexistent/disk"), "{error}");
    assert!(error.contains("qemu.log"), "{error}");
}

#[tokio::test]
async fn a_disk_is_not_given_to_two_machines() {
    let folder = tempfile::tempdir().expect("a folder");
    let (machine, run_dir) = machine(folder.path(), Then::Halt);
    let vm = start(&machine, &run_dir).await;
    let other = RunDir::create(folder.path().join("other")).expect("a run dir");
    let error = Vm::start(&machine, &other, Lifetime::KillWithParent)
        .await
        .expect_err("the disk is taken");
    assert!(error.to_string().contains("lock"), "{error}");
    // When the drop returns, it is free.
    let pid = vm.pid();
    drop(vm);
    assert!(!runs(pid));
    start(&machine, &other).await;
}

/// The parent-death signal is bound to the thread that made the child. The machine must outlive the threads that
/// requested its start.
#[test]
fn a_machine_outlives_the_thread_that_asked_for_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let (machine, run_dir) = machine(folder.path(), Then::PowerButton);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let handle = runtime.handle().clone();
    let vm = std::thread::spawn(move || handle.block_on(start(&machine, &run_dir)))
        .join()
        .expect("no panic");
    runtime.block_on(async {
        vm.wait_for("its line", BOUND, |text| text == line(1))
            .await
            .expect("it still runs");
        let (shutdown, _) = vm.shutdown(BOUND).await.expect("shut down");
        assert_eq!(shutdown, Shutdown::Clean);
    });
}

#[tokio::test]
async fn the_script_starts_the_machine_by_hand() {
    let folder = tempfile::tempdir().expect("a folder");
    let (machine, run_dir) = machine(folder.path(), Then::Shutdown);
    let vm = start(&machine, &run_dir).await;
    vm.exited(BOUND).await.expect("it ends");
    let script = tokio::process::Command::new(run_dir.script())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .status();
    let status = tokio::time::timeout(BOUND, script)
        .await
        .expect("it ends")
        .expect("it starts");
    assert!(status.success(), "{status}");
    let log = std::fs::read_to_string(run_dir.serial_log()).expect("the log");
    assert!(log.contains("state 1") && log.contains("state 2"), "{log}");
}

/// Real firmware paints its console, and reports that a machine has no disk.
#[tokio::test]
async fn firmware_is_read_as_plain_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let run_dir = RunDir::create(folder.path()).expect("a run dir");
    let machine = Machine {
        memory_mib: 128,
        boot: Boot::Uefi(Firmware::locate().expect("the package ovmf")),
        ..Machine::new("uefi", Accel::Tcg)
    };
    let vm = start(&machine, &run_dir).await;
    let found = vm
        .wait_for("the firmware", 2 * BOUND, |text| {
            text.starts_with("BdsDxe: ")
        })
        .await
        .expect("the firmware speaks");
    assert!(!found.text.contains('\x1b'), "{found:?}");
    vm.power_cut().await.expect("cut");
    let raw = std::fs::read(run_dir.serial_log()).expect("the log");
    assert!(raw.contains(&0x1b), "it painted, or this shows nothing");
    assert!(run_dir.vars().exists());
}

/// The accelerator that the probe chooses must work.
#[tokio::test]
async fn the_chosen_accelerator_works() {
    let chosen = choose(Choice::Auto).expect("auto always chooses");
    let folder = tempfile::tempdir().expect("a folder");
    let (mut machine, run_dir) = machine(folder.path(), Then::Shutdown);
    machine.accel = chosen.accel;
    let vm = start(&machine, &run_dir).await;
    let exit = vm.exited(BOUND).await.expect("it ends");
    assert_eq!(exit.cause, Cause::GuestShutdown, "{chosen}");
}

#[tokio::test]
async fn a_tied_machine_cannot_be_left_running() {
    let folder = tempfile::tempdir().expect("a folder");
    let (machine, run_dir) = machine(folder.path(), Then::Halt);
    let vm = start(&machine, &run_dir).await;
    let pid = vm.pid();
    let error = vm.detach().expect_err("it is tied");
    assert!(
        error.to_string().contains("part of this process"),
        "{error}"
    );
    gone(pid).await;
}

/// The state of the TPM is kept like the disk, and its process ends with the machine, however that ends.
#[tokio::test]
async fn a_tpm_is_made_once_and_ends_with_its_machine() {
    let folder = tempfile::tempdir().expect("a folder");
    // Longer than a socket's address.
    let deep = folder.path().join("d".repeat(120));
    std::fs::create_dir(&deep).expect("a folder");
    let (mut machine, run_dir) = machine(&deep, Then::Shutdown);
    machine.tpm = Some(TpmInterface::Tis);
    let vm = start(&machine, &run_dir).await;
    vm.exited(BOUND).await.expect("it shuts down");
    assert!(!tpm::is_in_use(&run_dir).expect("looked"));
    let authority = run_dir.tpm().join("manufacturer/certificate.pem");
    let made = std::fs::read(&authority).expect("the manufacturer's certificate");
    drop(vm);

    let (mut machine, run_dir) = guest::machine(&deep, Then::Halt);
    machine.tpm = Some(TpmInterface::Crb);
    let vm = start(&machine, &run_dir).await;
    assert!(tpm::is_in_use(&run_dir).expect("looked"));
    vm.power_cut().await.expect("cut");
    assert!(!tpm::is_in_use(&run_dir).expect("looked"));
    let vm = start(&machine, &run_dir).await;
    assert!(tpm::is_in_use(&run_dir).expect("looked"));
    drop(vm);
    assert!(!tpm::is_in_use(&run_dir).expect("looked"));
    assert_eq!(std::fs::read(&authority).expect("kept"), made);
}
