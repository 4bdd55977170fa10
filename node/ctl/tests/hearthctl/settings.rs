//! `hearthctl cluster get`, `set` and `edit`.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Output;

use serde_json::{Value, json};

use super::{Fixture, text};

const LABELS: &str = "kubernetes.synchronized_labels";
const GET: [&str; 4] = ["cluster", "get", "-o", "json"];

impl Fixture {
    /// Runs `cluster edit` with this shell script as editor; `$1` is the file. Edited files are
    /// created in the folder `edited`.
    async fn edit(&self, script: &str, args: &[&str]) -> Output {
        let editor = self.path("an editor");
        std::fs::write(&editor, format!("#!/bin/sh\nset -e\n{script}\n")).expect("written");
        let mode = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(&editor, mode).expect("a mode");
        std::fs::create_dir_all(self.path("edited")).expect("a folder");
        self.command(&[&["cluster", "edit"][..], args].concat())
            .env("PATH", "/usr/bin:/bin")
            .env("HEARTHCTL", env!("CARGO_BIN_EXE_hearthctl"))
            .env("TMPDIR", self.path("edited"))
            .env("EDITOR", format!("'{}' ", text(&editor)))
            .output()
            .await
            .expect("it runs")
    }

    /// What editing has left behind.
    fn kept(&self) -> Vec<PathBuf> {
        let folder = std::fs::read_dir(self.path("edited")).expect("a folder");
        folder
            .map(|entry| entry.expect("an entry").path())
            .collect()
    }

    async fn labels(&self) -> Value {
        self.json(&GET).await["settings"][LABELS]["value"].clone()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn settings_are_shown_with_all_that_is_known_of_them() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    let all = f.json(&GET).await;
    assert_eq!(all["version"], 1);
    assert_eq!(
        all["settings"]["cluster_domain"],
        json!({
            "value": "cluster.internal",
            "default": "cluster.internal",
            "fixed": true,
            "description": "Parent domain of the nodes' DNS names",
        })
    );
    assert_eq!(all["settings"].as_object().map(|all| all.len()), Some(26));
    let some = f.json(&[&GET[..], &["tpm_mode", LABELS]].concat()).await;
    assert_eq!(
        some["settings"],
        json!({
            "tpm_mode": all["settings"]["tpm_mode"],
            LABELS: all["settings"][LABELS],
        })
    );
    let shown = f.ok(&["cluster", "get", "storage_security_policy"]).await;
    let lines: Vec<_> = shown.lines().collect();
    let [heading, row, "", "version 1"] = lines[..] else {
        panic!("{shown}");
    };
    assert!(heading.starts_with("SETTING  "), "{shown}");
    assert!(
        row.contains("NEEDS_INSECURE") && row.contains("  NEEDS_ENCRYPTION  "),
        "{shown}"
    );

    let (code, why) = f.fails(&["cluster", "get", "kubernetes"]).await;
    assert_eq!(code, 2);
    assert!(why.contains(LABELS), "{why}");
}

#[tokio::test]
async fn settings_are_set_reset_and_checked_first() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    let assignment = |value: &str| format!("{LABELS}={value}");
    let printed = f.ok(&["cluster", "set", &assignment("rack,zone.*")]).await;
    assert!(
        printed.contains("rack,zone.*") && printed.ends_with("\nversion 2\n"),
        "{printed}"
    );
    let info = f.json(&["cluster", "info", "-o", "json"]).await;
    assert_eq!(info["configuration"][LABELS], json!(["rack", "zone.*"]));
    let emptied = ["cluster", "set", "-o", "json", &assignment("")];
    assert_eq!(
        f.json(&emptied).await["settings"][LABELS]["value"],
        json!([])
    );

    let calls = curator.calls().len();
    let (invalid, value) = (assignment("rack,a*b"), assignment("rack"));
    for (args, code, part) in [
        (&[&*invalid][..], 1, "kubernetes.synchronized_labels[1]:"),
        (&[&*value, &*value], 1, "expected one value, got several"),
        (&["kubernetes=a"], 2, "expected one of cluster_domain, "),
        (&[LABELS], 2, "expected SETTING=VALUE"),
        (&[], 2, "SETTING=VALUE"),
    ] {
        let (found, why) = f.fails(&[&["cluster", "set"], args].concat()).await;
        assert_eq!(found, code, "{why}");
        assert!(why.contains(part), "{why}");
    }
    assert_eq!(curator.calls().len(), calls, "nothing invalid is sent");
    let (code, why) = f.fails(&["cluster", "set", "tpm_mode=BEST_EFFORT"]).await;
    assert_eq!(code, 1);
    assert!(why.contains("tpm_mode: it is fixed"), "{why}");

