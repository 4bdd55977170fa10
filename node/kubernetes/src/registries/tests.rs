use std::os::unix::fs::PermissionsExt as _;

use hearth_base::event;
use hearth_base::testing::{TestSupervisor, until, within_timeout};

use super::*;

fn settings() -> KubernetesConfiguration {
    let all = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    KubernetesConfiguration {
        registry_mirrors: all(&[
            "docker.io=https://first.example:5000",
            "docker.io=http://second.example/hub",
            "registry.example:5000=https://first.example:5000",
            "of a newer release",
        ]),
        registry_credentials: all(&["registry.example:5000=anna:secret"]),
        registry_proxy: "http://proxy.example:3128".into(),
        registry_proxy_exceptions: all(&[".example", "192.0.2.0/24"]),
        ..KubernetesConfiguration::default()
    }
}

/// What is below the folder.
fn content(folder: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, PRIVATE);
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap();
            found.insert(name.to_owned(), fs::read_to_string(&path).unwrap());
        }
    }
    found
}

#[test]
fn each_registry_has_its_mirrors_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let all = Registries::of(&settings());
    all.write(folder).unwrap();
    let written = content(folder);
    let names: Vec<_> = written.keys().map(String::as_str).collect();
    let expected = [
        "credentials.json",
        "hosts/docker.io/hosts.toml",
        "hosts/registry.example_5000_/hosts.toml",
    ];
    assert_eq!(names, expected);
    assert_eq!(
        written["hosts/docker.io/hosts.toml"],
        "\n[host.\"https://first.example:5000\"]\ncapabilities = [\"pull\", \"resolve\"]\n\
         \n[host.\"http://second.example/hub\"]\ncapabilities = [\"pull\", \"resolve\"]\n"
    );
    assert!(written["credentials.json"].contains("secret"));
    // What is set no longer is removed.
    let fewer = KubernetesConfiguration {
        registry_mirrors: settings().registry_mirrors[..2].to_vec(),
        ..KubernetesConfiguration::default()
    };
    Registries::of(&fewer).write(folder).unwrap();
    let written = content(folder);
    assert!(!written.contains_key("hosts/registry.example_5000_/hosts.toml"));
    assert_eq!(written["credentials.json"], "{}");
}

#[test]
fn authorities_count_for_all_registries() {
    let folder = Path::new("/f");
    let all = Registries {
        authorities: vec![vec![1; 60], vec![2; 3]],
        ..Registries::of(&settings())
    };
    let files = all.files(folder);
    let [(path, pem), (default, hosts), (docker, mirrors), ..] = &files[..] else {
        panic!("{files:?}");
    };
    assert_eq!(path, Path::new("/f/authorities.pem"));
    assert_eq!(pem.matches("BEGIN CERTIFICATE").count(), 2);
    assert!(pem.lines().all(|line| line.len() <= 64));
    assert_eq!(default, Path::new("/f/hosts/_default/hosts.toml"));
    assert_eq!(hosts, "ca = \"/f/authorities.pem\"\n");
    assert_eq!(docker, Path::new("/f/hosts/docker.io/hosts.toml"));
    assert_eq!(mirrors.matches("ca = ").count(), 3);
}

#[test]
fn a_proxy_is_the_environment_of_containerd() {
    let proxy = Registries::of(&settings()).proxy;
    let url = "http://proxy.example:3128".to_owned();
    assert_eq!(
        proxy.environment(),
        [
            ("HTTP_PROXY", url.clone()),
            ("HTTPS_PROXY", url),
            ("NO_PROXY", ".example,192.0.2.0/24".to_owned()),
        ]
    );
    let mut without = settings();
    without.registry_proxy.clear();
    assert_eq!(Registries::of(&without).proxy.environment(), []);
}

#[tokio::test]
async fn each_change_of_the_settings_is_written_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (settings_writer, settings_value) = event::value();
    let (proxy_writer, proxy) = event::value();
    let worker = Arc::new(Worker {
        folder: folder.path().to_owned(),
        settings: settings_value,
        proxy: proxy_writer,
    });
    let running = TestSupervisor::run(move |ctx| run(ctx, worker.clone()));
    let hub = "hosts/docker.io/hosts.toml";
    for mirror in ["first.example", "second.example", "third.example"] {
        settings_writer.set(Arc::new(KubernetesConfiguration {
            registry_mirrors: vec![format!("docker.io=https://{mirror}")],
            registry_proxy: format!("http://{mirror}:3128"),
            ..KubernetesConfiguration::default()
        }));
        until("the mirror is written", || {
            let written = content(folder.path());
            written.get(hub).is_some_and(|toml| toml.contains(mirror))
        })
        .await;
        let is_next = |proxy: &Proxy| proxy.url.contains(mirror);
        within_timeout("the proxy", proxy.watch().wait_for(is_next))
            .await
            .unwrap();
    }
    running.is_fine();
    running.stop().await;
}
