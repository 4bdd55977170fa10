//! Where workers get images from: the settings `kubernetes.registry_…` as files for containerd and for
//! the kubelet.
//!
//! | file below `registries/` | content | read by |
//! |---|---|---|
//! | `hosts/REGISTRY/hosts.toml` | mirrors of a registry | containerd, at each pull |
//! | `hosts/_default/hosts.toml` | names the authorities, for registries without mirrors | containerd, at each pull |
//! | `authorities.pem` | private authorities, besides those that the extension brings | containerd, at each pull |
//! | `credentials.json` | users and passwords | [`provider`], at each pull |
//!
//! So a change holds for the next pull, and nothing is restarted. The exception is the proxy, which
//! containerd takes from its environment ([`Proxy`]): for it containerd is restarted, and pods are not.
//!
//! Credentials reach containerd in the way that Kubernetes has for them: the kubelet asks a program,
//! the *credential provider*, and passes them on with the request for an image. The program is this
//! binary under another name. A Secret of type `kubernetes.io/dockerconfigjson` (`imagePullSecrets`)
//! works as well, and only for the pods that name it.
//!
//! # Invariants
//! - A pull sees the settings as they were at one time, or a mirror less: each file is replaced as a
//!   whole, and the authorities that a file names are written before it.
//! - Passwords are in one file, which only root can read, on a file system in memory.

pub mod provider;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_api::registries::{self, Credential, Mirror, Registry};
use hearth_api::v1::KubernetesConfiguration;
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Failure, Health, Outcome};
use hearth_host::pki::kubernetes::to_pem;
use hearth_sys::{files, tree};

use crate::toml::quoted;

/// File mode: readable by root only.
const PRIVATE: u32 = 0o600;
/// The folder for all registries that have none of their own.
const DEFAULT: &str = "_default";

/// The proxy of containerd: its environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Proxy {
    url: String,
    exceptions: String,
}

impl Proxy {
    /// Variables with their values; none without a proxy.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        if self.url.is_empty() {
            return Vec::new();
        }
        vec![
            ("HTTP_PROXY", self.url.clone()),
            ("HTTPS_PROXY", self.url.clone()),
            ("NO_PROXY", self.exceptions.clone()),
        ]
    }
}

/// Input and output of the runnable that writes the files.
pub(crate) struct Worker {
    /// The folder of the files.
    pub folder: PathBuf,
    /// Input: the cluster's settings.
    pub settings: Value<Arc<KubernetesConfiguration>>,
    /// Output: the proxy, when the files have been written.
    pub proxy: Writer<Proxy>,
}

/// Keeps the files up to date.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.until_cancelled(follow(&ctx, &worker)).await
}

async fn follow(ctx: &Context, worker: &Worker) -> Outcome {
    let health = Health::of(ctx);
    let mut settings = worker.settings.watch();
    let mut last = None;
    loop {
        let now = Registries::of(&*settings.next().await?);
        if last.as_ref() != Some(&now) {
            now.write(&worker.folder)?;
            if worker.proxy.value().get().as_ref() != Some(&now.proxy) {
                worker.proxy.set(now.proxy.clone());
            }
            last = Some(now);
        }
        health.good();
    }
}

/// The settings, parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Registries {
    mirrors: BTreeMap<Registry, Vec<String>>,
    /// DER.
    authorities: Vec<Vec<u8>>,
    credentials: Vec<Credential>,
    proxy: Proxy,
}

impl Registries {
    /// What this release does not understand is left out, and logged without its text.
    fn of(settings: &KubernetesConfiguration) -> Self {
        let mut all = Self {
            proxy: Proxy {
                url: settings.registry_proxy.clone(),
                exceptions: settings.registry_proxy_exceptions.join(","),
            },
            ..Self::default()
        };
        for Mirror { registry, url } in parsed("registry_mirrors", &settings.registry_mirrors) {
            all.mirrors.entry(registry).or_default().push(url);
        }
        let (credentials, elements) = ("registry_credentials", &settings.registry_credentials);
        all.credentials = parsed(credentials, elements).collect();
        for (index, text) in settings.registry_authorities.iter().enumerate() {
            match registries::authority(text) {
                Ok(der) => all.authorities.push(der),
                Err(error) => unusable("registry_authorities", index, &error),
            }
        }
        all
    }

