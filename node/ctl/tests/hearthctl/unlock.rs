//! `hearthctl cluster unlock`, and the recovery keys of `hearthctl owner`.

use std::os::unix::fs::MetadataExt as _;

use hearth_api::identity::ClusterId;
use hearth_api::recovery::RecoveryKey;
use hearth_api::recovery::console::{RecordChallenger, WrappedRecordKey};
use hearth_api::testing::{LockedNode, TestLockedNode};
use hearth_api::v1::{ClusterDirectory, cluster_directory};

use super::*;

/// Nothing listens there.
const NOWHERE: &str = "127.0.0.1:1";

fn id(number: u8) -> NodeId {
    NodeId::from_bytes([number; 16])
}

/// Three consensus members at 192.0.2.1 to 192.0.2.3.
fn directory() -> ClusterDirectory {
    let entry = |number: u8| cluster_directory::Node {
        id: id(number).to_string(),
        addresses: vec![cluster_directory::Address {
            host: format!("192.0.2.{number}"),
            port: 0,
        }],
        roles: None,
    };
    ClusterDirectory {
        nodes: (1..=3).map(entry).collect(),
    }
}

/// An owner whose cluster has three members.
struct Owner {
    f: Fixture,
    recovery: RecoveryKey,
    directory: ClusterDirectory,
}

impl Owner {
    fn new() -> Self {
        let f = Fixture::new();
        let recovery = owner::create_recovery_key(&f.path("recovery-key")).expect("a key");
        Self {
            f,
            recovery,
            directory: directory(),
        }
    }

    async fn node(&self, number: u8) -> TestLockedNode {
        self.node_of(self.f.cluster.id, number).await
    }

    async fn node_of(&self, cluster_id: ClusterId, number: u8) -> TestLockedNode {
        TestLockedNode::start(LockedNode {
            cluster_id,
            node_id: id(number),
            owner: self.f.key.public(),
            recipient: self.recovery.recipient(),
            directory: self.directory.clone(),
            other_disk: false,
        })
        .await
    }

    /// A context of the cluster, with routes to these nodes; the others cannot be reached.
    async fn has_context(&self, curator: &TestCurator, nodes: &[&TestLockedNode]) {
        self.f.take_ownership(curator).await;
        for number in 1..=3 {
            let there = nodes.iter().find(|node| node.id() == id(number));
            let via = there.map_or(NOWHERE.to_owned(), |node| node.endpoint().to_string());
            for (port, via) in [("7835", NOWHERE), ("7836", NOWHERE), ("7840", &via)] {
                let address = format!("192.0.2.{number}:{port}");
                self.f.ok(&["context", "route", &address, via]).await;
            }
        }
    }

    fn words(&self, more: &[&str]) -> Vec<String> {
        let (key, recovery) = (self.f.path("owner-key.pem"), self.f.path("recovery-key"));
        let words = [
            &["cluster", "unlock", "--timeout", "20s", "--owner-key"][..],
            &[text(&key), "--recovery-key", text(&recovery)],
            more,
        ];
        words.concat().into_iter().map(str::to_owned).collect()
    }

    async fn unlocks(&self, more: &[&str]) -> (i32, String, String) {
        let words = self.words(more);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = self.f.run(&words).await;
        (
            output.status.code().expect("an exit code"),
            String::from_utf8(output.stdout).expect("text"),
            String::from_utf8(output.stderr).expect("text"),
        )
    }
}

#[tokio::test]
async fn a_cluster_that_was_off_is_unlocked_through_its_context() {
    let o = Owner::new();
    let curator = o.f.curator().await;
    let [one, two, three] = [o.node(1).await, o.node(2).await, o.node(3).await];
    o.has_context(&curator, &[&one, &two, &three]).await;
    let (code, printed, said) = o.unlocks(&["-o", "json"]).await;
    assert_eq!(code, 0, "{said}");
    let waits = format!(
        "{} at {} waits to be unlocked (cluster {})",
        id(1),
        one.endpoint(),
        o.f.cluster.id
    );
    assert!(said.contains(&waits), "{said}");
    let unlocked = [&one, &two, &three].map(|node| node.is_unlocked());
    assert_eq!(unlocked, [true, true, false], "a quorum, and not more");
    let printed: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(
        printed,
        json!({
            "cluster_id": o.f.cluster.id.to_string(),
            "quorum": {
                "voters": 3,
                "needed": 2,
                "up": 2,
                "missing": [id(3).to_string()],
            },
            "nodes": [
                {
                    "id": id(1).to_string(),
                    "address": one.endpoint().to_string(),
                    "state": "UNLOCKED",
                    "error": null,
                },
                {
                    "id": id(2).to_string(),
                    "address": two.endpoint().to_string(),
                    "state": "UNLOCKED",
                    "error": null,
                },
                {
                    "id": id(3).to_string(),
                    "address": three.endpoint().to_string(),
                    "state": "LOCKED",
                    "error": null,
                },
            ],
            "answer": { "nodes": 1, "healthy": 1 },
        })
    );

    // The last one, with all that are found.
    let (code, printed, said) = o.unlocks(&["--all", "--wait", "0"]).await;
    assert!(three.is_unlocked(), "{said}");
    // The other two have closed their ports, and serve nothing here.
    assert_eq!(code, 3, "{said}");
    assert!(
        printed.contains("1 of 3 consensus members are up; a quorum needs 2"),
        "{printed}"
    );
}

