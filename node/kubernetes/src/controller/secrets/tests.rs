//! Controllers that share keys through a real etcd.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_agent::{Seen, View};
use hearth_api::identity::{ClusterId, NodeId};
use hearth_api::recovery::{RecoveryKey, RecoveryRecipient};
use hearth_api::secrets_keys::ControllerKey;
use hearth_api::v1::node_roles::KubernetesController;
use hearth_api::v1::{KubernetesConfiguration, Node, NodeRoles, NodeState};
use hearth_base::event::{self, Writer};
use hearth_base::testing::{TestSupervisor, within_timeout};
use hearth_consensus::ConsensusUser;
use hearth_consensus::secrets_keys::{Known, StoredKey};
use hearth_consensus::testing::{Running, Site};

use super::keyring::KeyError;
use super::*;

/// What all controllers of a cluster see.
struct World {
    etcd: Running,
    _site: Site,
    view: Writer<Arc<View>>,
    settings: Writer<Arc<hearth_api::v1::KubernetesConfiguration>>,
    recovery_recipient: Writer<Option<RecoveryRecipient>>,
    recovery: RecoveryKey,
}

/// A running controller, without Kubernetes' programs.
struct Member {
    keyring: Arc<Keyring>,
    work: TestSupervisor,
}

fn id(number: u8) -> NodeId {
    NodeId::from_bytes([number; 16])
}

fn cluster() -> ClusterId {
    ClusterId::from_bytes([3; 16])
}

impl World {
    async fn new() -> Self {
        let site = Site::new();
        let etcd = site.start(true).await;
        let recovery = RecoveryKey::generate();
        let world = Self {
            etcd,
            _site: site,
            view: event::value().0,
            settings: event::value().0,
            recovery_recipient: event::value().0,
            recovery,
        };
        world.set_generation(0);
        world
            .recovery_recipient
            .set(Some(world.recovery.recipient()));
        world
    }

    fn set_controllers(&self, numbers: &[u8]) {
        let node = |number: &u8| {
            let node = Node {
                id: id(*number).to_string(),
                state: NodeState::Up.into(),
                roles: Some(NodeRoles {
                    kubernetes_controller: Some(KubernetesController {}),
                    ..NodeRoles::default()
                }),
                ..Node::default()
            };
            (id(*number), Seen::from(&node))
        };
        let nodes: BTreeMap<_, _> = numbers.iter().map(node).collect();
        self.view.set(Arc::new(View {
            nodes,
            ..View::default()
        }));
    }

    fn set_generation(&self, secrets_key_generation: u32) {
        self.settings.set(Arc::new(KubernetesConfiguration {
            secrets_key_generation,
            ..KubernetesConfiguration::default()
        }));
    }

    fn keys(&self) -> SecretsKeys {
        let handle = self.etcd.handle();
        SecretsKeys::new(handle.root().namespaced(ConsensusUser::KubernetesSecrets))
    }

    fn start(&self, number: u8, own: &ControllerKey) -> Member {
        let keyring = Arc::new(Keyring::new(
            cluster(),
            id(number),
            own.clone(),
            self.keys(),
        ));
        let sharing = Arc::new(Sharing {
            keyring: keyring.clone(),
            view: self.view.value(),
            settings: self.settings.value(),
            recovery_recipient: self.recovery_recipient.value(),
        });
        let work = TestSupervisor::run(move |ctx| sharing::run(ctx, sharing.clone()));
        Member { keyring, work }
    }

    /// Waits until the records are so.
    async fn known(&self, what: &str, is_so: impl Fn(&Known) -> bool) -> Known {
        let keys = self.keys();
        within_timeout(what, async {
            loop {
                let known = keys.read().await.unwrap();
                if is_so(&known) {
                    return known;
                }
                keys.changed(&known, Duration::from_secs(1)).await;
            }
        })
        .await
    }
}

impl Member {
    async fn is(&self, wanted: &KeyStatus) {
        let mut statuses = self.keyring.status().watch();
        let reached = statuses.wait_for(|status| status == wanted);
        within_timeout(&format!("{wanted:?}"), reached)
            .await
            .unwrap();
    }

    fn encrypt(&self, text: &[u8]) -> (Vec<u8>, String) {
        self.keyring.encrypt(text).unwrap()
    }

    async fn decrypt(&self, (ciphertext, id): &(Vec<u8>, String)) -> Result<Vec<u8>, KeyError> {
        within_timeout("an answer", self.keyring.decrypt(id, ciphertext)).await
    }
}

