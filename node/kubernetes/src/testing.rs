//! A real Kubernetes control plane for tests: etcd of this machine, and API server and
//! controller-manager of a bundle.
//!
//! The bundle is that in `HEARTH_KUBERNETES_BUNDLE`, or at the path where a node has it, or the
//! newest one in the cache of `cargo xtask bundle`. Without a bundle, tests that need it are
//! skipped, with a message. If `HEARTH_KUBERNETES_BUNDLE` is not a valid bundle, tests fail,
//! because then they were expected to run.

use std::fs;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use hearth_api::identity::NodeId;
use hearth_api::names::{EXTENSION_KUBERNETES, EXTENSIONS};
use hearth_api::ranges::ClusterRanges;
use hearth_base::logtree::{Backlog, Query};
use hearth_consensus::testing::{Running, Site};
use hearth_consensus::{ConsensusUser, kubernetes_authorities};
use hearth_host::bundle::Bundle;
use hearth_host::pki;
use hearth_host::pki::kubernetes::{Authorities, Certificate, KeyAndCertificate};
use hearth_kubernetes_api::Client;
use serde_json::json;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use super::access;

/// Environment variable with the path of the bundle.
const NAMED_BUNDLE: &str = "HEARTH_KUBERNETES_BUNDLE";

/// Timeout for a control plane on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(240);

/// How many lines of each program a failed test prints.
const LAST_LINES: usize = 40;

/// Polls until the result is there.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut attempt: impl FnMut() -> F,
) -> T {
    let asking = async {
        loop {
            if let Some(value) = attempt().await {
                return value;
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    match timeout(LONG, asking).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {LONG:?}"),
    }
}

/// Prints that the test of this thread is skipped, bypassing the capture of output, which is not
/// shown for tests that succeed.
pub(crate) fn skipped(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // An error means that nothing reads the output.
    let _ = writeln!(io::stderr(), "{test} is skipped: {why}");
}

/// Path of the bundle; `None`, with a message, if there is none.
pub(crate) fn bundle_or_skip() -> Option<PathBuf> {
    let root = match std::env::var_os(NAMED_BUNDLE) {
        Some(named) => Some(named_bundle(named.into()).unwrap_or_else(|why| panic!("{why}"))),
        None => found_bundle(),
    };
    if root.is_none() {
        skipped("this requires a Kubernetes bundle: cargo xtask bundle");
    }
    root
}

/// The folder, if it is a bundle of a supported version.
fn known(root: PathBuf) -> Option<PathBuf> {
    let is_bundle = root.join("bin/kube-apiserver").exists() && Bundle::open(&root).is_ok();
    is_bundle.then_some(root)
}

fn named_bundle(root: PathBuf) -> Result<PathBuf, String> {
    let why = format!(
        "{NAMED_BUNDLE}: expected a Kubernetes bundle, got {}",
        root.display()
    );
    known(root).ok_or(why)
}

fn found_bundle() -> Option<PathBuf> {
    let mounted = Path::new(EXTENSIONS).join(EXTENSION_KUBERNETES);
    if let Some(root) = known(mounted) {
        return Some(root);
    }
    let cache = PathBuf::from(std::env::var_os("HOME")?).join(".cache/hearth/kubernetes");
    let entries = fs::read_dir(cache).ok()?.filter_map(Result::ok);
    let found = entries.filter_map(|entry| {
        let root = known(entry.path().join("root"))?;
        Some((entry.metadata().ok()?.modified().ok()?, root))
    });
    found.max().map(|(_, root)| root)
}

impl Drop for Cluster {
    /// A test that fails prints the last log lines of the programs.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for program in ["kube-apiserver", "kube-controller-manager"] {
            let log = fs::read_to_string(self.file(&format!("{program}.log")));
            let log = log.unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
            eprintln!("{program}:\n{}", last.join("\n"));
        }
        let last = Query {
            backlog: Backlog::Count(LAST_LINES),
            ..Query::subtree("")
        };
        eprintln!("etcd:");
        for entry in self.site.log.read(last).backlog {
            eprintln!("{}", entry.concise(0));
        }
    }
}

/// A control plane, which is stopped when it is dropped.
pub(crate) struct Cluster {
    site: Site,
    _etcd: Running,
    directory: PathBuf,
    programs: PathBuf,
    authorities: Authorities,
    /// Of services, in its API server.
    ranges: ClusterRanges,
    port: u16,
    apiserver: Option<Child>,
    _manager: Option<Child>,
}

impl Cluster {
    /// Starts it and waits until it is ready; `None`, with a message, without a bundle.
    pub(crate) async fn start() -> Option<Self> {
        Self::with(ClusterRanges::DEFAULT).await
    }

    /// The same with these ranges of services.
    pub(crate) async fn with(ranges: ClusterRanges) -> Option<Self> {
        let root = bundle_or_skip()?;
        let site = Site::new();
        let etcd = site.start(true).await;
        let handle = etcd.handle();
        let client = handle.root().namespaced(ConsensusUser::KubernetesPki);
        let founded = pki::load(&site.root.data.etcd(), site.cluster_id).unwrap();
        let ca = founded.cluster.certificate();
        let authorities = kubernetes_authorities::ensure(&client, ca).await.unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let directory = site.root.ephemeral.path().join("control-plane");
        fs::create_dir_all(&directory).unwrap();
        let mut cluster = Self {
            directory,
            programs: root.join("bin"),
            authorities,
            ranges,
            port: free.local_addr().unwrap().port(),
            apiserver: None,
            _manager: None,
            _etcd: etcd,
            site,
        };
        drop(free);
        cluster.write_files();
        cluster.start_apiserver().await;
        Some(cluster)
    }