#[tokio::test]
async fn nobody_waits_while_the_cluster_is_running() {
    let o = Owner::new();
    let curator = o.f.curator().await;
    o.has_context(&curator, &[]).await;
    let (code, printed, said) = o.unlocks(&[]).await;
    assert_eq!(code, 0, "{said}");
    assert!(
        printed.contains("no node waits to be unlocked: the cluster answers, 1 of 1 nodes"),
        "{printed}"
    );
    curator.stop().await.expect("in order");
    let (code, printed, said) = o.unlocks(&[]).await;
    assert_eq!((code, &printed[..]), (3, ""));
    assert!(
        said.contains("find nodes that wait") && said.contains(NOWHERE),
        "{said}"
    );
    assert!(said.contains("powered on"), "{said}");
}

#[tokio::test]
async fn too_few_nodes_are_unlocked_and_the_missing_ones_named() {
    let o = Owner::new();
    let curator = o.f.curator().await;
    let one = o.node(1).await;
    o.has_context(&curator, &[&one]).await;
    let (code, printed, said) = o.unlocks(&[]).await;
    assert_eq!(code, 3);
    assert!(one.is_unlocked(), "{said}");
    assert!(
        said.contains("expected 2 of 3 consensus members for a quorum, got 1"),
        "{said}"
    );
    assert!(
        said.contains(&format!("missing: {}, {}", id(2), id(3))),
        "{said}"
    );
    assert!(printed.contains("SILENT"), "{printed}");
}

#[tokio::test]
async fn without_a_context_addresses_suffice() {
    let mut o = Owner::new();
    let (code, _, said) = o.unlocks(&[]).await;
    assert_eq!(code, 5);
    assert!(said.contains("--endpoint"), "{said}");

    // Those in the directory could not be reached.
    for node in &mut o.directory.nodes {
        node.addresses.clear();
    }
    let [one, two] = [o.node(1).await, o.node(2).await];
    let (first, second) = (one.endpoint().to_string(), two.endpoint().to_string());
    let (code, _, said) = o
        .unlocks(&["--endpoint", &first, "--endpoint", &second])
        .await;
    assert_eq!(code, 0, "{said}");
    assert!(one.is_unlocked() && two.is_unlocked());

    // Nodes of two clusters.
    let [own, stranger] = [o.node(1).await, o.node_of(ClusterId::generate(), 2).await];
    let (first, second) = (own.endpoint().to_string(), stranger.endpoint().to_string());
    let (code, printed, said) = o
        .unlocks(&["--endpoint", &first, "--endpoint", &second])
        .await;
    assert_eq!((code, &printed[..]), (5, ""), "{said}");
    assert!(said.contains(&first) && said.contains(&second), "{said}");
    assert_eq!(own.answers() + stranger.answers(), 0);
}

#[tokio::test]
async fn nodes_of_another_cluster_than_the_contexts_stay_locked() {
    let o = Owner::new();
    let curator = o.f.curator().await;
    let stranger = o.node_of(ClusterId::generate(), 1).await;
    o.has_context(&curator, &[&stranger]).await;
    curator.stop().await.expect("in order");
    let (code, _, said) = o.unlocks(&["--all"]).await;
    assert_eq!(code, 3);
    let expected = format!("expected nodes of cluster {}", o.f.cluster.id);
    assert!(
        said.contains(&expected) && said.contains("--context"),
        "{said}"
    );
    assert_eq!(stranger.answers(), 0);
}

