//! A real registry of images: that of the Distribution project, on the host.
//!
//! It serves TLS with a certificate of an authority of its own. A machine whose network is QEMU's own and not restricted
//! ([`hearth_qemu::network::UserNetwork`]) reaches it under [`Registry::name`], and so do machines whose network has
//! [`way_out`]. Images are put into the folder of the registry in the form in which it stores them, so that no client is
//! needed for that.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use hearth_qemu::command::CommandLine;
use hearth_qemu::switch::WayOut;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::{LabError, Result, tool};

/// What the gateway of a single machine's network forwards to the host's loopback address.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// The user and the password for [`Access::Login`].
pub const LOGIN: &str = "anna:secret";
/// The password as bcrypt has it, for the registry's file of users.
const USERS: &str = "anna:$2b$04$a5ivgzSSaDAyxAP8hC1ey.cTQfDk6JSbVidn4sYuwI21/qyIhExou\n";
/// Files in its folder: the certificate of the authority, and that of the registry with its key.
const AUTHORITY: &str = "ca.pem";
const CERTIFICATE: &str = "leaf.pem";
const KEY: &str = "leaf.key";
/// Bound for its start, which takes a second.
const STARTED: Duration = Duration::from_secs(60);
/// Between two attempts to connect to it.
const PAUSE: Duration = Duration::from_millis(200);

/// Who may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Anyone.
    Anyone,
    /// Whoever has the [`LOGIN`].
    Login,
}

/// A way out of a network of several machines, by which they reach registries as a single machine does.
pub fn way_out() -> WayOut {
    WayOut::with_loopback_at(GATEWAY)
}

/// A running registry; it ends with this handle.
#[derive(Debug)]
pub struct Registry {
    port: u16,
    folder: PathBuf,
    _process: Child,
}

impl Registry {
    /// Starts the program; its files are in the folder, which is made.
    ///
    /// # Errors
    /// If it does not serve within the bound.
    pub async fn start(program: &Path, folder: &Path, access: Access) -> Result<Self> {
        make(folder)?;
        certify(folder).await?;
        let port = free_port()?;
        let configuration = folder.join("config.yml");
        // JSON is YAML.
        write(&configuration, configure(folder, port, access)?.to_string())?;
        let path = folder.join("log");
        let log = File::create(&path).and_then(|log| Ok([log.try_clone()?, log]));
        let [stdout, stderr] = log.map_err(LabError::file("create", &path))?;
        let process = Command::new(program)
            .arg("serve")
            .arg(&configuration)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .kill_on_drop(true)
            .spawn()
            .map_err(LabError::process("run the registry"))?;
        let address = (Ipv4Addr::LOCALHOST, port);
        let serves = async {
            while TcpStream::connect(address).await.is_err() {
                tokio::time::sleep(PAUSE).await;
            }
        };
        let served = tokio::time::timeout(STARTED, serves).await;
        served.map_err(|_| LabError::Unserved { log: path })?;
        Ok(Self {
            port,
            folder: folder.to_owned(),
            _process: process,
        })
    }

    /// Its name in the names of images.
    pub fn name(&self) -> String {
        format!("{GATEWAY}:{}", self.port)
    }

    /// The certificate of its authority, in PEM.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn authority(&self) -> Result<String> {
        let path = self.folder.join(AUTHORITY);
        fs::read_to_string(&path).map_err(LabError::file("read", &path))
    }

    /// Adds the image of an archive (an OCI layout) under this name and tag.
    ///
    /// # Errors
    /// If the archive is something else.
    pub async fn add(&self, archive: &Path, name: &str, tag: &str) -> Result<()> {
        let image = Unpacked::of(archive, &self.folder.join("unpacked")).await?;
        let root = self.folder.join("images/docker/registry/v2");
        for hex in image.parts.iter().chain([&image.manifest]) {
            let to = root.join("blobs/sha256").join(&hex[..2]).join(hex);
            make(&to)?;
            let from = image.blob(hex);
            fs::copy(&from, to.join("data")).map_err(LabError::file("copy", &from))?;
        }
        let repository = root.join("repositories").join(name);
        for hex in &image.parts {
            link(&repository.join("_layers/sha256").join(hex), hex)?;
        }
        let manifests = repository.join("_manifests");
        let revision = manifests.join("revisions/sha256").join(&image.manifest);
        let tag = manifests.join("tags").join(tag);
        let index = tag.join("index/sha256").join(&image.manifest);
        for folder in [revision, index, tag.join("current")] {
            link(&folder, &image.manifest)?;
        }
        Ok(())
    }
}

/// The image of an archive, whose blobs are named by their SHA-256 in hex.
struct Unpacked {
    folder: PathBuf,
    manifest: String,
    /// The layers and the configuration.
    parts: Vec<String>,
}

