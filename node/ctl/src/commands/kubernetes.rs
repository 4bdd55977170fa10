//! `hearthctl kubernetes`: access to Kubernetes with kubectl.
//!
//! The kubeconfig contains the URL of an API server, its CA certificate, and this program as a
//! credential plugin: kubectl calls `hearthctl kubernetes credential`, which generates a key and
//! requests a certificate for it from the control plane. So the kubeconfig contains no secret, a
//! user who loses access to the cluster loses access to Kubernetes within the hour, and nothing has
//! to be renewed.

mod secrets_keys;

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hearth_api::client::{Endpoint, within};
use hearth_api::identity::SigningKey;
use hearth_api::names::{KUBERNETES_SERVER, PORT_KUBERNETES};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{GetKubernetesAccessRequest, GetKubernetesAccessResponse};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::{INFO, cluster_info, print, print_json};
use crate::args::{Format, Global, KubeconfigFormat, Kubernetes};
use crate::connection::{self, Session};
use crate::context::to_pem;
use crate::failure::{Failure, Kind};
use crate::{files, output};

/// `apiVersion` of the `ExecCredential`. kubectl supports it from 1.20 on, and the newest release
/// still does.
const CREDENTIAL: &str = "client.authentication.k8s.io/v1beta1";
/// Timeout for a connection to one of several API servers.
const KNOCK: Duration = Duration::from_secs(2);

pub(super) async fn run(global: &Global, command: Kubernetes) -> Result<(), Failure> {
    match command {
        Kubernetes::Status { output } => status(global, output.form).await,
        Kubernetes::Kubeconfig {
            output_file,
            output: KubeconfigFormat::Json,
            server,
            tls_server_name,
            embed,
        } => {
            let session = Session::new(global)?;
            let access = Access::ask(global, &session).await?;
            let server = match server {
                Some(url) => url,
                None => access.server(global, &session).await?,
            };
            let user = match embed {
                true => access.embedded(),
                false => exec(global, &session)?,
            };
            let content = kubeconfig(&session.name, &access, &server, tls_server_name, user);
            write(output_file.as_deref(), &content)
        }
        Kubernetes::Credential => {
            let access = Access::ask(global, &Session::new(global)?).await?;
            print_json(&access.credential()?)
        }
        Kubernetes::RotateSecretsKey { wait, output } => {
            secrets_keys::rotate(global, wait, output.form).await
        }
        Kubernetes::RecoverSecretsKey {
            recovery_key,
            output,
        } => secrets_keys::recover(global, &recovery_key, output.form).await,
    }
}

/// Prints what the nodes report.
async fn status(global: &Global, form: Format) -> Result<(), Failure> {
    let channel = connection::open(global).await?;
    let mut management = ManagementClient::new(channel.clone());
    let info = cluster_info(global, &mut management, INFO).await?;
    let configuration = info.configuration.unwrap_or_default();
    let nodes = super::node::all(global, &channel).await?;
    let status = output::KubernetesStatus::new(&nodes, &configuration);
    match form {
        Format::Table => print(&status.text())?,
        Format::Json => print_json(&status)?,
    }
    match status.is_well() {
        true => Ok(()),
        false => Err(Failure::new(Kind::NotReady, "report Kubernetes as ready")
            .because("not all nodes are healthy and meet all of their conditions")),
    }
}

/// A new key, and the control plane's answer with the certificate for it.
struct Access {
    key: SigningKey,
    given: GetKubernetesAccessResponse,
}

impl Access {
    async fn ask(global: &Global, session: &Session) -> Result<Self, Failure> {
        let key = SigningKey::generate();
        let mut management =
            ManagementClient::new(connection::open_session(global, session).await?);
        let request = GetKubernetesAccessRequest {
            public_key: key.public().as_bytes().to_vec(),
        };
        let given = within(global.timeout, management.get_kubernetes_access(request))
            .await
            .map_err(|status| Failure::call("get access to Kubernetes", status))?;
        Ok(Self {
            key,
            given: given.into_inner(),
        })
    }