#[tokio::test]
async fn wrong_keys_are_refused() {
    let o = Owner::new();
    let curator = o.f.curator().await;
    let [one, two] = [o.node(1).await, o.node(2).await];
    o.has_context(&curator, &[&one, &two]).await;
    let other = o.f.path("other");
    std::fs::create_dir(&other).expect("a folder");
    o.f.ok(&["owner", "init", text(&other)]).await;
    let (own, foreign) = (o.f.home.path(), other.as_path());
    for (owner_key, recovery_key, part) in [
        (own, foreign, "nothing was sent"),
        (foreign, own, "rejected the owner key"),
    ] {
        let (key, recovery) = (
            owner_key.join("owner-key.pem"),
            recovery_key.join("recovery-key"),
        );
        let words = [
            &["cluster", "unlock", "--timeout", "20s", "--owner-key"][..],
            &[text(&key), "--recovery-key", text(&recovery)],
        ];
        let output = o.f.run(&words.concat()).await;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{said}");
        assert!(said.contains(part), "{said}");
        assert!(!one.is_unlocked() && !two.is_unlocked());
    }

    // A file that is no key.
    let key = o.f.path("owner-key.pem");
    let words = [
        "cluster",
        "unlock",
        "--owner-key",
        text(&key),
        "--recovery-key",
        text(&key),
    ];
    let (code, why) = o.f.fails(&words).await;
    assert_eq!(code, 5);
    assert!(why.contains("64 hexadecimal digits"), "{why}");
}

#[tokio::test]
async fn owners_have_two_keys_and_both_public_halves_are_printed() {
    let f = Fixture::new();
    let folder = f.path("folder");
    let printed = f.ok(&["owner", "init", text(&folder)]).await;
    let mode = folder.metadata().expect("a folder").mode();
    assert_eq!(mode & 0o7777, 0o700);
    let lines: Vec<&str> = printed.lines().collect();
    let [public, recipient] = lines[..] else {
        panic!("{printed}");
    };
    let recipient = recipient
        .strip_prefix("recovery recipient: ")
        .expect("it is named");
    let (key, recovery) = (folder.join("owner-key.pem"), folder.join("recovery-key"));
    for (file, half) in [(&key, public), (&recovery, recipient)] {
        let printed = f.ok(&["owner", "public-key", text(file)]).await;
        assert_eq!(printed, format!("{half}\n"));
        assert_eq!(half.len(), 64);
    }

    // As an earlier version left it.
    std::fs::remove_file(&recovery).expect("removed");
    let (code, why) = f.fails(&["owner", "init", text(&folder)]).await;
    assert_eq!(code, 5);
    assert!(
        why.contains("but not recovery-key") && why.contains("--recovery-key-only"),
        "{why}"
    );
    let added = f
        .ok(&["owner", "init", "--recovery-key-only", text(&folder)])
        .await;
    assert!(
        added.starts_with("recovery recipient: ") && !added.contains(recipient),
        "{added}"
    );
    let (code, why) = f
        .fails(&["owner", "init", "--recovery-key-only", text(&folder)])
        .await;
    assert_eq!(code, 5);
    assert!(why.contains("not overwriting"), "{why}");
}

#[tokio::test]
async fn a_challenge_of_a_console_is_answered() {
    let f = Fixture::new();
    let key = f.path("recovery-key");
    let recovery = owner::create_recovery_key(&key).expect("a key");
    let wrapped = |record| WrappedRecordKey::new(&recovery.recipient(), [record; 32], &[8; 32]);
    let former = RecordChallenger::new(wrapped(1));
    let node = RecordChallenger::new(wrapped(2));
    let log = f.path("console.log");
    // Somebody has pressed Enter twice, and the terminal has broken the lines.
    let shown: String = [&former, &node]
        .map(|node| {
            node.console_challenge().to_text().replace("A", "A\r\n") + "\r\n[ 9.1] I root\r\n"
        })
        .concat();
    std::fs::write(&log, shown).expect("a log");

    let answer = f
        .ok(&["owner", "answer", "--recovery-key", text(&key), text(&log)])
        .await;
    assert_eq!(*node.accept_at_console(&answer).expect("it opens"), [8; 32]);
    assert!(former.accept_at_console(&answer).is_err());

    let other = f.path("other-key");
    owner::create_recovery_key(&other).expect("a key");
    let words = [
        "owner",
        "answer",
        "--recovery-key",
        text(&other),
        text(&log),
    ];
    let (code, why) = f.fails(&words).await;
    assert_eq!(code, 4, "{why}");
    assert!(why.contains("another recovery key"), "{why}");

    // Standard input is empty.
    let (code, why) = f
        .fails(&["owner", "answer", "--recovery-key", text(&key)])
        .await;
    assert_eq!(code, 5, "{why}");
    assert!(why.contains("no \"hearth-challenge:\""), "{why}");
}