    /// A client with a certificate of this kind.
    pub(crate) fn client(&self, what: &Certificate<'_>) -> Client {
        let own = self.issue(what);
        access::client(&self.url(), self.authorities.ca(), &own).unwrap()
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    fn issue(&self, what: &Certificate<'_>) -> KeyAndCertificate {
        self.authorities.issue(what, SystemTime::now()).unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn write_files(&self) {
        let authorities = &self.authorities;
        let service_accounts = authorities.service_accounts();
        fs::write(self.file("ca"), authorities.ca_pem()).unwrap();
        fs::write(self.file("sa.pub"), service_accounts.public_pem()).unwrap();
        let private = service_accounts.private_pem();
        fs::write(self.file("sa.key"), private.expose()).unwrap();
        let serving = Certificate::ApiServer {
            node: NodeId::from_bytes([7; 16]),
            address: [192, 0, 2, 7].into(),
            service: ClusterRanges::DEFAULT.api_service(),
            hosts: &[],
        };
        let serving = self.issue(&serving);
        let (certificate, key) = (self.file("serving"), self.file("serving.key"));
        serving.save(&certificate, &key).unwrap();
    }

    fn command(&self, program: &str, work: &Path) -> Command {
        let log = fs::File::create(self.file(&format!("{program}.log"))).unwrap();
        let mut command = Command::new(self.programs.join(program));
        command
            .current_dir(work)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .kill_on_drop(true);
        command
    }

    /// Starts the API server (again) and waits until it is ready.
    pub(crate) async fn start_apiserver(&mut self) {
        // The etcd socket is relative to this directory.
        let work = self.site.root.ephemeral.consensus();
        let mut command = self.command("kube-apiserver", &work);
        let issuer = "https://kubernetes.default.svc.cluster.local";
        for (name, value) in [
            ("etcd-servers", "unix://client:0".into()),
            ("bind-address", "127.0.0.1".into()),
            ("advertise-address", "192.0.2.7".into()),
            ("secure-port", self.port.to_string()),
            ("service-cluster-ip-range", self.ranges.services_text()),
            ("endpoint-reconciler-type", "none".into()),
            ("service-account-issuer", issuer.into()),
            ("authorization-mode", "Node,RBAC".into()),
        ] {
            command.arg(format!("--{name}={value}"));
        }
        for (name, file) in [
            ("client-ca-file", "ca"),
            ("tls-cert-file", "serving"),
            ("tls-private-key-file", "serving.key"),
            ("service-account-key-file", "sa.pub"),
            ("service-account-signing-key-file", "sa.key"),
            ("cert-dir", "made"),
        ] {
            command.arg(format!("--{name}={}", self.file(file).display()));
        }
        self.apiserver = Some(command.spawn().unwrap());
        let client = self.client(&Certificate::Reconciler);
        eventually("the API server is ready", || {
            let client = client.clone();
            async move { client.text("/readyz").await.ok() }
        })
        .await;
    }

    /// Kills the API server, as a power cut would.
    pub(crate) async fn kill_apiserver(&mut self) {
        let mut apiserver = self.apiserver.take().expect("it runs");
        apiserver.kill().await.unwrap();
    }

    /// Starts the controllers that bind volumes to claims.
    pub(crate) fn start_manager(&mut self) {
        let own = self.issue(&Certificate::ControllerManager);
        let (certificate, private) = (self.file("manager"), self.file("manager.key"));
        own.save(&certificate, &private).unwrap();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "it", "cluster": {
                "server": self.url(), "certificate-authority": self.file("ca"),
            }}],
            "users": [{ "name": "it", "user": {
                "client-certificate": certificate, "client-key": private,
            }}],
            "contexts": [{ "name": "it", "context": { "cluster": "it", "user": "it" } }],
            "current-context": "it",
        });
        let path = self.file("manager.kubeconfig");
        fs::write(&path, config.to_string()).unwrap();
        let work = self.directory.clone();
        let mut command = self.command("kube-controller-manager", &work);
        command.arg(format!("--kubeconfig={}", path.display()));
        let key = self.file("sa.key");
        command.arg(format!(
            "--service-account-private-key-file={}",
            key.display()
        ));
        command.arg(format!("--root-ca-file={}", self.file("ca").display()));
        for flag in [
            "--secure-port=0",
            "--leader-elect=false",
            "--authentication-skip-lookup=true",
            // Its own user does not have the permissions of its controllers.
            "--use-service-account-credentials=true",
            "--controllers=persistentvolume-binder-controller,persistentvolume-protection-controller,\
             persistentvolumeclaim-protection-controller,serviceaccount-token-controller",
        ] {
            command.arg(flag);
        }
        self._manager = Some(command.spawn().unwrap());
    }
}

#[test]
fn a_folder_that_is_named_and_is_no_bundle_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let named = || named_bundle(directory.path().to_owned());
    assert!(
        named()
            .unwrap_err()
            .contains("expected a Kubernetes bundle")
    );
    fs::create_dir(directory.path().join("bin")).unwrap();
    fs::write(directory.path().join("bin/kube-apiserver"), "").unwrap();
    // Of a version that the node does not know.
    let versions = |text| fs::write(directory.path().join("VERSION"), text).unwrap();
    versions("kubernetes 1.20.2\ncontainerd 1.6.20\n");
    assert!(named().is_err());
    versions("kubernetes 1.37.2\ncontainerd 2.4.2\n");
    assert_eq!(named().unwrap(), directory.path());
}