    /// All files with their paths, in the order in which they are written.
    fn files(&self, folder: &Path) -> Vec<(PathBuf, String)> {
        let mut written = Vec::new();
        let path = authorities_file(folder);
        let authorities = (!self.authorities.is_empty()).then_some(path.as_path());
        if authorities.is_some() {
            let all = self.authorities.iter().map(|der| to_pem(der));
            written.push((path.clone(), all.collect()));
            written.push((host_file(folder, DEFAULT), hosts(&[], authorities)));
        }
        for (registry, mirrors) in &self.mirrors {
            let file = host_file(folder, &host_folder(registry));
            written.push((file, hosts(mirrors, authorities)));
        }
        let credentials = provider::stored(&self.credentials);
        written.push((provider::file(folder), credentials));
        written
    }

    /// Writes all files, and removes those of registries that have none any more.
    fn write(&self, folder: &Path) -> Result<(), Failure> {
        let hosts = host_root(folder);
        for directory in [folder, &hosts] {
            files::create_dir(directory, files::PRIVATE_DIRECTORY)?;
        }
        let mut kept = BTreeSet::new();
        for (path, content) in self.files(folder) {
            let parent = path.parent().unwrap_or(folder);
            files::create_dir(parent, files::PRIVATE_DIRECTORY)?;
            files::write_atomic(&path, content.as_bytes(), PRIVATE)?;
            kept.insert(parent.to_owned());
        }
        for entry in fs::read_dir(&hosts)? {
            let path = entry?.path();
            if !kept.contains(&path) {
                tree::remove(&path)?;
            }
        }
        // No file names it any more.
        if self.authorities.is_empty() {
            files::remove_durably(&authorities_file(folder))?;
        }
        Ok(())
    }
}

fn parsed<T>(setting: &'static str, elements: &[String]) -> impl Iterator<Item = T>
where
    T: std::str::FromStr,
    T::Err: std::fmt::Display,
{
    let all = elements.iter().enumerate();
    all.filter_map(move |(index, text)| match text.parse() {
        Ok(element) => Some(element),
        Err(error) => {
            unusable(setting, index, &error);
            None
        }
    })
}

fn unusable(setting: &str, index: usize, error: &dyn std::fmt::Display) {
    tracing::warn!("ignored kubernetes.{setting}[{index}]: {error}");
}

/// The folder in which containerd looks for the folder of a registry.
pub(crate) fn host_root(folder: &Path) -> PathBuf {
    folder.join("hosts")
}

fn authorities_file(folder: &Path) -> PathBuf {
    folder.join("authorities.pem")
}

fn host_file(folder: &Path, host: &str) -> PathBuf {
    host_root(folder).join(host).join("hosts.toml")
}

/// The folder of a registry, as containerd names it: a port stands between underscores.
fn host_folder(registry: &Registry) -> String {
    match registry.as_str().split_once(':') {
        Some((host, port)) => format!("{host}_{port}_"),
        None => registry.to_string(),
    }
}

/// A `hosts.toml`. The registry itself follows the mirrors, because the file names no other server.
fn hosts(mirrors: &[String], authorities: Option<&Path>) -> String {
    let authorities = authorities.map(|path| format!("ca = {}\n", quoted(&path.to_string_lossy())));
    let authorities = authorities.unwrap_or_default();
    let mut file = authorities.clone();
    for url in mirrors {
        let url = quoted(url);
        file += &format!("\n[host.{url}]\ncapabilities = [\"pull\", \"resolve\"]\n{authorities}");
    }
    file
}

#[cfg(test)]
mod tests;
