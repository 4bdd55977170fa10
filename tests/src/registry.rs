//! A real registry of images: that of the Distribution project, on the host.
//!
//! It serves TLS with a certificate of an authority of its own, and asks for a password. A machine with a gateway
//! ([`Plan::online`](crate::node::Plan::online)) reaches it under [`Registry::name`]. Images are put into the folder of
//! the registry in the form in which it stores them, so that no client is needed for that.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, bail};
use hearth_lab::tool;
use hearth_qemu::command::CommandLine;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::{Outcome, TestCtx, bounds};

/// What the gateway of a single machine's network forwards to the host's loopback address.
const GATEWAY: &str = "10.0.2.2";
/// Who may read, and the password.
pub const LOGIN: &str = "anna:secret";
/// The password as bcrypt has it, for the registry's file of users.
const USERS: &str = "anna:$2b$04$a5ivgzSSaDAyxAP8hC1ey.cTQfDk6JSbVidn4sYuwI21/qyIhExou\n";

/// A running registry; it ends with this handle.
#[derive(Debug)]
pub struct Registry {
    port: u16,
    folder: PathBuf,
    _process: Child,
}

impl Registry {
    /// Starts it; its files are in the test's folder.
    ///
    /// # Errors
    /// If it does not serve within the bound.
    pub async fn start(test: &TestCtx) -> anyhow::Result<Self> {
        let folder = test.folder().join("registry");
        fs::create_dir_all(folder.join("images"))?;
        certify(&folder).await?;
        fs::write(folder.join("users"), USERS)?;
        // Free now; that another program takes it in the next moment is unlikely among so many.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let path = |name: &str| folder.join(name);
        // JSON is YAML.
        let configuration = json!({
            "version": 0.1,
            "log": { "accesslog": { "disabled": false } },
            "storage": { "filesystem": { "rootdirectory": path("images") } },
            "auth": { "htpasswd": { "realm": "test", "path": path("users") } },
            "http": {
                "addr": format!("127.0.0.1:{port}"),
                "tls": { "certificate": path("leaf.pem"), "key": path("leaf.key") },
            },
        });
        fs::write(path("config.yml"), configuration.to_string())?;
        let log = fs::File::create(path("log"))?;
        let process = Command::new(&test.kubernetes()?.registry)
            .arg("serve")
            .arg(path("config.yml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("cannot run the registry")?;
        let registry = Self {
            port,
            folder,
            _process: process,
        };
        let serves = async {
            while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                tokio::time::sleep(bounds::LOOK_AGAIN).await;
            }
        };
        let served = tokio::time::timeout(bounds::SOON, serves).await;
        served.with_context(|| format!("no registry: see {}", registry.folder.display()))?;
        Ok(registry)
    }

    /// Its name in the names of images.
    pub fn name(&self) -> String {
        format!("{GATEWAY}:{}", self.port)
    }

    /// The certificate of its authority, in PEM.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn authority(&self) -> anyhow::Result<String> {
        Ok(fs::read_to_string(self.folder.join("ca.pem"))?)
    }

    /// Adds the image of an archive (an OCI layout) under this name and tag.
    ///
    /// # Errors
    /// If the archive is something else.
    pub async fn add(&self, archive: &Path, name: &str, tag: &str) -> Outcome {
        let unpacked = self.folder.join("unpacked");
        fs::create_dir_all(&unpacked)?;
        let mut unpack = CommandLine::new("tar");
        unpack.option("-xf", archive).option("-C", &unpacked);
        tool::run(&unpack).await?;
        let read = |path: &Path| -> anyhow::Result<Value> {
            Ok(serde_json::from_slice(&fs::read(path)?)?)
        };
        let index = read(&unpacked.join("index.json"))?;
        let manifest = hex(&index["manifests"][0])?;
        let blob = |hex: &str| unpacked.join("blobs/sha256").join(hex);
        let content = read(&blob(&manifest))?;
        let layers = content["layers"].as_array().context("no layers")?;
        let parts = layers.iter().chain([&content["config"]]);
        let parts: Vec<String> = parts.map(hex).collect::<Result<_, _>>()?;

        let root = self.folder.join("images/docker/registry/v2");
        for hex in parts.iter().chain([&manifest]) {
            let to = root.join("blobs/sha256").join(&hex[..2]).join(hex);
            fs::create_dir_all(&to)?;
            fs::copy(blob(hex), to.join("data"))?;
        }
        let image = root.join("repositories").join(name);
        let link = |folder: PathBuf, hex: &str| -> Outcome {
            fs::create_dir_all(&folder)?;
            Ok(fs::write(folder.join("link"), format!("sha256:{hex}"))?)
        };
        for hex in &parts {
            link(image.join("_layers/sha256").join(hex), hex)?;
        }
        let manifests = image.join("_manifests");
        let revision = manifests.join("revisions/sha256").join(&manifest);
        let tag = manifests.join("tags").join(tag);
        let index = tag.join("index/sha256").join(&manifest);
        for folder in [revision, index, tag.join("current")] {
            link(folder, &manifest)?;
        }
        Ok(())
    }
}

/// The digest of what a descriptor names, in hex.
fn hex(descriptor: &Value) -> anyhow::Result<String> {
    let digest = descriptor["digest"].as_str();
    match digest.and_then(|digest| digest.strip_prefix("sha256:")) {
        Some(hex) => Ok(hex.to_owned()),
        None => bail!("not a descriptor: {descriptor}"),
    }
}

/// Makes an authority, and its certificate for the registry.
async fn certify(folder: &Path) -> Outcome {
    let path = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let new = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "30",
    ];
    let openssl = async |words: &[&str]| -> Outcome {
        let mut command = CommandLine::new("openssl");
        command.arg("req").arg("-x509");
        for word in new.iter().chain(words) {
            command.arg(word);
        }
        tool::run(&command).await?;
        Ok(())
    };
    let (ca, ca_key) = (path("ca.pem"), path("ca.key"));
    openssl(&[
        "-subj",
        "/CN=test authority",
        "-keyout",
        &ca_key,
        "-out",
        &ca,
    ])
    .await?;
    let name = format!("subjectAltName=IP:{GATEWAY}");
    let (leaf, leaf_key) = (path("leaf.pem"), path("leaf.key"));
    openssl(&[
        "-CA",
        &ca,
        "-CAkey",
        &ca_key,
        "-subj",
        "/CN=registry",
        "-addext",
        &name,
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-keyout",
        &leaf_key,
        "-out",
        &leaf,
    ])
    .await
}