    /// URL of the first API server that accepts a connection; if none does, the first one.
    async fn server(&self, global: &Global, session: &Session) -> Result<String, Failure> {
        let mut first = None;
        for url in &self.given.servers {
            let wrong = || {
                Failure::new(Kind::Cluster, "find an API server")
                    .because(format!(
                        "expected https://HOST[:PORT] from the cluster, got {:?}",
                        output::safe(url)
                    ))
                    .advise("set the URL with --server")
            };
            let own = url.strip_prefix("https://").ok_or_else(wrong)?;
            let own = Endpoint::parse(own, PORT_KUBERNETES).map_err(|_| wrong())?;
            let reached = session.context.reach(own)?;
            let server = format!("https://{reached}");
            let knock = TcpStream::connect(reached.to_string());
            let bound = KNOCK.min(global.timeout);
            if matches!(tokio::time::timeout(bound, knock).await, Ok(Ok(_))) {
                return Ok(server);
            }
            first.get_or_insert(server);
        }
        let server = first.ok_or_else(|| {
            Failure::new(Kind::Cluster, "find an API server").because("the cluster has none")
        })?;
        eprintln!(
            "hearthctl: no API server is reachable from this machine: using {server}; \
             --server sets another URL"
        );
        Ok(server)
    }

    fn certificate(&self) -> String {
        to_pem(&self.given.certificate)
    }

    /// The kubeconfig's `user`, with an embedded certificate and private key.
    fn embedded(&self) -> Value {
        json!({
            "client-certificate-data": BASE64.encode(self.certificate()),
            "client-key-data": BASE64.encode(self.key.expose_plain_pkcs8_pem().as_bytes()),
        })
    }

    /// The `ExecCredential` for kubectl.
    fn credential(&self) -> Result<Value, Failure> {
        let wrong = || {
            Failure::new(Kind::Cluster, "get access to Kubernetes")
                .because("the cluster's answer does not contain an X.509 certificate")
        };
        let (_, certificate) =
            x509_parser::parse_x509_certificate(&self.given.certificate).map_err(|_| wrong())?;
        let end = certificate.validity().not_after.timestamp();
        Ok(json!({
            "apiVersion": CREDENTIAL,
            "kind": "ExecCredential",
            "status": {
                "expirationTimestamp": output::rfc3339(end.saturating_mul(1000)),
                "clientCertificateData": self.certificate(),
                "clientKeyData": *self.key.expose_plain_pkcs8_pem(),
            },
        }))
    }
}

/// The kubeconfig's `user`: this program as credential plugin, with the global flags of this call.
fn exec(global: &Global, session: &Session) -> Result<Value, Failure> {
    let absolute = |path: &Path| -> Result<PathBuf, Failure> {
        std::path::absolute(path).map_err(|error| {
            Failure::new(Kind::Local, format!("find {}", path.display())).because(error)
        })
    };
    let program = std::env::current_exe()
        .map_err(|error| Failure::new(Kind::Local, "find this program").because(error))?;
    let mut args = vec![
        "--config".to_owned(),
        absolute(&session.file)?.display().to_string(),
        "--context".to_owned(),
        session.name.clone(),
        "--timeout".to_owned(),
        format!("{}ms", global.timeout.as_millis()),
    ];
    for endpoint in &global.endpoints {
        args.extend(["--endpoint".to_owned(), endpoint.to_string()]);
    }
    args.extend(["kubernetes".to_owned(), "credential".to_owned()]);
    Ok(json!({
        "exec": {
            "apiVersion": CREDENTIAL,
            "command": program.display().to_string(),
            "args": args,
            "interactiveMode": "Never",
        },
    }))
}

fn kubeconfig(
    context: &str,
    access: &Access,
    server: &str,
    tls_server_name: Option<String>,
    user: Value,
) -> Value {
    let name = format!("hearth-{context}");
    let cluster = json!({
        "server": server,
        "tls-server-name": tls_server_name.unwrap_or_else(|| KUBERNETES_SERVER.to_owned()),
        "certificate-authority-data": BASE64.encode(to_pem(&access.given.ca_certificate)),
    });
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": name, "cluster": cluster }],
        "users": [{ "name": name, "user": user }],
        "contexts": [{ "name": name, "context": { "cluster": name, "user": name } }],
        "current-context": name,
    })
}

fn write(file: Option<&Path>, content: &Value) -> Result<(), Failure> {
    let Some(path) = files::output_file(file) else {
        return print_json(content);
    };
    files::write_output(path, format!("{content:#}\n").as_bytes())?;
    // Standard output may be where it was written to.
    eprintln!(
        "hearthctl: use it with kubectl --kubeconfig {}",
        path.display()
    );
    Ok(())
}
