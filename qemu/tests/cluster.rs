//! Machines that are kept: launched again, left running, attached to, and never left running by accident.

mod guest;
mod switch_program;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use hearth_qemu::accel::Accel;
use hearth_qemu::cluster::{
    Cluster, ClusterError, ClusterSpec, Image, Member, NetworkSpec, Place, attach, cut, cut_one,
    end_network, network, running,
};
use hearth_qemu::command::Machine;
use hearth_qemu::disk::Cache;
use hearth_qemu::network::{Forward, Link, Mac, Nic, UserNetwork};
use hearth_qemu::switch::NetworkOptions;
use hearth_qemu::vm::{Cause, Lifetime, Shutdown};

use guest::{BOUND, Then, gone, line, runs};
use switch_program::switch_program;

fn member(name: &str, number: u16, image: &Path) -> Member {
    let user = UserNetwork {
        restricted: true,
        forwards: vec![Forward::any(7835)],
    };
    let machine = Machine {
        memory_mib: 64,
        nics: vec![Nic {
            mac: Mac::of_machine(number),
            link: Link::User(user),
        }],
        ..Machine::new(name, Accel::Tcg)
    };
    Member {
        machine,
        image: image.to_owned(),
        disk_bytes: Some(8 << 20),
        cache: Cache::Writeback,
    }
}

/// A folder with an image in it, and a cluster of one or more machines.
fn spec(folder: &Path, machines: u16) -> ClusterSpec {
    let image = folder.join("guest.img");
    std::fs::write(&image, guest::image(Then::PowerButton)).expect("an image");
    ClusterSpec {
        state: folder.join("state"),
        network: None,
        members: (0..machines)
            .map(|number| member(&format!("node-{number}"), number, &image))
            .collect(),
        lifetime: Lifetime::KillWithParent,
    }
}

#[tokio::test]
async fn the_next_launch_boots_the_same_machines() {
    let folder = tempfile::tempdir().expect("a folder");
    let spec = spec(folder.path(), 2);
    let cluster = Cluster::launch(&spec).await.expect("launched");
    assert_eq!(cluster.images(), [Image::New, Image::New]);
    let ports = |cluster: &Cluster| -> Vec<_> {
        let machines = cluster.machines().iter();
        machines
            .map(|vm| vm.forwarded(7835).expect("a port"))
            .collect()
    };
    let first_ports = ports(&cluster);
    for vm in cluster.machines() {
        vm.wait_for("the first start", BOUND, |text| text == line(1))
            .await
            .expect("it speaks");
    }
    let error = Cluster::launch(&spec).await.expect_err("it runs already");
    assert!(matches!(error, ClusterError::InUse(_)), "{error}");
    for (shutdown, exit) in cluster.shutdown(BOUND).await.expect("shut down") {
        assert_eq!(
            (shutdown, exit.cause),
            (Shutdown::Clean, Cause::GuestShutdown)
        );
    }
    drop(cluster);

    // The image is rebuilt; the machines keep the old one.
    let next = folder.path().join("next.img");
    std::fs::write(&next, guest::image(Then::Halt)).expect("an image");
    std::fs::rename(next, folder.path().join("guest.img")).expect("replaced");
    let cluster = Cluster::launch(&spec).await.expect("launched");
    assert_eq!(cluster.images(), [Image::Older, Image::Older]);
    assert_eq!(ports(&cluster), first_ports);
    for vm in cluster.machines() {
        vm.wait_for("the second start", BOUND, |text| text == line(2))
            .await
            .expect("its disk is kept");
    }
    let pids: Vec<i32> = cluster.machines().iter().map(|vm| vm.pid()).collect();
    drop(cluster);
    assert!(pids.into_iter().all(|pid| !runs(pid)));

    Cluster::remove(&spec.state).expect("removed");
    assert!(!spec.state.join("node-0").exists());
    assert!(attach(&spec.state).await.expect("looked for").is_empty());
}

#[tokio::test]
async fn a_machine_that_fails_takes_the_others_with_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut spec = spec(folder.path(), 2);
    spec.members[1].image = folder.path().join("absent.img");
    Cluster::launch(&spec)
        .await
        .expect_err("the second has no image");
    let record = std::fs::read_to_string(spec.state.join("node-0/machine.json")).expect("a record");
    let record: serde_json::Value = serde_json::from_str(&record).expect("JSON");
    let pid = record["process"]["pid"]
        .as_i64()
        .expect("the first was started");
    assert!(!runs(i32::try_from(pid).expect("a pid")));
}