    // With a version there is nothing to read first.
    let at = |version| ["cluster", "set", "--version", version, &value];
    let (code, why) = f.fails(&at("2")).await;
    assert_eq!(code, 6);
    assert!(why.contains("has changed"), "{why}");
    f.ok(&at("3")).await;
    assert!(
        curator
            .calls()
            .ends_with(&["ConfigureCluster", "ConfigureCluster"])
    );
    assert_eq!(f.labels().await, json!(["rack"]));
}

#[tokio::test]
async fn the_former_commands_still_work() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    let set = ["cluster", "configure", "set", "synchronized-labels"];
    f.ok(&[&set[..], &["rack", "zone.*"]].concat()).await;
    let get = ["cluster", "configure", "get", "-o", "json"];
    assert_eq!(f.json(&get).await, f.json(&GET).await);
    assert_eq!(f.labels().await, json!(["rack", "zone.*"]));
    f.ok(&set).await;
    assert_eq!(f.labels().await, json!([]));
}

#[tokio::test]
async fn what_is_edited_is_changed() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;

    // The file is what it should be, and without an edit nothing is changed.
    let output = f
        .edit("grep -q '# cluster_domain = cluster.internal' \"$1\"", &[])
        .await;
    assert!(output.status.success(), "{}", said(&output));
    assert!(output.stdout.is_empty());
    assert!(said(&output).contains("no settings have been changed"));
    assert!(!curator.calls().contains(&"ConfigureCluster"));

    // An editor that replaces the file.
    let script = format!("sed -i 's/^{LABELS} =.*/{LABELS} = rack, zone.*/' \"$1\"");
    let output = f.edit(&script, &["-o", "json"]).await;
    assert!(output.status.success(), "{}", said(&output));
    let printed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(printed, f.json(&GET).await);
    assert_eq!(f.labels().await, json!(["rack", "zone.*"]));
    assert_eq!(f.kept(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn an_error_is_shown_in_the_file_until_it_is_corrected() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    // Wrong at first; corrected when the editor is opened with the error.
    let script = format!(
        "if head -1 \"$1\" | grep -q '^# error: .*synchronized_labels\\[0\\]: expected'; then \
             sed -i 's/= a b/= ab/' \"$1\"; \
         else \
             sed -i 's/^{LABELS} =/{LABELS} = a b/' \"$1\"; \
         fi"
    );
    let output = f.edit(&script, &[]).await;
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(f.labels().await, json!(["ab"]));

    // Not corrected: the file is kept.
    let output = f
        .edit(
            "echo nonsense >>\"$1\"; sed -i '$!{/^nonsense$/d}' \"$1\"",
            &[],
        )
        .await;
    assert_eq!(output.status.code(), Some(1));
    let [kept] = &f.kept()[..] else {
        panic!("{:?}", f.kept());
    };
    let said = said(&output);
    assert!(
        said.contains("got \"nonsense\"") && said.contains(text(kept)),
        "{said}"
    );
    let kept = std::fs::read_to_string(kept).expect("text");
    assert!(kept.starts_with("# error: ") && kept.ends_with("nonsense\n"));
}

#[tokio::test]
async fn a_conflict_and_a_failing_editor_lose_no_work() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    let edit = format!("sed -i 's/^{LABELS} =/{LABELS} = mine/' \"$1\"");
    let meanwhile = format!("\"$HEARTHCTL\" cluster set {LABELS}=theirs >/dev/null");
    let output = f.edit(&format!("{edit}; {meanwhile}"), &[]).await;
    assert_eq!(output.status.code(), Some(6), "{}", said(&output));
    assert_eq!(f.labels().await, json!(["theirs"]));
    let [kept] = &f.kept()[..] else {
        panic!("{:?}", f.kept());
    };
    assert!(said(&output).contains(text(kept)), "{}", said(&output));
    let content = std::fs::read_to_string(kept).expect("text");
    assert!(content.contains("= mine"), "{content}");
    std::fs::remove_file(kept).expect("removed");

    let output = f.edit("exit 3", &[]).await;
    assert_eq!(output.status.code(), Some(5));
    assert!(
        said(&output).contains("exit status: 3"),
        "{}",
        said(&output)
    );
    assert_eq!(f.kept(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn shells_complete_settings() {
    let f = Fixture::new();
    for shell in ["bash", "zsh"] {
        let script = f.ok(&["completion", shell]).await;
        for part in ["cluster_domain", &format!("{LABELS}=")] {
            assert!(script.contains(part), "{shell}: {part}");
        }
    }
}
