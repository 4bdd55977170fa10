//! The files that the user names: contexts, kubeconfigs, keys.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use futures::future::join_all;

use super::*;

/// FIELD T2: processes that change the contexts at the same time lose nothing of each other.
#[tokio::test]
async fn changes_at_the_same_time_are_all_kept() {
    let f = Fixture::new();
    let curator = f.curator().await;
    f.take_ownership(&curator).await;
    let shell = |network: u8| {
        let f = &f;
        async move {
            for host in 1..=40 {
                let address = format!("192.0.{network}.{host}:7836");
                f.ok(&["context", "route", &address, "127.0.0.1:7"]).await;
            }
        }
    };
    let endpoint = curator.endpoint().to_string();
    let (key, secret) = (f.path("owner-key.pem"), f.path("first-contact-secret"));
    let logins = ["one", "two"].map(|name| {
        let mut args = f.ownership(&endpoint, text(&key), text(&secret));
        *args.last_mut().expect("a name") = name;
        let f = &f;
        async move { drop(f.ok(&args).await) }
    });
    tokio::join!(join_all([1, 2].map(shell)), join_all(logins));
    let contexts = f.json(&["context", "list", "-o", "json"]).await;
    let names = contexts.as_array().expect("a list").iter();
    let names: Vec<_> = names.map(|context| context["name"].clone()).collect();
    assert_eq!(names, ["one", "test", "two"]);
    // A shell's routes are in the context that was the current one.
    let mut routes = 0;
    for name in ["one", "test", "two"] {
        let shown = f.json(&["context", "show", name]).await;
        routes += shown["routes"].as_object().map_or(0, |routes| routes.len());
    }
    assert_eq!(routes, 80);
}

/// FIELD T1.
#[tokio::test]
async fn links_are_followed() {
    let f = Fixture::new();
    let (kept, link) = (f.path("kept"), f.path(".config/hearth/config.json"));
    fs::create_dir(&kept).expect("a folder");
    fs::create_dir_all(link.parent().expect("a folder")).expect("a folder");
    symlink(kept.join("contexts.json"), &link).expect("a link");
    let _curator = kubernetes::start(&f, &[]).await;
    f.ok(&["context", "use", "test"]).await;
    let metadata = fs::symlink_metadata(&link).expect("there");
    assert!(metadata.is_symlink(), "the link has become a file");
    assert!(kept.join("contexts.json").is_file());

    let link = f.path("kubeconfig");
    symlink("kept/kubeconfig", &link).expect("a link");
    f.ok(&[&KUBECONFIG[..], &["--output-file", text(&link)]].concat())
        .await;
    let metadata = fs::symlink_metadata(&link).expect("there");
    assert!(metadata.is_symlink(), "the link has become a file");
    assert!(kept.join("kubeconfig").is_file());
}

/// FIELD T3: `-o` is the format, `-` is standard output, and only regular files are replaced.
#[tokio::test]
async fn a_kubeconfig_goes_where_it_is_wanted() {
    let f = Fixture::new();
    let _curator = kubernetes::start(&f, &[]).await;
    let printed = f.json(&KUBECONFIG).await;
    for to in [
        ["-o", "json"],
        ["--output-file", "-"],
        ["--output-file", "/dev/stdout"],
    ] {
        let args = [&KUBECONFIG[..], &to[..]].concat();
        assert_eq!(f.json(&args).await, printed, "{to:?}");
    }
    let (code, why) = f.fails(&[&KUBECONFIG[..], &["-o", "file"]].concat()).await;
    assert_eq!(code, 2);
    assert!(why.contains("possible values: json"), "{why}");
    assert!(!f.path("file").exists());
}

/// FIELD T4: what is mounted read-only and readable by others is used with a warning; a key that is gone afterwards is
/// refused before anybody was asked.
#[tokio::test]
async fn keys_come_from_mounts_and_pipes() {
    let f = Fixture::new();
    let curator = f.curator().await;
    let key = f.path("owner-key.pem");
    let own = f.key.public().to_string();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("chmod");
    let (code, why) = f.fails(&["owner", "public-key", text(&key)]).await;
    assert_eq!(code, 5);
    assert!(why.contains("run chmod 600"), "{why}");

    let home = f.home.path();
    let read_only = format!(
        "mount --bind {home} {home} && mount -o remount,bind,ro {home} && exec \"$@\"",
        home = home.display()
    );
    let hearthctl = env!("CARGO_BIN_EXE_hearthctl");
    let mounted = Command::new("/usr/bin/unshare")
        .args(["--map-root-user", "--mount", "/bin/sh", "-c", &read_only])
        .args(["sh", hearthctl, "owner", "public-key", text(&key)])
        .output()
        .await
        .expect("it runs");
    let warning = String::from_utf8_lossy(&mounted.stderr).into_owned();
    assert!(mounted.status.success(), "{warning}");
    assert_eq!(String::from_utf8_lossy(&mounted.stdout).trim(), own);
    assert!(
        warning.contains("warning") && warning.contains("mode 644"),
        "{warning}"
    );

    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("chmod");
    let piped = |args: Vec<&str>| {
        let mut shell = Command::new("/bin/sh");
        shell
            .args(["-c", "cat | \"$@\"", "sh", hearthctl])
            .args(args)
            .env_clear()
            .env("HOME", home)
            .env("PATH", "/usr/bin:/bin")
            .stdin(fs::File::open(&key).expect("the key"));
        shell
    };
    let read = piped(vec!["owner", "public-key", "/dev/stdin"]);
    let read = { read }.output().await.expect("it runs");
    assert_eq!(String::from_utf8_lossy(&read.stdout).trim(), own);

    let endpoint = curator.endpoint().to_string();
    let secret = f.path("first-contact-secret");
    let login = piped(f.ownership(&endpoint, "/dev/stdin", text(&secret)));
    let login = { login }.output().await.expect("it runs");
    let why = String::from_utf8_lossy(&login.stderr).into_owned();
    assert_eq!(login.status.code(), Some(5), "{why}");
    assert!(why.contains("expected a regular file"), "{why}");
    assert!(curator.calls().is_empty(), "{:?}", curator.calls());
}

const KUBECONFIG: [&str; 4] = [
    "kubernetes",
    "kubeconfig",
    "--server",
    "https://127.0.0.1:7",
];
