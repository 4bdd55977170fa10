//! Clients that others write, with libraries of others and with what `docs/api.md` says.
//!
//! One is not run by default, because it fetches packages from PyPI; `cargo xtask test e2e clients --long` runs all.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use hearth_api::certificates::ClusterCa;
use hearth_api::names;
use hearth_api::tls::{self, CertificateDer};
use hearth_lab::hearthctl::Hearthctl;
use hearth_lab::tool;
use hearth_qemu::command::CommandLine;
use hearth_tests::{Operator, Outcome, TestCtx, bounds, here};

/// The guide for those who write clients.
const GUIDE: &str = include_str!("../../../docs/api.md");

/// OpenSSL, which offers no Ed25519 and verifies the name of a curator and that of the node, gets a certificate for a
/// P-256 key from both servers of a node.
#[tokio::test]
async fn a_client_without_ed25519_gets_a_certificate_that_it_can_verify() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").release().install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let operator = vm.owned().await?;
    let id = operator.one_healthy_node().await?.id;
    let openssl = OpenSsl::new(&test, &operator)?;
    for (port, name) in [
        (names::PORT_CURATOR, "curator.hearth"),
        (names::PORT_CURATOR, &id),
        (names::PORT_NODE_MANAGEMENT, &id),
    ] {
        let address = vm.forwarded(port).context("no such port")?;
        // The curators issue it shortly after the node has started.
        let connects = async {
            while openssl.connect(address, name).await.is_err() {
                tokio::time::sleep(bounds::LOOK_AGAIN).await;
            }
        };
        drop(tokio::time::timeout(bounds::SOON, connects).await);
        let said = openssl.connect(address, name).await?;
        ensure!(said.contains("Peer signature type: ECDSA"), "{said}");
        let leaf = openssl.leaf(&said)?;
        ensure!(leaf == id, "{name} is {leaf}, not {id}");
    }
    let address = vm.forwarded(names::PORT_CURATOR).context("no curator")?;
    let refused = openssl.connect(address, "other.hearth").await;
    ensure!(refused.is_err(), "OpenSSL accepts any name: {refused:?}");
    vm.power_off().await?;
    test.passed()
}

/// `openssl s_client` with the cluster's CA.
struct OpenSsl {
    ca: ClusterCa,
    file: PathBuf,
}

impl OpenSsl {
    fn new(test: &TestCtx, operator: &Operator) -> anyhow::Result<Self> {
        let der = &operator.credentials().ca;
        let file = test.folder().join("ca.pem");
        fs::write(&file, pem::encode(&pem::Pem::new("CERTIFICATE", &**der)))?;
        let ca = ClusterCa::parse(der)?;
        Ok(Self { ca, file })
    }

    /// A handshake with the server of this name; returns what OpenSSL prints about it.
    async fn connect(&self, address: SocketAddr, name: &str) -> Result<String, tool::ToolError> {
        let mut line = CommandLine::new("openssl");
        line.arg("s_client").arg("-showcerts");
        line.option("-connect", address.to_string());
        line.option("-sigalgs", "ECDSA+SHA256");
        line.option("-alpn", "h2");
        line.option("-CAfile", &self.file);
        line.option("-verify_hostname", name);
        line.arg("-verify_return_error");
        tool::run(&line).await
    }

    /// The node that the certificate in such a text identifies.
    fn leaf(&self, said: &str) -> anyhow::Result<String> {
        let pem = pem::parse(said)?;
        let certificate = CertificateDer::from(pem.into_contents());
        let leaf = self.ca.verify(&certificate, tls::now(&tls::wall_clock()))?;
        let node = leaf.identity.node_id().context("not a node")?;
        Ok(node.to_string())
    }
}

/// PyPI's build of grpcio, with the client and the commands of the guide. It offers no Ed25519.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn grpcio_lists_the_nodes_as_the_guide_says() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let node = test.node("node").release().install().await?;
    let vm = node.power_on().await?;
    vm.home().await?;
    let curator = vm.forwarded(names::PORT_CURATOR).context("no curator")?;
    let id = vm.owned().await?.one_healthy_node().await?.id;
    let hearthctl = Hearthctl {
        program: test.artifacts().hearthctl.clone(),
        config: test.folder().join("hearthctl.json"),
    };
    tool::run(&hearthctl.take_ownership("test", node.folder(), &[curator])).await?;
    let folder = test.folder();
    let mut certificate = hearthctl.call(["owner", "certificate"]);
    certificate.arg(folder.join("credentials"));
    tool::run(&certificate).await?;
    let packages = folder.join("packages");
    stubs(folder, &packages).await?;
    fs::write(folder.join("list.py"), example()?)?;
    let mut list = CommandLine::new("env");
    list.option("--chdir", folder);
    list.arg(format!("PYTHONPATH={}", packages.display()));
    list.arg("python3").arg("list.py").arg(curator.to_string());
    let said = tool::run(&list).await?;
    ensure!(said.contains(&id), "{list}:\n{said}");
    vm.power_off().await?;
    test.passed()
}

/// Installs PyPI's packages into a folder, and generates the stubs beside the example.
async fn stubs(folder: &Path, packages: &Path) -> Outcome {
    let mut install = CommandLine::new("python3");
    install.arg("-m").arg("pip").arg("install").arg("--quiet");
    install.option("--target", packages).arg("grpcio-tools");
    tool::run(&install).await?;
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/api/proto");
    let mut generate = CommandLine::new("env");
    generate.arg(format!("PYTHONPATH={}", packages.display()));
    generate.arg("python3").arg("-m").arg("grpc_tools.protoc");
    generate.option("-I", &protos);
    generate.arg(format!("--python_out={}", folder.display()));
    generate.arg(format!("--grpc_python_out={}", folder.display()));
    for file in fs::read_dir(protos.join("hearth/v1"))? {
        generate.arg(file?.path());
    }
    tool::run(&generate).await?;
    Ok(())
}

/// The client in the guide.
fn example() -> anyhow::Result<&'static str> {
    let (_, rest) = GUIDE.split_once("```python\n").context("no example")?;
    let (example, _) = rest.split_once("```").context("no end of the example")?;
    Ok(example)
}