/// The example program, which launches a machine in `folder`.
fn hold(folder: &Path, words: &[&str]) -> (Child, i32) {
    let image = folder.join("guest.img");
    std::fs::write(&image, guest::image(Then::PowerButton)).expect("an image");
    let mut child = Command::new(example())
        .arg(folder.join("state"))
        .arg(image)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example starts");
    let mut said = String::new();
    BufReader::new(child.stdout.take().expect("piped"))
        .read_line(&mut said)
        .expect("it says where its machine is");
    let pid = said
        .split(' ')
        .next()
        .expect("a word")
        .parse()
        .expect("a process number");
    (child, pid)
}

/// Cargo builds the examples with the tests, beside the folder of the tests.
fn example() -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    let target = test
        .parent()
        .and_then(Path::parent)
        .expect("the target folder");
    let example = target.join("examples/hold");
    assert!(
        example.exists(),
        "not built: cargo build -p hearth-qemu --example hold"
    );
    example
}

#[tokio::test]
async fn a_launcher_that_is_killed_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut launcher, pid) = hold(folder.path(), &[]);
    assert!(runs(pid));
    // None of the launcher's code runs after this.
    launcher.kill().expect("killed");
    launcher.wait().expect("waited for");
    gone(pid).await;
    // And its folder is free.
    Cluster::remove(&folder.path().join("state")).expect("removed");
}

#[tokio::test]
async fn a_machine_left_running_is_found_and_shut_down() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    let (mut launcher, pid) = hold(folder.path(), &["detach"]);
    assert!(launcher.wait().expect("waited for").success());
    assert!(runs(pid), "it outlives its launcher");

    let seen = running(&state).expect("looked for");
    assert_eq!((seen.len(), seen[0].pid), (1, pid));

    let found = attach(&state).await.expect("attached");
    assert_eq!(found.len(), 1);
    let machine = &found[0];
    assert_eq!((machine.name(), machine.pid()), ("held", pid));
    assert_eq!(machine.qmp().status().await.expect("a status"), "running");
    assert!(machine.usage().expect("its usage").peak_rss > 0);
    assert_eq!(machine.forwards(), seen[0].forwards);
    let port = machine.forwarded(7835).expect("a port");
    tokio::net::TcpStream::connect(port)
        .await
        .expect("QEMU listens");
    let mut lines = machine.console().lines();
    let heard = tokio::time::timeout(BOUND, async {
        while let Some(said) = lines.next().await {
            if *said.text == *line(1) {
                return;
            }
        }
        panic!("the console ended");
    });
    heard.await.expect("it speaks");

    let image = folder.path().join("guest.img");
    let spec = ClusterSpec {
        state: state.clone(),
        network: None,
        members: vec![member("held", 0, &image)],
        lifetime: Lifetime::KillWithParent,
    };
    let error = Cluster::launch(&spec).await.expect_err("it runs already");
    assert!(
        matches!(&error, ClusterError::Running { pid: found, .. } if *found == pid),
        "{error}"
    );
    let error = Cluster::remove(&state).expect_err("it runs");
    assert!(matches!(error, ClusterError::Running { .. }), "{error}");

    assert_eq!(
        machine.shutdown(BOUND).await.expect("shut down"),
        Shutdown::Clean
    );
    gone(pid).await;
    assert!(attach(&state).await.expect("looked for").is_empty());
    // The next launch uses the same disk.
    let cluster = Cluster::launch(&spec).await.expect("launched");
    let vm = &cluster.machines()[0];
    vm.wait_for("the second start", BOUND, |text| text == line(2))
        .await
        .expect("its disk is kept");
}

#[tokio::test]
async fn a_machine_in_the_foreground_can_be_asked_from_elsewhere() {
    let folder = tempfile::tempdir().expect("a folder");
    let spec = spec(folder.path(), 1);
    let cluster = Cluster::launch(&spec).await.expect("launched");
    let vm = &cluster.machines()[0];
    vm.wait_for("the first start", BOUND, |text| text == line(1))
        .await
        .expect("it speaks");
    let found = attach(&spec.state).await.expect("attached");
    assert_eq!(found[0].pid(), vm.pid());
    assert_eq!(
        found[0].shutdown(BOUND).await.expect("shut down"),
        Shutdown::Clean
    );
    assert_eq!(
        vm.exited(BOUND).await.expect("it ends").cause,
        Cause::GuestShutdown
    );
}

