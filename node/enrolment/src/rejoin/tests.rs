//! A running member, and a real curator that knows it, has lost it, or has removed it.

use std::fs;
use std::sync::Mutex;

use hearth_api::identity::{OwnerKey, PublicKey};
use hearth_api::ownership::Replacement;
use hearth_api::recovery::RecoveryKey;
use hearth_api::testing::{Script, TestCluster, TestCurator};
use hearth_api::tls::wall_clock;
use hearth_api::v1::StorageSecurity;
use hearth_base::supervisor::{Options, Supervisor, runnable};
use hearth_base::testing::{assert_never, until, within_timeout};

use super::*;
use crate::driver::tests::Machine;
use crate::registering_tests::{Home, member};
use crate::sealed::Founding;
use crate::testing::founding;

/// A member after the hand-over.
struct Node {
    machine: Machine,
    key: PublicKey,
    handed_over: MemberData,
    sealed: Arc<SealedStore>,
}

impl Node {
    async fn new(home: &mut Home) -> Self {
        let (machine, key) = member(home).await;
        let boot = machine.boot(Ok(None));
        let handed_over = boot.settled().await;
        boot.off().await;
        let data = &machine.root.data;
        fs::write(data.node().roles(), "roles").unwrap();
        fs::write(data.etcd().peer().key(), "key").unwrap();
        Self {
            sealed: Arc::new(SealedStore::new(&machine.root.esp, None)),
            machine,
            key,
            handed_over,
        }
    }

    fn start(&self) -> Running {
        let (member_writer, member) = event::value();
        let (refusals_writer, refusals) = event::value();
        let (settings_writer, unlock_settings) = event::value();
        let (recorded_writer, recorded) = event::value();
        let (disowned_writer, disowned) = event::value();
        let reports = Arc::new(Mutex::new(Vec::new()));
        let power = Power::default();
        let parts = Arc::new(Parts {
            root: self.machine.root.clone(),
            sealed: self.sealed.clone(),
            saved_directory: Arc::new(DirectoryStore::new(&self.machine.root.esp)),
            asker: Arc::new(CuratorCaller::new(wall_clock(), "boot".into(), None)),
            report: {
                let reports = reports.clone();
                Arc::new(move |report| reports.lock().unwrap().push(report.to_string()))
            },
            power: power.clone(),
            at_most_every: Duration::from_millis(20),
            member,
            refusals,
            unlock_settings,
            recorded: recorded_writer,
            disowned: disowned_writer,
        });
        member_writer.set(self.handed_over.clone());
        let top = runnable(move |ctx: Context| {
            let parts = parts.clone();
            async move {
                ctx.run("rejoin", move |ctx| run(ctx, parts.clone()))?;
                ctx.healthy();
                ctx.cancelled().await;
                Ok(())
            }
        });
        Running {
            supervisor: Supervisor::start(top, Options::default()),
            _member: member_writer,
            refusals: refusals_writer,
            settings: settings_writer,
            recorded,
            disowned,
            reports,
            power,
        }
    }

    /// The keys and roles are wiped. What etcd may have open is left to the control plane.
    fn is_wiped(&self) -> bool {
        let data = &self.machine.root.data;
        let gone = !data.node().credentials().key().exists()
            && !data.node().roles().exists()
            && !data.etcd().peer().key().exists();
        gone && matches!(self.machine.sealed(), Sealed::Disowned(_))
    }

    fn is_whole(&self) -> bool {
        let data = &self.machine.root.data;
        data.node().credentials().key().exists()
            && data.node().roles().exists()
            && data.etcd().peer().key().exists()
            && matches!(self.machine.sealed(), Sealed::Member(_))
    }
}

struct Running {
    supervisor: Supervisor,
    _member: event::Writer<MemberData>,
    refusals: event::Writer<Refusals>,
    settings: event::Writer<UnlockSettingsDigest>,
    recorded: event::Value<UnlockSettings>,
    disowned: event::Value<Disowned>,
    reports: Arc<Mutex<Vec<String>>>,
    power: Power,
}

impl Running {
    async fn disowned(&self) {
        within_timeout("disowned", self.disowned.watch().next())
            .await
            .unwrap();
    }

    /// Asserts that it keeps running after a refusal.
    async fn stays(&self) {
        for refusals in 1..10 {
            self.refusals.set(refusals);
            let disowned = tokio::time::timeout(Duration::from_millis(50), async {
                self.disowned.watch().next().await
            });
            assert!(disowned.await.is_err(), "disowned without an order");
        }
    }
}

