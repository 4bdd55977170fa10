//! The supervisors of the roles, with values that the test sets.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use hearth_api::testing::{Script, TestCluster};
use hearth_api::v1::ClusterDirectory;
use hearth_api::v1::node_roles::{KubernetesController, KubernetesWorker};
use hearth_base::testing::{TestSupervisor, assert_never, fixed, until, within_timeout};
use hearth_consensus::testing::Site;
use hearth_host::bundle::Binary;
use hearth_host::cluster_state;
use tempfile::TempDir;

use super::*;

/// A node that is a member, with the writers of its inputs.
pub(super) struct Fake {
    _directory: TempDir,
    pub parts: Arc<Worker>,
    pub roles: Writer<NodeRoles>,
    pub state: cluster_state::Writer,
    pub consensus: Writer<Option<hearth_consensus::Handle>>,
    pub address: Writer<IpAddr>,
    pub connection: Writer<CuratorConnection>,
    conditions: Value<Vec<NodeCondition>>,
    // Values that are not set in these tests.
    _others: Box<dyn std::any::Any + Send>,
}

/// A bundle without programs, of the current version.
pub(super) fn with_bundle(directory: &TempDir) -> Extensions {
    let bundle = directory.path().join("bundle");
    fs::create_dir(&bundle).unwrap();
    let versions = "kubernetes 1.37.2\ncontainerd 2.4.2\n";
    fs::write(bundle.join("VERSION"), versions).unwrap();
    Extensions::none().with(names::EXTENSION_KUBERNETES, bundle)
}

