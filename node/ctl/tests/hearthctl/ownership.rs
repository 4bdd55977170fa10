//! `hearthctl owner replace`, and what nodes have recorded.

use hearth_api::owner::NewKeys;
use hearth_api::v1::RecordedSettings;

use super::*;

/// A healthy node that has recorded this owner and this recovery recipient.
fn recording(name: &str, owner: &[u8], recipient: &[u8]) -> v1::Node {
    let mut node = node(name, NodeHealth::Healthy);
    node.storage_security = StorageSecurity::Encrypted.into();
    let status = node.status.get_or_insert_default();
    status.recorded_settings = Some(RecordedSettings {
        cold_start_policy: ColdStartPolicy::Owner.into(),
        recovery_recipient: recipient.to_vec(),
        owner_public_key: owner.to_vec(),
    });
    node
}

fn recording_keys(name: &str, keys: &NewKeys) -> v1::Node {
    let recipient = keys.recovery.recipient();
    recording(name, keys.key.public().as_bytes(), recipient.as_bytes())
}

struct Replacing {
    f: Fixture,
    curator: TestCurator,
}

impl Replacing {
    async fn new() -> Self {
        let f = Fixture::new();
        let curator = f.curator().await;
        f.take_ownership(&curator).await;
        std::fs::create_dir(f.path("new")).expect("a folder");
        Self { f, curator }
    }

    fn words(&self, folder: &str, more: &[&str]) -> Vec<String> {
        let path = |name| text(&self.f.path(name)).to_owned();
        let mut words = vec!["owner".to_owned(), "replace".to_owned(), path(folder)];
        for (flag, name) in [
            ("--owner-key", "owner-key.pem"),
            ("--first-contact-secret", "first-contact-secret"),
        ] {
            words.extend([flag.to_owned(), path(name)]);
        }
        words.extend(more.iter().map(|&word| word.to_owned()));
        words
    }

    async fn output(&self, folder: &str, more: &[&str]) -> std::process::Output {
        let words = self.words(folder, more);
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        self.f.run(&words).await
    }

    fn keys(&self) -> NewKeys {
        NewKeys::create_or_read(&self.f.path("new")).expect("keys")
    }
}

#[tokio::test]
async fn an_owner_is_replaced_when_all_nodes_have_recorded_it() {
    let r = Replacing::new().await;
    let keys = r.keys();
    let insecure = v1::Node {
        storage_security: StorageSecurity::Insecure.into(),
        ..recording("hearth-a2", keys.key.public().as_bytes(), &[])
    };
    r.curator
        .set_nodes(vec![recording_keys("hearth-a1", &keys), insecure]);
    let output = r.output("new", &["-o", "json"]).await;
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let wanted = json!({
        "cluster_id": r.f.cluster.id.to_string(),
        "owner_public_key": keys.key.public().to_string(),
        "recovery_recipient": keys.recovery.recipient().to_string(),
        "nodes": [
            {"id": "hearth-a1", "follows": true},
            {"id": "hearth-a2", "follows": true},
        ],
    });
    assert_eq!(printed, wanted);
    // The context is that of the new owner now, and the former one is nobody.
    let info = r.f.json(&["cluster", "info", "-o", "json"]).await;
    assert_eq!(info["owner_public_key"], wanted["owner_public_key"]);
    assert_eq!(info["recovery_recipient"], wanted["recovery_recipient"]);
    let endpoint = r.curator.endpoint().to_string();
    let (key, secret) = (r.f.path("owner-key.pem"), r.f.path("first-contact-secret"));
    let (code, told) =
        r.f.fails(&r.f.ownership(&endpoint, text(&key), text(&secret)))
            .await;
    assert_eq!(code, 4, "{told}");

    // The same command again waits again, and replaces nothing.
    let replaced = |curator: &TestCurator| {
        let calls = curator.calls();
        calls.iter().filter(|&&call| call == "ReplaceOwner").count()
    };
    let output = r.output("new", &[]).await;
    assert!(output.status.success());
    assert_eq!(replaced(&r.curator), 1);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("hearth-a2  recorded"), "{printed}");
}

#[tokio::test]
async fn who_has_not_recorded_the_new_keys_is_waited_for_and_named() {
    let r = Replacing::new().await;
    let keys = r.keys();
    let former = recording("hearth-a2", r.f.key.public().as_bytes(), &[7; 32]);
    r.curator
        .set_nodes(vec![recording_keys("hearth-a1", &keys), former]);
    let output = r.output("new", &["--wait", "1s"]).await;
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{told}");
    assert!(told.contains("waiting for 1 of 2 nodes"), "{told}");
    assert!(told.contains("keep the former keys"), "{told}");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("hearth-a2  not recorded"), "{printed}");
}

#[tokio::test]
async fn present_keys_are_no_new_ones() {
    let r = Replacing::new().await;
    let output = r.output("", &[]).await;
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{told}");
    assert!(told.contains("present owner key"), "{told}");
    assert!(!r.curator.calls().contains(&"ReplaceOwner"));
}

#[tokio::test]
async fn a_node_shows_what_it_has_recorded() {
    let r = Replacing::new().await;
    r.curator
        .set_nodes(vec![recording("hearth-a1", &[0xaa; 32], &[0x99; 32])]);
    let shown = r.f.ok(&["node", "describe", "hearth-a1"]).await;
    for (name, value) in [
        ("cold start", "OWNER".to_owned()),
        ("recovery", hex::encode([0x99; 32])),
        ("owner", hex::encode([0xaa; 32])),
    ] {
        let line = format!("{name:16}  {value}\n");
        assert!(shown.contains(&line), "{shown}");
    }
}