#[tokio::test]
async fn a_member_that_runs_obeys_an_order() {
    let mut home = Home::new().await;
    let node = Node::new(&mut home).await;
    let running = node.start();
    running.stays().await;
    assert!(node.is_whole());

    home.delete(node.key).await;
    running.refusals.set(100);
    running.disowned().await;
    assert!(node.is_wiped(), "before it is published");
    let reports = running.reports.lock().unwrap().clone();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(
        reports[0].starts_with("hearth: waiting for new parameters: cluster "),
        "{reports:?}"
    );
    running.supervisor.shutdown().await;
    home.world.stop().await;
}

/// The ESP takes no writes: the node remains what it is, says why, and tries until the keys are wiped.
#[tokio::test]
async fn keys_that_cannot_be_wiped_are_wiped_once_they_can() {
    let mut home = Home::new().await;
    let node = Node::new(&mut home).await;
    let [a, _] = node.machine.root.esp.sealed_configuration().paths();
    let kept = fs::read(&a).unwrap();
    fs::remove_file(&a).unwrap();
    fs::create_dir(&a).unwrap();
    home.delete(node.key).await;
    let running = node.start();
    let told = async {
        while running.reports.lock().unwrap().len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    within_timeout("two reports", told).await;
    for report in running.reports.lock().unwrap().iter() {
        assert!(report.contains("keys cannot be wiped"), "{report}");
    }
    assert!(running.disowned.get().is_none());
    assert!(node.machine.root.data.node().credentials().key().exists());
    fs::remove_dir(&a).unwrap();
    fs::write(&a, kept).unwrap();
    running.disowned().await;
    assert!(node.is_wiped());
    running.supervisor.shutdown().await;
    home.world.stop().await;
}

/// A member that was removed while it was away, with an INSECURE disk, and that is up before any
/// curator could tell it.
#[tokio::test]
async fn a_member_asks_once_without_being_refused() {
    let mut home = Home::new().await;
    let node = Node::new(&mut home).await;
    home.delete(node.key).await;
    let running = node.start();
    running.disowned().await;
    assert!(node.is_wiped());
    running.supervisor.shutdown().await;
    home.world.stop().await;
}

#[tokio::test]
async fn unknown_wipes_nothing() {
    let mut home = Home::new().await;
    let node = Node::new(&mut home).await;
    home.world.delete_node(node.handed_over.own.node()).await;
    let running = node.start();
    running.stays().await;
    assert!(node.is_whole());
    assert!(running.reports.lock().unwrap().is_empty());
    running.supervisor.shutdown().await;
    home.world.stop().await;
}

/// A node whose sealed configuration has no keys any more, with everything else as it was. Its cluster is gone.
async fn half_disowned(afterwards: AfterRemoval) -> Node {
    let mut home = Home::new().await;
    let node = Node::new(&mut home).await;
    home.world.stop().await;
    let Sealed::Member(member) = node.machine.sealed() else {
        panic!("{:?}", node.machine.sealed());
    };
    disowning::seal(&node.sealed, member.into_disowned(afterwards)).unwrap();
    assert!(!node.is_wiped());
    node
}

/// The keys are wiped, and the power fails before the rest is.
#[tokio::test]
async fn what_is_half_disowned_is_completed_without_the_cluster() {
    let node = half_disowned(AfterRemoval::Wait).await;
    let running = node.start();
    running.disowned().await;
    assert!(node.is_wiped());
    running.supervisor.shutdown().await;
}

/// What cannot be destroyed while it is in use, the next boot destroys.
#[tokio::test]
async fn a_node_that_is_reset_wipes_its_keys_and_restarts() {
    let node = half_disowned(AfterRemoval::Reset).await;
    let running = node.start();
    let asked = within_timeout("a restart", running.power.asked()).await;
    assert_eq!(asked, PowerRequest::Reboot);
    assert!(node.is_wiped());
    running.supervisor.shutdown().await;
}

/// A member of a cluster of which nothing but the answers of one curator exists.
fn scripted(founding: &Founding, cluster: &TestCluster, curator: &TestCurator) -> Node {
    let machine = Machine::of_member(founding, cluster.ca(), &[curator]);
    let credentials = cluster.node();
    Node {
        key: credentials.key.public(),
        handed_over: MemberData {
            own: hearth_api::testing::own(&credentials),
            directory: ClusterDirectory::default(),
            uses_tpm: false,
        },
        sealed: Arc::new(SealedStore::new(&machine.root.esp, None)),
        machine,
    }
}

/// A node that needs no key from others is up before the cluster admits its boot.
#[tokio::test]
async fn a_member_asks_until_its_boot_is_admitted() {
    let cluster = Arc::new(TestCluster::new());
    let founding = founding(1, StorageSecurity::Insecure);
    let script = Script {
        ask_again: Some(Duration::from_millis(100)),
        unlock_key: Some(founding.cluster_unlock_key.clone()),
        ..Script::default()
    };
    let curator = TestCurator::start(&cluster, script, wall_clock()).await;
    let node = scripted(&founding, &cluster, &curator);
    let running = node.start();
    let asked = curator.until(|seen| seen.calls.len() >= 20);
    within_timeout("20 attempts", asked).await;
    curator.set_ask_again(None);
    let last = curator.calls().len() + 2;
    assert_never("it asked again", async {
        until("more calls", || curator.calls().len() > last).await;
    })
    .await;
    assert!(running.reports.lock().unwrap().is_empty());
    running.supervisor.shutdown().await;
}

#[tokio::test]
async fn a_running_member_follows_the_settings_of_its_cluster() {
    let founding = founding(1, StorageSecurity::Encrypted);
    let (curator, node) = admitted(&founding).await;
    let running = node.start();
    let recorded = || match node.machine.sealed() {
        Sealed::Member(member) => member,
        other => panic!("{other:?}"),
    };
    // What the cluster says from now on is recorded, and reported.
    let follows = async |settings: UnlockSettings| {
        curator.set_unlock_settings(&settings);
        running.settings.set(settings.digest());
        until("the settings are recorded", || {
            recorded().unlock_settings() == settings
                && running.recorded.get().as_ref() == Some(&settings)
        })
        .await;
        assert!(recorded().cluster_unlock_key.is_none(), "it has no TPM");
    };
    let first = owner(1);
    let mut settings = recorded().unlock_settings();
    assert_eq!(settings.owner, Some(first.public()));
    for policy in [
        ColdStartPolicy::Owner,
        ColdStartPolicy::Tpm,
        ColdStartPolicy::None,
    ] {
        settings.cold_start_policy = policy;
        follows(settings).await;
    }

    // Two owners later.
    let (mut former, cluster_id) = (first, founding.identity.cluster_id);
    let recovery = RecoveryKey::generate();
    for number in 2..=3 {
        let next = owner(number);
        let recipient = recovery.recipient();
        curator.replace_owner(Replacement::sign(cluster_id, &former, &next, recipient));
        former = next;
    }
    settings.owner = Some(former.public());
    settings.recovery_recipient = Some(recovery.recipient());
    follows(settings).await;
    let member = recorded();
    let wrapped = &member.recovery.as_ref().unwrap().wrapped_key;
    let opened = recovery.open(&member.identity.wrapped_for(), wrapped);
    assert_eq!(opened.as_ref(), Ok(&founding.cluster_unlock_key));

    // What it has recorded already is not asked for again.
    let asked = curator.calls().len();
    running.settings.set(settings.digest());
    assert_never("it asked again", async {
        until("another call", || curator.calls().len() > asked).await;
    })
    .await;

    // Nobody else makes an owner, and nobody else a recovery recipient.
    let false_settings = UnlockSettings {
        owner: Some(owner(9).public()),
        recovery_recipient: Some(RecoveryKey::generate().recipient()),
        cold_start_policy: ColdStartPolicy::Owner,
    };
    curator.set_unlock_settings(&false_settings);
    running.settings.set(false_settings.digest());
    settings.cold_start_policy = ColdStartPolicy::Owner;
    until("the policy is recorded", || {
        recorded().unlock_settings() == settings
    })
    .await;
    running.supervisor.shutdown().await;
}

#[tokio::test]
async fn a_node_without_a_key_follows_the_owner_only() {
    let founding = founding(1, StorageSecurity::Insecure);
    let (curator, node) = admitted(&founding).await;
    let running = node.start();
    let recipient = RecoveryKey::generate().recipient();
    let cluster_id = founding.identity.cluster_id;
    curator.replace_owner(Replacement::sign(
        cluster_id,
        &owner(1),
        &owner(2),
        recipient,
    ));
    running.settings.set(1);
    let reported = UnlockSettings {
        cold_start_policy: ColdStartPolicy::Unspecified,
        recovery_recipient: None,
        owner: Some(owner(2).public()),
    };
    until("the owner is recorded", || {
        running.recorded.get().as_ref() == Some(&reported)
    })
    .await;
    running.supervisor.shutdown().await;
}

/// This node, and a curator that admits it.
async fn admitted(founding: &Founding) -> (TestCurator, Node) {
    let cluster = Arc::new(TestCluster::new());
    let script = Script {
        unlock_key: Some(founding.cluster_unlock_key.clone()),
        ..Script::default()
    };
    let curator = TestCurator::start(&cluster, script, wall_clock()).await;
    let node = scripted(founding, &cluster, &curator);
    (curator, node)
}

/// The owner of [`founding`] has number 1.
fn owner(number: u8) -> OwnerKey {
    OwnerKey::from_seed([number; 32])
}