/// A bundle whose programs are this script.
fn with_script(directory: &TempDir, script: &str) -> Extensions {
    let extensions = with_bundle(directory);
    let programs = directory.path().join("bundle/bin");
    fs::create_dir(&programs).unwrap();
    let script = format!("#!/bin/sh\nPATH=/bin:/usr/bin\n{script}\n");
    for binary in Binary::ALL {
        let file = programs.join(binary.name());
        fs::write(&file, &script).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    extensions
}

impl Fake {
    pub(crate) fn new(extensions: impl FnOnce(&TempDir) -> Extensions) -> Self {
        Self::by(CertificateClock::of_this_machine(), extensions)
    }

    /// With this clock for the renewal of certificates.
    pub(crate) fn by(
        calendar: CertificateClock,
        extensions: impl FnOnce(&TempDir) -> Extensions,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let extensions = Arc::new(extensions(&directory));
        let root = Root::under(&directory.path().join("node"));
        for part in [root.data.node().path(), root.ephemeral.path()] {
            fs::create_dir_all(part).unwrap();
        }
        let cluster = TestCluster::new();
        let credentials = cluster.node();
        let (member_writer, member) = event::value();
        member_writer.set(MemberData {
            own: hearth_api::testing::own(&credentials),
            directory: ClusterDirectory::default(),
            uses_tpm: false,
        });
        let (state, cluster_state) = cluster_state::new();
        state.set(State::Home).unwrap();
        let (roles, local_roles) = event::value();
        let (consensus_writer, consensus) = event::value();
        let (address, addresses) = event::value();
        let (second_writer, second_address) = event::value();
        let (conditions_writer, conditions) = event::value();
        let (connection_writer, connection) = event::value();
        let (view_writer, view) = event::value();
        view_writer.set(Arc::new(View::default()));
        let (learned_writer, learned) = event::value();
        let (network_writer, pod_network) = event::value();
        let (may_have_pods, _) = event::value();
        let (network_policy, _) = event::value();
        let others = (
            member_writer,
            view_writer,
            learned_writer,
            network_writer,
            second_writer,
        );
        Self {
            _directory: directory,
            parts: Arc::new(Worker {
                control_plane_user: None,
                root,
                log_tree: LogTree::new(hearth_base::logtree::Options::default()),
                calendar,
                extensions,
                cluster_state,
                member,
                connection,
                consensus,
                local_roles,
                node_settings: fixed(Arc::default()),
                view,
                learned,
                address: addresses,
                second_address,
                pod_network,
                machine: worker::MachineLock::default(),
                may_have_pods,
                network_policy,
                settings: event::value().0,
                conditions: conditions_writer,
            }),
            roles,
            state,
            consensus: consensus_writer,
            address,
            connection: connection_writer,
            conditions,
            _others: Box::new(others),
        }
    }

    pub(crate) fn run(&self) -> TestSupervisor {
        let parts = self.parts.clone();
        TestSupervisor::run(move |ctx| run(ctx, parts.clone()))
    }

    /// Waits until the node has these conditions (type and reason).
    async fn tells(&self, wanted: &[(&str, &str)]) {
        let mut conditions = self.conditions.watch();
        let told = conditions.wait_for(|conditions| {
            let now = conditions.iter();
            let now = now.map(|c| (&c.r#type[..], &c.reason[..]));
            now.eq(wanted.iter().copied())
        });
        within_timeout(&format!("{wanted:?}"), told).await.unwrap();
    }
}

fn controller() -> NodeRoles {
    NodeRoles {
        kubernetes_controller: Some(KubernetesController {}),
        ..NodeRoles::default()
    }
}

fn both() -> NodeRoles {
    NodeRoles {
        kubernetes_worker: Some(KubernetesWorker {}),
        ..controller()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_without_its_extension_is_held_and_not_met() {
    let fake = Fake::new(|_| Extensions::none());
    let alone = fake.run();
    fake.roles.set(NodeRoles::default());
    fake.tells(&[]).await;
    fake.roles.set(both());
    fake.tells(&[
        ("KubernetesController", "NotInstalled"),
        ("KubernetesWorker", "NotInstalled"),
    ])
    .await;
    fake.roles.set(NodeRoles::default());
    fake.tells(&[]).await;
    alone.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_kubernetes_cannot_use_is_a_reason() {
    let fake = Fake::new(with_bundle);
    fake.parts.settings.set(Arc::default());
    let alone = fake.run();
    fake.roles.set(controller());
    for (address, reason) in [
        ("10.208.7.7", "AddressInRanges"),
        ("10.224.0.9", "AddressInRanges"),
        ("2001:db8::7", "NoIpv4Address"),
    ] {
        fake.address.set(address.parse().unwrap());
        fake.tells(&[("KubernetesController", reason)]).await;
    }
    fake.address.set("192.0.2.7".parse().unwrap());
    let mut conditions = fake.conditions.watch();
    let goes_on = conditions.wait_for(|all| all.iter().all(|it| it.reason != "NoIpv4Address"));
    within_timeout("the role goes on", goes_on).await.unwrap();
    alone.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_extension_that_is_refused_or_none_of_ours_says_so() {
    let refused = |_: &TempDir| {
        Extensions::none().with_refused(names::EXTENSION_KUBERNETES, "its root hash differs")
    };
    let empty = |directory: &TempDir| {
        Extensions::none().with(
            names::EXTENSION_KUBERNETES,
            directory.path().join("nothing"),
        )
    };
    let fakes = [Fake::new(refused), Fake::new(empty)];
    for fake in fakes {
        let alone = fake.run();
        fake.roles.set(controller());
        fake.tells(&[("KubernetesController", "ExtensionRefused")])
            .await;
        alone.stop().await;
    }
}

/// However quickly roles are assigned and removed, the last change counts, and a removed role is
/// cleaned up.
#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_is_added_removed_and_added_within_a_second_is_held() {
    let fake = Fake::new(with_bundle);
    let alone = fake.run();
    let waits = [("KubernetesController", "WaitingForConsensus")];
    let made = fake.parts.root.ephemeral.kubernetes().controller();
    for round in 0..5 {
        fake.roles.set(controller());
        let starts = round % 2 == 0;
        if starts {
            // Removed while it is starting.
            fake.tells(&waits).await;
            fs::create_dir_all(made.path()).unwrap();
        }
        fake.roles.set(NodeRoles::default());
        fake.roles.set(controller());
        fake.roles.set(NodeRoles::default());
        fake.tells(&[]).await;
        assert!(!(starts && made.path().exists()));
    }
    fake.roles.set(controller());
    fake.tells(&waits).await;
    alone.stop().await;
}

/// A role that is assigned again before the removal was noticed.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_role_has_left_is_cleared_before_it_is_served_again() {
    let fake = Fake::new(with_bundle);
    let (writer, condition) = event::value();
    let gate = Arc::new(RoleSupervisor {
        role: Role::Controller,
        parts: fake.parts.clone(),
        condition: Arc::new(writer),
        address_status: Arc::new(event::value().0),
        manifests_status: Arc::new(event::value().0),
        server_hosts: event::value().1,
        recovery_recipient: event::value().1,
        lost: AtomicBool::new(false),
    });
    let serves = async || {
        let mut standings = condition.watch();
        let waits = |condition: &RoleCondition| matches!(condition, RoleCondition::Unmet { reason, .. } if *reason == "WaitingForConsensus");
        within_timeout("it is served", standings.wait_for(waits))
            .await
            .unwrap();
    };
    let left = fake.parts.root.ephemeral.kubernetes().controller();
    let left = left.path().join("left");

    fake.roles.set(controller());
    let (ended, end) = event::value();
    let (passed, ended) = (gate.clone(), Arc::new(ended));
    let once = TestSupervisor::run(move |ctx| {
        let (gate, ended) = (passed.clone(), ended.clone());
        async move {
            ended.set(
                pass(ctx.clone(), gate)
                    .await
                    .map_err(|error| error.to_string()),
            );
            ctx.cancelled().await;
            Ok(())
        }
    });
    serves().await;
    fs::create_dir_all(&left).unwrap();
    fake.roles.set(NodeRoles::default());
    let end = within_timeout("it ends", end.watch().next()).await.unwrap();
    let expected = Exit::restart("role Kubernetes controller has been removed");
    assert_eq!(end, Ok(expected));
    once.stop().await;
    assert!(left.exists());

    fake.roles.set(controller());
    gate.condition.set(RoleCondition::NotHeld);
    let again = TestSupervisor::run_restartable(move |ctx| pass(ctx, gate.clone()));
    serves().await;
    assert!(!left.exists());
    again.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_disowned_runs_nothing_whatever_its_roles() {
    let fake = Fake::new(with_bundle);
    let alone = fake.run();
    fake.roles.set(controller());
    fake.tells(&[("KubernetesController", "WaitingForConsensus")])
        .await;
    fake.state.set(State::Disowning).unwrap();
    fake.tells(&[]).await;
    alone.stop().await;
}

/// A node that is SPLIT gets no changes, and keeps running its roles.
#[tokio::test(flavor = "multi_thread")]
async fn programs_go_on_in_split() {
    let site = Site::new();
    site.state.0.set(State::Home).unwrap();
    let etcd = site.start(true).await;
    let script = "echo $$ >>pids; while :; do sleep 0.02; done";
    let fake = Fake::new(|directory| with_script(directory, script));
    fake.address.set(Ipv4Addr::LOCALHOST.into());
    fake.consensus.set(Some(etcd.handle().handle()));
    let curator = hearth_agent::testing::Fake::new(Script::default()).await;
    fake.connection.set(curator.connection());
    let alone = fake.run();
    fake.roles.set(controller());
    // The script of the API server. Its probe is never answered, so it stays starting.
    let pids = fake.parts.root.ephemeral.kubernetes().store().join("pids");
    let pids = || fs::read_to_string(&pids).unwrap_or_default();
    until("a process", || pids().ends_with('\n')).await;
    let first = pids();
    let process = Path::new("/proc").join(first.trim());
    let runs = || process.exists() && pids() == first;
    let starts = ("KubernetesController", "Starting");
    fake.tells(&[starts]).await;

    for state in [State::Split, State::Home] {
        for writer in [&site.state.0, &fake.state] {
            writer.set(state).unwrap();
        }
        assert_never("it ends or another is started", until("", || !runs())).await;
        fake.tells(&[starts]).await;
    }
    // It would have been stopped by now.
    fake.state.set(State::Disowning).unwrap();
    until("its end", || !process.exists()).await;
    alone.stop().await;
    etcd.stop().await;
}

#[test]
fn what_a_program_said_fits_into_a_condition() {
    let said = format!("two\nlines\x1b[2J{}", "ä".repeat(names::LONGEST_CONDITION));
    let told = names::conditions::printable(&said);
    assert!(told.len() <= names::LONGEST_CONDITION && told.starts_with("two lines [2Jää"));
    assert!(!told.chars().any(char::is_control));
}
