//! An encrypted member whose curators are down, and an owner at its port.

use hearth_api::identity::OwnerKey;
use hearth_api::recovery::console::ConsoleChallenge;
use hearth_api::recovery::{Challenge, RecoveryError, RecoveryKey};
use hearth_api::testing::{Script, TestCluster, TestCurator};
use hearth_api::tls::wall_clock;
use hearth_api::v1::node_unlock_client::NodeUnlockClient;
use hearth_api::v1::{ColdStartPolicy, StorageSecurity, TpmUsage};
use hearth_base::testing::{until, until_ok, within_timeout};
use hearth_sys::testing::Terminal;
use tonic::Code;
use tonic::transport::Channel;

use super::*;
use crate::driver::tests::{Boot, Machine};
use crate::machine::EnrolmentStatus;
use crate::sealed::tpm_tests::SealingMachine;
use crate::sealed::{Founding, Sealed, SealedStore};
use crate::testing::founding;

/// The seed of the owner key in [`founding`].
const OWNER: [u8; 32] = [1; 32];

fn owner() -> OwnerKey {
    OwnerKey::from_seed(OWNER)
}

/// The keys of a cluster, of which the node has wrapped one.
struct Keys {
    recovery: RecoveryKey,
    founding: Founding,
}

impl Keys {
    /// Of a node with this policy.
    fn of(policy: ColdStartPolicy) -> Self {
        let mut founding = Founding::clone(&founding(1, StorageSecurity::Encrypted));
        founding.identity.cold_start_policy = policy;
        let mut keys = Self {
            recovery: RecoveryKey::generate(),
            founding,
        };
        keys.wrap(&keys.founding.cluster_unlock_key.clone());
        keys
    }

    fn wrap(&mut self, key: &ClusterUnlockKey) {
        let recipient = Some(self.recovery.recipient());
        self.founding.recovery = self.founding.identity.recovery(recipient, key);
    }

    /// The answer of the owner.
    fn answer(&self, challenge: &Challenge) -> UnlockRequest {
        challenge.answered(&self.recovery, &owner()).unwrap()
    }
}

/// A curator that never answers JoinNode with a key.
async fn silent(cluster: &Arc<TestCluster>) -> TestCurator {
    TestCurator::start(cluster, Script::default(), wall_clock()).await
}

async fn connect(at: SocketAddr) -> NodeUnlockClient<Channel> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{at}")).unwrap();
    let channel = until_ok("the port opens", || endpoint.connect());
    NodeUnlockClient::new(channel.await)
}

async fn challenge(client: &mut NodeUnlockClient<Channel>) -> (Challenge, ClusterDirectory) {
    let response = client
        .get_unlock_challenge(GetUnlockChallengeRequest {})
        .await
        .unwrap()
        .into_inner();
    let challenge = Challenge::parse(&response.challenge.unwrap()).unwrap();
    (challenge, response.directory.unwrap_or_default())
}

/// The challenge that a node shows at this console to whoever presses Enter.
async fn shown(terminal: &mut Terminal) -> String {
    let hint = "press Enter here";
    until("the hint", || terminal.shown().unwrap().contains(hint)).await;
    terminal.enter("").unwrap();
    let whole = |shown: &str| shown.contains("hearth-challenge:") && shown.contains(';');
    until("the challenge", || whole(terminal.shown().unwrap())).await;
    terminal.shown().unwrap().to_owned()
}

/// Boots on until the data partition is open, or the node gives up; returns what it has reported.
async fn opened(boot: Boot) -> Vec<String> {
    let end = boot
        .until(|status| match status {
            // They were never made: the data partition is open.
            EnrolmentStatus::Refused(reason) => reason.contains("no credentials"),
            _ => false,
        })
        .await;
    let reports = boot.off().await;
    assert!(
        reports.contains(&"hearth: reached storage encrypted".to_owned()),
        "{end:?}: {reports:?}"
    );
    reports
}