#[tokio::test]
async fn plugs_are_pulled_whether_or_not_qemu_answers() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    assert!(cut(&state).await.expect("nothing there").is_empty());
    let (mut launcher, pid) = hold(folder.path(), &["detach"]);
    assert!(launcher.wait().expect("waited for").success());
    // The only slot for other clients is in use.
    let _held = attach(&state).await.expect("attached");
    let ended = cut(&state).await.expect("cut");
    assert_eq!((ended.len(), ended[0].pid), (1, pid));
    assert!(!runs(pid));
    assert!(running(&state).expect("looked for").is_empty());
}

/// The same machines, joined by a switch.
fn joined(folder: &Path, machines: u16, lifetime: Lifetime) -> ClusterSpec {
    let mut spec = spec(folder, machines);
    for member in &mut spec.members {
        member.machine.nics.clear();
    }
    let place = |number| Place {
        machine: format!("node-{number}"),
        number,
        forwards: vec![7835],
    };
    spec.network = Some(NetworkSpec {
        switch: switch_program(),
        options: NetworkOptions::default(),
        // One more than there are machines: it may be added later.
        places: (0..=machines).map(place).collect(),
    });
    spec.lifetime = lifetime;
    spec
}

#[tokio::test]
async fn a_network_comes_before_its_machines_and_goes_after_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let spec = joined(folder.path(), 1, Lifetime::KillWithParent);
    let network_spec = spec.network.as_ref();
    let cluster = Cluster::open(&spec.state, network_spec, spec.lifetime);
    let mut cluster = cluster.await.expect("opened");
    let place = cluster.add(&spec.members[0]).await.expect("started");
    let vm = &cluster.machines()[place];
    vm.wait_for("its word", BOUND, |text| text == line(1))
        .await
        .expect("it speaks");
    let error = cluster.add(&spec.members[0]).await.expect_err("it runs");
    assert!(matches!(error, ClusterError::Running { .. }), "{error}");

    let vm = cluster.machine("node-0").expect("started");
    assert_eq!(vm.forwarded(7835), cluster.forwarded("node-0", 7835));
    assert!(cluster.forwarded("node-1", 7835).is_some());
    let status = cluster.network().expect("a network").status().await;
    let status = status.expect("its status");
    let port = status.port("node-0").expect("a port");
    assert_eq!(Some(port.address), cluster.address("node-0"));
    assert!(port.connected);

    // Again, in the same slot and on the same port.
    vm.power_cut().await.expect("cut");
    let again = cluster.add(&spec.members[0]).await.expect("started again");
    assert_eq!(again, place);
    let vm = &cluster.machines()[again];
    assert_eq!(vm.forwarded(7835), cluster.forwarded("node-0", 7835));
    vm.wait_for("its word", BOUND, |text| text == line(2))
        .await
        .expect("it speaks again");
    let (machine, switch) = (vm.pid(), cluster.network().expect("a network").pid());
    drop(cluster);
    gone(machine).await;
    gone(switch).await;
    Cluster::remove(&spec.state).expect("removed");
    assert!(!spec.state.join("net").exists());
}

#[tokio::test]
async fn a_network_left_running_is_found_with_its_machines() {
    let folder = tempfile::tempdir().expect("a folder");
    let spec = joined(folder.path(), 2, Lifetime::Detachable);
    let state = &spec.state;
    let cluster = Cluster::launch(&spec).await.expect("launched");
    let switch = cluster.network().expect("a network").pid();
    cluster.detach().expect("left running");
    assert!(runs(switch));

    // One of them is cut and started again by another process.
    assert!(cut_one(state, "node-1").await.expect("cut"));
    assert!(!cut_one(state, "node-1").await.expect("looked"));
    let resumed = Cluster::resume(state, spec.network.as_ref(), Lifetime::Detachable);
    let mut resumed = resumed.await.expect("found");
    resumed.add(&spec.members[1]).await.expect("started again");
    resumed.detach().expect("left running");
    assert_eq!(running(state).expect("looked").len(), 2);
    let found = network(state).await.expect("looked").expect("it runs");
    assert_eq!(found.pid(), switch);

    cut(state).await.expect("cut");
    gone(switch).await;
    assert!(network(state).await.expect("looked").is_none());
    assert!(!end_network(state).await.expect("nothing to end"));
}
