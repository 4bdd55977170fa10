//! The kubelet's credential provider: a program that the kubelet starts for each image that it pulls.
//!
//! On standard input it gets a `CredentialProviderRequest` with the image, and it answers on standard
//! output with a `CredentialProviderResponse`: all users and passwords that the cluster has for this
//! image's registry. Both are JSON of `credentialprovider.kubelet.k8s.io/v1`. Nothing is kept by the
//! kubelet, so that a change holds for the next pull.
//!
//! The kubelet asks only for registries that its configuration names, by patterns for names but not for ports. So it is
//! restarted when there are credentials for a registry with another port than before; pods are not affected.
//!
//! The program is `/init` under the name [`NAME`]; its argument is the file with the credentials.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use hearth_api::registries::{Credential, Registry};
use hearth_api::v1::KubernetesConfiguration;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

/// The name by which the kubelet calls it.
pub const NAME: &str = "registry-credentials";
const API: &str = "credentialprovider.kubelet.k8s.io/v1";
/// Larger requests are refused: an image's name has at most a few hundred bytes.
const MAX_REQUEST_SIZE: u64 = 64 << 10;
/// Registries of any name, without a port: a pattern matches names with as many parts as it has itself, and with the
/// same port.
const ALL_REGISTRIES: [&str; 8] = [
    "*",
    "*.*",
    "*.*.*",
    "*.*.*.*",
    "*.*.*.*.*",
    "*.*.*.*.*.*",
    "*.*.*.*.*.*.*",
    "*.*.*.*.*.*.*.*",
];

/// User and password of a registry, in the file and in the answer.
#[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
struct Login {
    username: String,
    password: String,
}

/// The file with all credentials, in the folder of the settings for registries.
pub(crate) fn file(folder: &Path) -> PathBuf {
    folder.join("credentials.json")
}

/// Its content.
pub(crate) fn stored(credentials: &[Credential]) -> String {
    let all: BTreeMap<&str, Json> = credentials
        .iter()
        .map(|one| {
            let login = json!({ "username": one.user, "password": *one.password });
            (one.registry.as_str(), login)
        })
        .collect();
    json!(all).to_string()
}

/// The ports of registries for which there are credentials. The kubelet asks for credentials of registries with a port
/// only if its configuration names this port.
pub(crate) fn ports(settings: &KubernetesConfiguration) -> BTreeSet<u16> {
    let credentials = settings.registry_credentials.iter();
    let credentials = credentials.filter_map(|text| text.parse::<Credential>().ok());
    let port = |one: Credential| one.registry.as_str().split_once(':')?.1.parse().ok();
    credentials.filter_map(port).collect()
}

/// The kubelet's configuration of this provider, for registries without a port and with these ones.
pub(crate) fn configuration(folder: &Path, ports: &BTreeSet<u16>) -> Json {
    let with_ports = ports.iter().flat_map(|port| {
        let patterns = ALL_REGISTRIES.iter();
        patterns.map(move |pattern| format!("{pattern}:{port}"))
    });
    let all = ALL_REGISTRIES.iter().map(|&pattern| pattern.to_owned());
    let images: Vec<String> = all.chain(with_ports).collect();
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1",
        "kind": "CredentialProviderConfig",
        "providers": [{
            "name": NAME,
            "apiVersion": API,
            "matchImages": images,
            "defaultCacheDuration": "0s",
            "args": [file(folder)],
        }],
    })
}

/// Runs as this program if this process was started under its name.
pub fn run_if_called() -> Option<ExitCode> {
    let mut arguments = std::env::args_os();
    let name = arguments.next()?;
    if Path::new(&name).file_name()? != NAME {
        return None;
    }
    Some(match answer(arguments.next()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The kubelet logs it.
            eprintln!("{NAME}: {error}");
            ExitCode::FAILURE
        }
    })
}

fn answer(file: Option<OsString>) -> io::Result<()> {
    let file = file.ok_or_else(|| io::Error::other("expected the file with the credentials"))?;
    let mut request = Vec::new();
    let mut input = io::stdin().take(MAX_REQUEST_SIZE);
    input.read_to_end(&mut request)?;
    let known = std::fs::read(&file)?;
    let response = response(&request, &known)?;
    io::stdout().write_all(response.to_string().as_bytes())
}

fn response(request: &[u8], known: &[u8]) -> io::Result<Json> {
    #[derive(Deserialize)]
    struct Request {
        image: String,
    }
    let request: Request = serde_json::from_slice(request)?;
    let known: BTreeMap<String, Login> = serde_json::from_slice(known)?;
    let registry = registry_of(&request.image);
    let found = registry.and_then(|registry| known.get_key_value(registry.as_str()));
    Ok(json!({
        "apiVersion": API,
        "kind": "CredentialProviderResponse",
        "cacheKeyType": "Registry",
        "cacheDuration": "0s",
        "auth": BTreeMap::from_iter(found),
    }))
}

/// The registry in the name of an image: what stands before the first slash, if it can be a host.
fn registry_of(image: &str) -> Option<Registry> {
    let host = image.split_once('/').map(|(host, _)| host);
    let host = host.filter(|host| host.contains(['.', ':']) || *host == "localhost");
    match host.unwrap_or("docker.io") {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        host => host,
    }
    .parse()
    .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> String {
        let credentials = ["docker.io=anna:secret", "registry.example:5000=bert:other"];
        stored(&credentials.map(|text| text.parse().unwrap()))
    }

    fn auth(image: &str) -> Json {
        let request =
            json!({ "apiVersion": API, "kind": "CredentialProviderRequest", "image": image });
        let response = response(request.to_string().as_bytes(), known().as_bytes()).unwrap();
        assert_eq!(response["kind"], "CredentialProviderResponse");
        response["auth"].clone()
    }

    #[test]
    fn each_registry_has_its_own_credentials() {
        let anna = json!({ "docker.io": { "username": "anna", "password": "secret" } });
        for image in [
            "nginx",
            "library/nginx:1",
            "docker.io/library/nginx",
            "index.docker.io/a/b",
        ] {
            assert_eq!(auth(image), anna, "{image}");
        }
        let bert = json!({ "registry.example:5000": { "username": "bert", "password": "other" } });
        assert_eq!(auth("registry.example:5000/a/b@sha256:00"), bert);
        for image in [
            "registry.example/a",
            "other.example/docker.io/a",
            "localhost/a",
            "UPPER.example/a",
        ] {
            assert_eq!(auth(image), json!({}), "{image}");
        }
    }

    #[test]
    fn the_kubelet_asks_for_registries_with_the_ports_of_the_credentials() {
        let credentials = [
            "docker.io=anna:secret",
            "registry.example:5000=bert:other",
            "192.0.2.1:5000=bert:other",
            "192.0.2.1:443=bert:other",
            "of a newer release",
        ];
        let ports = ports(&KubernetesConfiguration {
            registry_credentials: credentials.map(str::to_owned).to_vec(),
            ..KubernetesConfiguration::default()
        });
        assert_eq!(Vec::from_iter(ports.clone()), [443, 5000]);
        let all = configuration(Path::new("/f"), &ports);
        let images = all["providers"][0]["matchImages"].as_array().unwrap();
        for pattern in ["*", "*.*.*.*", "*.*:5000", "*.*.*.*:443"] {
            assert!(images.contains(&json!(pattern)), "{pattern}");
        }
        assert_eq!(images.len(), 3 * ALL_REGISTRIES.len());
    }

    #[test]
    fn what_is_no_request_is_an_error() {
        for request in ["", "{}", "[1]"] {
            assert!(response(request.as_bytes(), known().as_bytes()).is_err());
        }
    }
}
