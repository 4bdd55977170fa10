//! A program of a bundle, as a shell script.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use hearth_base::event;
use hearth_base::logtree::{Options, Query};
use hearth_base::testing::{TestSupervisor, until, within_timeout};
use tempfile::TempDir;

use super::*;
use crate::testing;

struct Scripted {
    directory: TempDir,
    program: Program,
    log: LogTree,
    progress: Arc<Writer<Progress>>,
}

/// A bundle whose scheduler is this script.
fn scripted(script: &str) -> Scripted {
    let directory = tempfile::tempdir().unwrap();
    let versions = "kubernetes 1.37.2\ncontainerd 2.4.2\n";
    fs::write(directory.path().join("VERSION"), versions).unwrap();
    let bin = directory.path().join("bin");
    fs::create_dir(&bin).unwrap();
    let file = bin.join(Binary::Scheduler.name());
    fs::write(&file, format!("#!/bin/sh\nPATH=/bin:/usr/bin\n{script}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    let bundle = Bundle::open(directory.path()).unwrap();
    let work = directory.path().join("work").join("scheduler");
    Scripted {
        program: Program::new(&bundle, Profile::usual(Binary::Scheduler), &work),
        directory,
        log: LogTree::new(Options::default()),
        progress: Arc::new(event::value().0),
    }
}

impl Scripted {
    /// It is ready once the script has created `ready` in its working directory, answers that it is
    /// unhealthy while there is `unwell`, and is outdated when there is `outdated`.
    fn run(&self) -> TestSupervisor {
        let (program, log) = (self.program.clone(), self.log.clone());
        let progress = self.progress.clone();
        TestSupervisor::run_restartable(move |ctx| {
            let (program, log) = (program.clone(), log.clone());
            let progress = progress.clone();
            async move {
                let there = |name: &str| program.directory.join(name).exists();
                let probe = || async {
                    if there("unwell") {
                        return Err(ProbeFailure::says("it misses others"));
                    }
                    let ready = there("ready").then_some(());
                    ready.ok_or_else(|| ProbeFailure::silent("not yet"))
                };
                let outdated = async {
                    while !there("outdated") {
                        sleep(Duration::from_millis(10)).await;
                    }
                    Ok("it was told something else")
                };
                run_until_outdated(&ctx, &program, &log, &progress, probe, outdated).await
            }
        })
    }

    fn make(&self, name: &str) {
        fs::write(self.program.directory.join(name), "").unwrap();
    }

    fn unmake(&self, name: &str) {
        fs::remove_file(self.program.directory.join(name)).unwrap();
    }

    /// Its process ID.
    fn pid(&self) -> String {
        fs::read_to_string(self.program.directory.join("pid")).unwrap()
    }

    fn made(&self, name: &str) -> bool {
        self.program.directory.join(name).exists()
    }

    async fn becomes(&self, wanted: impl Fn(&Progress) -> bool) {
        let mut progress = self.progress.value().watch();
        within_timeout("progress", progress.wait_for(wanted))
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_works_when_it_answers_and_ends_in_order() {
    let scripted = scripted(
        "trap 'touch ended; exit 0' TERM
         echo \"$#:$1:$HOME\" >arguments
         echo 'E1121 19:20:00.0 1 x.go:1] hello' >&2
         touch ready; while :; do sleep 0.02; done",
    );
    let scripted = Scripted {
        program: scripted.program.clone().flag("a", "b c"),
        ..scripted
    };
    let alone = scripted.run();
    alone.is_healthy().await;
    assert_eq!(scripted.progress.value().get(), Some(Progress::Serving));
    let arguments = fs::read_to_string(scripted.program.directory.join("arguments")).unwrap();
    assert_eq!(arguments, "1:--a=b c:\n", "nothing of our environment");
    let logged = || -> Vec<String> {
        let query = Query::subtree("root.worker.kube-scheduler");
        let entries = scripted.log.read(query).backlog;
        entries.iter().map(|e| e.message.to_string()).collect()
    };
    // What it printed before it was ready may still be in the pipe.
    within_timeout("the log", async {
        while logged().is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(logged(), ["hello"]);
    alone.stop().await;
    assert!(scripted.made("ended"));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_ends_says_why_and_starts_again() {
    let scripted = scripted(
        "if [ -e again ]; then touch ready; while :; do sleep 0.02; done; fi
         touch again
         echo 'F1121 19:20:00.0 1 x.go:1] no such thing' >&2; exit 3",
    );
    let alone = scripted.run();
    scripted
        .becomes(|p| matches!(p, Progress::Failing(why) if why.contains("no such thing")))
        .await;
    scripted.becomes(|p| *p == Progress::Serving).await;
    alone.is_healthy().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_never_works_is_given_up() {
    let mut scripted = scripted("exec sleep 1000");
    scripted.program.profile.health.silent_after = Duration::from_millis(200);
    scripted.program.profile.health.ready_within = Duration::from_millis(300);
    let alone = scripted.run();
    alone
        .fails("is not ready 300ms after its start: not yet")
        .await;
}

/// A restart would have to do the same work again.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_at_work_is_given_longer_to_start() {
    let mut scripted = scripted("while :; do :; done");
    scripted.program.profile.health.silent_after = Duration::from_secs(1);
    scripted.program.profile.health.ready_within = Duration::from_millis(300);
    scripted.program.profile.health.busy_after = Duration::from_secs(3);
    let alone = scripted.run();
    alone
        .fails("is not ready 3.3s after its start: not yet")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_ignores_the_request_is_killed_when_the_role_ends() {
    let mut scripted =
        scripted("trap '' TERM; echo $$ >pid; touch ready; while :; do sleep 0.02; done");
    scripted.program.profile.stop_within = Duration::from_millis(50);
    let alone = scripted.run();
    alone.is_healthy().await;
    let pid = fs::read_to_string(scripted.program.directory.join("pid")).unwrap();
    alone.stop().await;
    let process = PathBuf::from("/proc").join(pid.trim());
    until("the end of the process", || !process.exists()).await;
    drop(scripted.directory);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_was_told_something_else_ends_in_order_and_starts_again() {
    let scripted = scripted(
        "trap 'touch ended; rm outdated; exit 0' TERM
         echo $$ >pid; touch ready; while :; do sleep 0.02; done",
    );
    let alone = scripted.run();
    alone.is_healthy().await;
    let first = scripted.pid();
    scripted.make("outdated");
    until("another process", || scripted.pid() != first).await;
    assert!(scripted.made("ended"));
    scripted.becomes(|p| *p == Progress::Serving).await;
    alone.stop().await;
}

/// A program that depends on others has a longer limit for unhealthy than for no answer.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_misses_others_is_left_alone_until_it_is_silent() {
    let mut scripted = scripted("echo $$ >pid; touch ready; exec sleep 1000");
    scripted.program.profile.health.probe_every = Duration::from_millis(10);
    scripted.program.profile.health.silent_after = Duration::from_millis(200);
    let alone = scripted.run();
    alone.is_healthy().await;
    let first = scripted.pid();
    scripted.make("unwell");
    scripted
        .becomes(|p| *p == Progress::Failing("it misses others".into()))
        .await;
    sleep(3 * scripted.program.profile.health.silent_after).await;
    assert_eq!(scripted.pid(), first);
    scripted.unmake("unwell");
    scripted.becomes(|p| *p == Progress::Serving).await;
    scripted.unmake("ready");
    until("another process", || scripted.pid() != first).await;
    drop(alone);
}

/// An overloaded program is not restarted early: that would be additional load.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_silent_but_at_work_is_given_longer() {
    let mut scripted = scripted("touch ready; while :; do :; done");
    scripted.program.profile.health.probe_every = Duration::from_millis(10);
    scripted.program.profile.health.silent_after = Duration::from_millis(500);
    scripted.program.profile.health.busy_after = Duration::from_secs(3);
    let alone = scripted.run();
    alone.is_healthy().await;
    scripted.unmake("ready");
    let over =
        |p: &Progress| matches!(p, Progress::Failing(why) if why.contains("has been unhealthy"));
    let mut progress = scripted.progress.value().watch();
    let given_up = within_timeout("its end", progress.wait_for(over))
        .await
        .unwrap();
    let expected = "kube-scheduler has been unhealthy for 3s: not yet";
    assert_eq!(given_up, Progress::Failing(expected.into()));
    drop(alone);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_not_well_for_too_long_starts_again() {
    let mut scripted = scripted("echo $$ >pid; touch ready; while :; do sleep 0.02; done");
    scripted.program.profile.health.probe_every = Duration::from_millis(10);
    scripted.program.profile.health.unhealthy_after = Duration::from_millis(200);
    let alone = scripted.run();
    alone.is_healthy().await;
    let first = scripted.pid();
    scripted.make("unwell");
    scripted
        .becomes(
            |p| matches!(p, Progress::Failing(why) if why.contains("has been unhealthy for 200ms")),
        )
        .await;
    scripted.unmake("unwell");
    until("another process", || scripted.pid() != first).await;
    drop(alone);
}

/// A program that waits for servers does not slow down one that is starting.
#[tokio::test(flavor = "multi_thread")]
async fn one_without_servers_goes_after_everything_else() {
    if !nix::unistd::geteuid().is_root() {
        testing::skipped("this requires permission to raise the priority of a process");
        return;
    }
    let mut scripted = scripted("touch ready; while :; do nice >now; sleep 0.02; done");
    let (servers, ready) = event::value();
    scripted.program = scripted.program.clone().with_servers(ready);
    scripted.program.profile.niceness = 10;
    let alone = scripted.run();
    let now = || fs::read_to_string(scripted.program.directory.join("now")).unwrap_or_default();
    until("the last in the queue", || now() == "19\n").await;
    servers.set(0);
    alone.is_healthy().await;
    servers.set(1);
    until("its own place", || now() == "10\n").await;
    drop(alone);
}