/// Replaces the machine's sealed configuration with one that only another machine opens, or the owner.
fn seal_with_another_tpm(machine: &Machine, founding: &Founding, cluster: &TestCluster) {
    let other = SealingMachine::new();
    let member = founding.into_member(cluster.ca().clone());
    let store = SealedStore::new(&machine.root.esp, other.sealer());
    store.save(&Sealed::Member(Arc::new(member))).unwrap();
}

#[tokio::test]
async fn an_owner_opens_a_node_whose_curators_are_down() {
    let cluster = Arc::new(TestCluster::new());
    let curator = silent(&cluster).await;
    for policy in [ColdStartPolicy::Owner, ColdStartPolicy::Tpm] {
        let keys = Keys::of(policy);
        let machine = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
        let boot = machine.boot(Ok(None));
        let mut client = connect(machine.unlock_at).await;
        let (challenge, directory) = challenge(&mut client).await;
        assert_eq!(directory.nodes.len(), 1);
        client.unlock(keys.answer(&challenge)).await.unwrap();
        opened(boot).await;
        // It does not wait any more.
        let again = client.get_unlock_challenge(GetUnlockChallengeRequest {});
        assert!(within_timeout("closed", again).await.is_err());
    }
}

#[tokio::test]
async fn answers_that_are_not_the_owners_change_nothing() {
    let cluster = Arc::new(TestCluster::new());
    let curator = silent(&cluster).await;
    let keys = Keys::of(ColdStartPolicy::Owner);
    let machine = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
    let before = std::fs::read(machine.files.device_path()).unwrap();
    // The same disk in another machine: its answers are not accepted here.
    let other = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
    let (boot, other_boot) = (machine.boot(Ok(None)), other.boot(Ok(None)));
    let mut client = connect(machine.unlock_at).await;
    let (received, _) = challenge(&mut client).await;
    let (others, _) = challenge(&mut connect(other.unlock_at).await).await;

    let stranger = OwnerKey::generate();
    let refused = [
        received.answered(&keys.recovery, &stranger).unwrap(),
        keys.answer(&others),
        UnlockRequest::default(),
    ];
    for answer in refused {
        let status = client.unlock(answer).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    }
    assert_eq!(std::fs::read(machine.files.device_path()).unwrap(), before);
    // It still waits, with the same challenge.
    client.unlock(keys.answer(&received)).await.unwrap();
    opened(boot).await;
    other_boot.off().await;
}

