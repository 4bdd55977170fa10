use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::{Identity, NodeCredentials};
use hearth_api::testing::{self, Script};
use hearth_api::tls::CertificateDer;
use hearth_base::event::{self, Value};
use hearth_base::testing::{TestSupervisor, fixed, until};
use hearth_host::credentials;
use hearth_host::handover::MemberData;
use hearth_host::layout::{KeyFiles, Root};
use tempfile::TempDir;

use crate::CuratorConnection;
use crate::certificates::{Worker, run};
use crate::testing::Fake;

struct Disk {
    files: KeyFiles,
    _directory: TempDir,
}

impl Disk {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let files = Root::under(directory.path()).data.node().credentials();
        std::fs::create_dir_all(files.path()).expect("created");
        Self {
            files,
            _directory: directory,
        }
    }

    fn with(node: &NodeCredentials) -> Self {
        let disk = Self::new();
        credentials::save(&disk.files, node).expect("saved");
        disk
    }

    fn saved(&self) -> Option<CertificateDer<'static>> {
        let saved = credentials::load(&self.files).expect("readable");
        saved.map(|saved| saved.certificate)
    }
}

fn worker(
    disk: &Disk,
    member: &MemberData,
    connection: Value<CuratorConnection>,
) -> TestSupervisor {
    let worker = Arc::new(Worker {
        files: disk.files.clone(),
        member: fixed(member.clone()),
        connection,
        prover: None,
    });
    TestSupervisor::run(move |ctx| run(ctx, worker.clone()))
}

/// The node with another leaf than the one that curators issue.
fn older(fake: &Fake) -> (NodeCredentials, MemberData) {
    let key = fake.node.key.clone();
    let identity = Identity::node(fake.cluster.id, fake.node_id);
    let certificate = fake.cluster.leaf(&identity, key.public(), |params| {
        params.not_after -= Duration::from_secs(1);
    });
    let node = NodeCredentials {
        certificate,
        key,
        ca: fake.node.ca.clone(),
    };
    let member = MemberData {
        own: testing::own(&node),
        ..fake.member()
    };
    (node, member)
}

#[tokio::test]
async fn certificates_are_renewed_at_the_start_and_saved() {
    let fake = Fake::new(Script::default()).await;
    let (node, member) = older(&fake);
    let disk = Disk::with(&node);
    let (connected, connection) = event::value();
    connected.set(fake.connection());
    let worker = worker(&disk, &member, connection);
    until("there is a leaf with a P-256 key", || member.own.has_p256()).await;
    until("the leaf is saved", || {
        disk.saved().as_ref() == Some(&fake.node.certificate)
    })
    .await;
    worker.stop().await;
}

#[tokio::test]
async fn a_leaf_that_was_renewed_before_the_worker_began_is_saved() {
    let fake = Fake::new(Script::default()).await;
    let (node, member) = older(&fake);
    let disk = Disk::with(&node);
    let renewed = fake.node.certificate.clone();
    member.own.replace(renewed.clone(), None).expect("its own");
    let worker = worker(&disk, &member, event::value().1);
    until("the leaf is saved", || {
        disk.saved().as_ref() == Some(&renewed)
    })
    .await;
    worker.stop().await;
}

#[tokio::test]
async fn nothing_is_saved_where_the_credentials_have_been_wiped() {
    let fake = Fake::new(Script::default()).await;
    let (disk, member) = (Disk::new(), fake.member());
    let (connected, connection) = event::value();
    connected.set(fake.connection());
    let worker = worker(&disk, &member, connection);
    until("there is a leaf with a P-256 key", || member.own.has_p256()).await;
    worker.stop().await;
    assert_eq!(disk.saved(), None);
}