impl Unpacked {
    async fn of(archive: &Path, folder: &Path) -> Result<Self> {
        make(folder)?;
        let mut unpack = CommandLine::new("tar");
        unpack.option("-xf", archive).option("-C", folder);
        tool::run(&unpack).await?;
        let missing = |what| LabError::NotAnImage {
            archive: archive.to_owned(),
            what,
        };
        let hex = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str();
            let hex = digest.and_then(|digest| digest.strip_prefix("sha256:"));
            hex.map(str::to_owned).ok_or_else(|| missing("digest"))
        };
        let index = read(&folder.join("index.json"))?;
        let mut image = Self {
            folder: folder.to_owned(),
            manifest: hex(&index["manifests"][0])?,
            parts: Vec::new(),
        };
        let manifest = read(&image.blob(&image.manifest))?;
        let layers = manifest["layers"].as_array();
        let layers = layers.ok_or_else(|| missing("layers"))?;
        let parts = layers.iter().chain([&manifest["config"]]);
        image.parts = parts.map(hex).collect::<Result<_>>()?;
        Ok(image)
    }

    fn blob(&self, hex: &str) -> PathBuf {
        self.folder.join("blobs/sha256").join(hex)
    }
}

fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(LabError::file("make", folder))
}

fn read(path: &Path) -> Result<Value> {
    let bytes = fs::read(path).map_err(LabError::file("read", path))?;
    serde_json::from_slice(&bytes).map_err(|source| LabError::Output {
        what: "the image of an archive is not described in JSON",
        source,
    })
}

fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    fs::write(path, content).map_err(LabError::file("write", path))
}

/// Makes a folder that stands for a blob in the registry's storage.
fn link(folder: &Path, hex: &str) -> Result<()> {
    make(folder)?;
    write(&folder.join("link"), format!("sha256:{hex}"))
}

/// Free now; that another program takes it in the next moment is unlikely among so many.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    let address = address.map_err(LabError::process("listen on the loopback"))?;
    Ok(address.port())
}

/// The registry's configuration; writes the file of its users, if it has any.
fn configure(folder: &Path, port: u16, access: Access) -> Result<Value> {
    let path = |name: &str| folder.join(name);
    make(&path("images"))?;
    let mut configuration = json!({
        "version": 0.1,
        "log": { "accesslog": { "disabled": false } },
        "storage": { "filesystem": { "rootdirectory": path("images") } },
        "http": {
            "addr": format!("{}:{port}", Ipv4Addr::LOCALHOST),
            "tls": { "certificate": path(CERTIFICATE), "key": path(KEY) },
        },
    });
    if access == Access::Login {
        let users = path("users");
        write(&users, USERS)?;
        configuration["auth"] = json!({ "htpasswd": { "realm": "test", "path": users } });
    }
    Ok(configuration)
}

/// Makes an authority, and its certificate for the registry.
async fn certify(folder: &Path) -> Result<()> {
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
    let openssl = async |words: &[&str]| -> Result<()> {
        let mut command = CommandLine::new("openssl");
        command.arg("req").arg("-x509");
        for word in new.iter().chain(words) {
            command.arg(word);
        }
        tool::run(&command).await?;
        Ok(())
    };
    let (ca, ca_key) = (path(AUTHORITY), path("ca.key"));
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
    let (leaf, leaf_key) = (path(CERTIFICATE), path(KEY));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Packs an index and a blob, and unpacks them.
    async fn unpacked(index: &Value, manifest: &Value) -> Result<Unpacked> {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        make(&path("layout/blobs/sha256"))?;
        write(&path("layout/index.json"), index.to_string())?;
        write(&path("layout/blobs/sha256/aa"), manifest.to_string())?;
        let mut pack = CommandLine::new("tar");
        pack.option("-cf", path("archive"))
            .option("-C", path("layout"))
            .arg(".");
        tool::run(&pack).await?;
        Unpacked::of(&path("archive"), &path("unpacked")).await
    }

    #[tokio::test]
    async fn the_index_leads_to_all_parts_of_an_image() {
        let blob = |hex: &str| json!({ "digest": format!("sha256:{hex}") });
        let index = json!({ "manifests": [blob("aa")] });
        let manifest = json!({ "config": blob("cc"), "layers": [blob("bb")] });
        let image = unpacked(&index, &manifest).await.unwrap();
        assert_eq!(
            (&*image.manifest, image.parts),
            ("aa", vec!["bb".into(), "cc".into()])
        );

        let empty = json!({});
        for (index, manifest, missing) in
            [(&empty, &manifest, "digest"), (&index, &empty, "layers")]
        {
            let Err(error) = unpacked(index, manifest).await else {
                panic!("an image without {missing}");
            };
            assert!(error.to_string().ends_with(missing), "{error}");
        }
    }
}