#[tokio::test]
async fn a_key_that_does_not_open_the_disk_is_not_used() {
    let cluster = Arc::new(TestCluster::new());
    let curator = silent(&cluster).await;
    let mut keys = Keys::of(ColdStartPolicy::Owner);
    keys.wrap(&ClusterUnlockKey::generate());
    let machine = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
    let boot = machine.boot(Ok(None));
    let mut client = connect(machine.unlock_at).await;
    let (received, _) = challenge(&mut client).await;
    let status = client.unlock(keys.answer(&received)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert_eq!(challenge(&mut client).await.0, received, "it still waits");
    boot.off().await;
}

#[tokio::test]
async fn a_node_that_its_owner_may_not_open_presents_nothing() {
    let cluster = Arc::new(TestCluster::new());
    let curator = silent(&cluster).await;
    let keys = Keys::of(ColdStartPolicy::None);
    let machine = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
    let boot = machine.boot(Ok(None));
    let waits = boot.until(|status| matches!(status, EnrolmentStatus::Retrying { .. }));
    let EnrolmentStatus::Retrying { reason, .. } = waits.await else {
        panic!("it does not wait");
    };
    assert!(reason.contains("its cold-start policy is NONE"), "{reason}");
    let connected = std::net::TcpStream::connect(machine.unlock_at);
    assert!(connected.is_err(), "the port is open");
    boot.off().await;
}

#[tokio::test]
async fn a_curator_that_answers_first_closes_the_port() {
    let cluster = Arc::new(TestCluster::new());
    let keys = Keys::of(ColdStartPolicy::Owner);
    let script = Script {
        unlock_key: Some(keys.founding.cluster_unlock_key.clone()),
        ..Script::default()
    };
    let curator = TestCurator::start(&cluster, script, wall_clock()).await;
    let machine = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
    opened(machine.boot(Ok(None))).await;
    assert!(std::net::TcpStream::connect(machine.unlock_at).is_err());
}

#[tokio::test]
async fn the_recovery_key_alone_opens_a_node_at_its_console() {
    let cluster = Arc::new(TestCluster::new());
    let curator = silent(&cluster).await;
    let keys = Keys::of(ColdStartPolicy::Owner);
    let mut machine = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
    let mut terminal = Terminal::new().unwrap();
    machine.console = terminal.device().to_owned();
    let boot = machine.boot(Ok(None));

    let challenge = ConsoleChallenge::parse(&shown(&mut terminal).await).unwrap();
    assert_eq!(
        challenge.answered(&RecoveryKey::generate()),
        Err(RecoveryError::Wrapped)
    );
    // What is no answer is said, and the same challenge stays open.
    for (entered, refusal) in [("open sesame", "not Base64"), ("AAAA", "3 bytes")] {
        terminal.enter(entered).unwrap();
        until(refusal, || terminal.shown().unwrap().contains(refusal)).await;
    }
    let answer = challenge.answered(&keys.recovery).unwrap();
    terminal.enter(&answer).unwrap();
    opened(boot).await;
    let accepted = "The answer was accepted";
    until(accepted, || terminal.shown().unwrap().contains(accepted)).await;
}

#[tokio::test]
async fn a_key_from_the_console_that_does_not_open_the_disk_is_not_used() {
    let cluster = Arc::new(TestCluster::new());
    let curator = silent(&cluster).await;
    let mut keys = Keys::of(ColdStartPolicy::Owner);
    keys.wrap(&ClusterUnlockKey::generate());
    let mut machine = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
    let mut terminal = Terminal::new().unwrap();
    machine.console = terminal.device().to_owned();
    let boot = machine.boot(Ok(None));
    let challenge = ConsoleChallenge::parse(&shown(&mut terminal).await).unwrap();
    terminal
        .enter(&challenge.answered(&keys.recovery).unwrap())
        .unwrap();
    let refusal = "does not open the data partition";
    until(refusal, || terminal.shown().unwrap().contains(refusal)).await;
    boot.off().await;
}

/// The node's board was replaced, and its TPM with it.
#[tokio::test]
async fn the_owner_opens_the_sealed_configuration_of_a_lost_tpm_at_the_console() {
    let cluster = Arc::new(TestCluster::new());
    let curator = silent(&cluster).await;
    let mut keys = Keys::of(ColdStartPolicy::Tpm);
    let mut machine = Machine::of_member(&keys.founding, cluster.ca(), &[&curator]);
    keys.founding.identity.tpm_usage = TpmUsage::PresentAndUsed;
    let mut terminal = Terminal::new().unwrap();
    machine.console = terminal.device().to_owned();
    seal_with_another_tpm(&machine, &keys.founding, &cluster);

    let boot = machine.boot(Ok(None));
    let refused = boot.until(|status| matches!(status, EnrolmentStatus::Refused(_)));
    let EnrolmentStatus::Refused(reason) = refused.await else {
        unreachable!();
    };
    assert!(
        reason.contains("at its console with the recovery key"),
        "{reason}"
    );
    let challenge = ConsoleChallenge::parse(&shown(&mut terminal).await).unwrap();
    terminal
        .enter(&challenge.answered(&keys.recovery).unwrap())
        .unwrap();
    // With both halves of the key in it, nobody else is asked.
    opened(boot).await;
}