fn is_for(known: &Known, recipients: &[RecoveryRecipient]) -> bool {
    known.keys.values().all(|key| {
        let wrapped = &key.content.wrapped;
        wrapped.len() == recipients.len()
            && recipients
                .iter()
                .all(|to| key.content.wrapped_for(to).is_some())
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_shared_replaced_and_taken_away() {
    let world = World::new().await;
    let own = [(); 2].map(|()| ControllerKey::generate());
    let recipients = own.each_ref().map(ControllerKey::recipient);
    let recovery = world.recovery.recipient();
    world.set_controllers(&[1]);
    let first = world.start(1, &own[0]);
    first.is(&KeyStatus::Ready(1)).await;
    let sealed = first.encrypt(b"seed");
    assert!(sealed.1.starts_with("1-"));

    // A second one gets access, and decrypts what the first has encrypted.
    world.set_controllers(&[1, 2]);
    let second = world.start(2, &own[1]);
    second.is(&KeyStatus::Ready(1)).await;
    assert_eq!(second.decrypt(&sealed).await.unwrap(), b"seed");

    // Both use the same new key; what the old one has encrypted stays readable.
    world.set_generation(2);
    first.is(&KeyStatus::Ready(2)).await;
    second.is(&KeyStatus::Ready(2)).await;
    let newer = second.encrypt(b"other");
    assert!(newer.1.starts_with("2-"));
    assert_eq!(first.decrypt(&newer).await.unwrap(), b"other");
    assert_eq!(first.decrypt(&sealed).await.unwrap(), b"seed");
    let used = |known: &Known| {
        let controllers = known.controllers.values();
        let used: Vec<_> = controllers.map(|one| one.content.generation).collect();
        used == [1, 2]
    };
    world.known("who encrypts with which key", used).await;

    // A smaller number changes nothing. A controller that is none any more loses its access.
    world.set_generation(1);
    second.work.stop().await;
    world.set_controllers(&[1]);
    let without =
        |known: &Known| known.controllers.len() == 1 && is_for(known, &[recipients[0], recovery]);
    let known = world.known("the second has no access", without).await;
    assert_eq!(known.latest(), 2);

    // Another recovery key takes the place of the former.
    let other = RecoveryKey::generate();
    world.recovery_recipient.set(Some(other.recipient()));
    let replaced = |known: &Known| is_for(known, &[recipients[0], other.recipient()]);
    world.known("the new recovery key", replaced).await;

    // After a restart the same keys are there.
    first.work.stop().await;
    let again = world.start(1, &own[0]);
    again.is(&KeyStatus::Ready(2)).await;
    assert_eq!(again.decrypt(&newer).await.unwrap(), b"other");
    again.work.stop().await;
    world.etcd.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_alone_without_its_key_needs_the_recovery_key() {
    let world = World::new().await;
    world.set_controllers(&[1]);
    let first = world.start(1, &ControllerKey::generate());
    first.is(&KeyStatus::Ready(1)).await;
    let sealed = first.encrypt(b"seed");
    first.work.stop().await;

    world.set_controllers(&[2]);
    let own = ControllerKey::generate();
    let second = world.start(2, &own);
    second.is(&KeyStatus::Missing(1)).await;
    assert!(second.decrypt(&sealed).await.is_err());
    let condition = KeyStatus::Missing(1).condition().unwrap();
    let RoleCondition::Unmet { reason, message } = condition else {
        panic!("it is met");
    };
    assert_eq!(reason, "SecretsKeyMissing");
    assert!(message.contains("recover-secrets-key"), "{message}");

    // What `hearthctl kubernetes recover-secrets-key` and a curator do.
    let keys = world.keys();
    let known = keys.read().await.unwrap();
    let stored = &known.keys[&1].content;
    let of = second.keyring.generation(1);
    let wrapped = stored.wrapped_for(&world.recovery.recipient()).unwrap();
    let key = of.recover(&world.recovery, wrapped).unwrap();
    let mut given = StoredKey { ..stored.clone() };
    let to = own.recipient();
    given.wrapped.push((to, of.wrap(&to, &key).unwrap()));
    keys.put(&known, 1, &given).await.unwrap();
    second.is(&KeyStatus::Ready(1)).await;
    assert_eq!(second.decrypt(&sealed).await.unwrap(), b"seed");
    second.work.stop().await;
    world.etcd.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupt_record_is_told_and_left() {
    let world = World::new().await;
    world.set_controllers(&[1]);
    let handle = world.etcd.handle();
    let client = handle.root().namespaced(ConsensusUser::KubernetesSecrets);
    use hearth_consensus::fenced::{Condition, Write};
    let key = "keys/0000000001";
    let write = Write::when(Condition::Absent(key.into())).put(key, b"\xff".to_vec());
    client.write(write).await.unwrap();
    let first = world.start(1, &ControllerKey::generate());
    let mut statuses = first.keyring.status().watch();
    let failing = statuses.wait_for(|status| matches!(status, KeyStatus::Failing(_)));
    let failing = within_timeout("it is told", failing).await.unwrap();
    let KeyStatus::Failing(why) = failing else {
        panic!("it works");
    };
    assert!(why.contains(key), "{why}");
    assert_eq!(client.get(key).await.unwrap().unwrap().value, b"\xff");
    first.work.stop().await;
    world.etcd.stop().await;
}
