//! Opens channels: to the curators of the selected cluster, or to one node.
//!
//! The user's certificate is valid for days. Each command renews it first once half of its time has
//! passed: the owner key is on this machine, so nobody has to do anything.

use std::path::PathBuf;
use std::time::Duration;

use hearth_api::certificates::ClusterCa;
use hearth_api::client::{Channel, Curators, Endpoint, Options};
use hearth_api::escrow;
use hearth_api::identity::{NodeId, OwnerKey, UserCredentials};
use hearth_api::names::PORT_NODE_MANAGEMENT;
use hearth_api::tls::{self, ExpectedServer, TlsError};
use hearth_operator::Operator;

use crate::args::Global;
use crate::context::{Context, Contexts};
use crate::failure::{Failure, Kind};

/// How long the renewal of a certificate may take.
const RENEW_WITHIN: Duration = Duration::from_secs(5);

/// The selected context and its credentials.
pub(crate) struct Session {
    /// Name of the context.
    pub name: String,
    /// The context.
    pub context: Context,
    /// Path of the contexts file.
    pub file: PathBuf,
    credentials: UserCredentials,
}

impl Session {
    /// Loads the context that `--context` names, or the current one.
    pub(crate) fn new(global: &Global) -> Result<Self, Failure> {
        let contexts = Contexts::load(global.config.clone())?;
        let (name, context) = contexts.get(global.context.as_deref())?;
        Ok(Self {
            name: name.to_owned(),
            context: context.clone(),
            file: contexts.path().to_owned(),
            credentials: contexts.credentials(name, context)?,
        })
    }

    /// The credentials of the context.
    pub(crate) fn credentials(&self) -> &UserCredentials {
        &self.credentials
    }

    async fn channel(
        &self,
        global: &Global,
        endpoints: Vec<Endpoint>,
        expected: ExpectedServer,
    ) -> Result<Channel, Failure> {
        let renewed = self.renewed(global).await?;
        let credentials = renewed.as_ref().unwrap_or(&self.credentials);
        let config = tls::user_client_config(credentials, expected, tls::wall_clock())
            .map_err(|error| own_credentials(&self.name, error))?;
        Ok(Curators::new(endpoints, config, options(global)).channel())
    }

    /// New credentials, which are saved, if it is time to renew those of the context.
    async fn renewed(&self, global: &Global) -> Result<Option<UserCredentials>, Failure> {
        let now = tls::now(&tls::wall_clock());
        let UserCredentials {
            key,
            certificate,
            ca,
        } = &self.credentials;
        let ca = ClusterCa::parse(ca).map_err(|error| self.not_renewed(error))?;
        let is_valid = ca.verify(certificate, now).is_ok();
        let renew_after = self.context.renew_after;
        if is_valid && renew_after.is_some_and(|at| now.as_secs() < at) {
            return Ok(None);
        }
        let options = Options {
            connect_timeout: global.timeout.min(RENEW_WITHIN),
            call_timeout: global.timeout.min(RENEW_WITHIN),
            ..options(global)
        };
        let (curators, key) = (
            self.curators(global)?,
            OwnerKey::from_seed(*key.expose_seed()),
        );
        let exchange = escrow::exchange(curators.clone(), &key, &ca, None, options.clone());
        match exchange.await {
            Ok(exchanged) => {
                let told = Operator::connect(exchanged.credentials.clone(), curators, options);
                let nodes = match told {
                    Ok(operator) => operator.nodes().await.ok(),
                    Err(_) => None,
                };
                Contexts::change(Some(self.file.clone()), |contexts| {
                    contexts.renew(&self.name, &exchanged)?;
                    // Not a reason to fail: those that are known have just answered.
                    if let Some(nodes) = nodes {
                        contexts.learn(&self.name, &nodes);
                    }
                    Ok(())
                })?;
                Ok(Some(exchanged.credentials))
            }
            // The command itself says what is wrong, if anything is.
            Err(_) if is_valid => Ok(None),
            Err(error) => Err(self.not_renewed(error)),
        }
    }

    fn not_renewed(&self, error: impl std::error::Error + Send + Sync + 'static) -> Failure {
        let what = format!("renew the certificate of context {:?}", self.name);
        Failure::new(Kind::Unreachable, what)
            .because(error)
            .advise(
                "it has expired, and curators renew it: check that the cluster is running and that \
                 the addresses are right",
            )
            .also_advise(
                "after a change of the owner, log in with the new owner key: \
                 `hearthctl cluster take-ownership`",
            )
    }

    /// The curators on the command line, or those of the context.
    pub(crate) fn curators(&self, global: &Global) -> Result<Vec<Endpoint>, Failure> {
        match &global.endpoints[..] {
            [] => self.context.endpoints(),
            given => Ok(given.to_vec()),
        }
    }
}

/// Opens a channel to the selected cluster, as the user of the context.
pub(crate) async fn open(global: &Global) -> Result<Channel, Failure> {
    open_session(global, &Session::new(global)?).await
}

/// The same, for a session that is loaded already.
pub(crate) async fn open_session(global: &Global, session: &Session) -> Result<Channel, Failure> {
    let endpoints = session.curators(global)?;
    if endpoints.is_empty() {
        return Err(Failure::new(
            Kind::Local,
            format!("connect to the cluster of context {:?}", session.name),
        )
        .because("the context has no endpoints")
        .advise("set one with --endpoint"));
    }
    session
        .channel(global, endpoints, ExpectedServer::AnyNode)
        .await
}

/// Opens a channel to these curators of the cluster.
pub(crate) async fn open_at(
    global: &Global,
    session: &Session,
    curators: Vec<Endpoint>,
) -> Result<Channel, Failure> {
    session
        .channel(global, curators, ExpectedServer::AnyNode)
        .await
}

/// Opens a channel to the management service of node `id`, whose certificate is verified. It
/// connects to the endpoint `given`, or to `address`, which the cluster knows, through the routes
/// of the context.
pub(crate) async fn open_node(
    global: &Global,
    id: NodeId,
    address: Option<std::net::IpAddr>,
    given: Option<&Endpoint>,
) -> Result<Channel, Failure> {
    let session = Session::new(global)?;
    let endpoint = match (given, address) {
        (Some(given), _) => given.clone(),
        (None, Some(address)) => session
            .context
            .reach(Endpoint::new(address, PORT_NODE_MANAGEMENT))?,
        (None, None) => {
            return Err(Failure::new(Kind::Cluster, format!("connect to {id}"))
                .because("the node has not reported its address to the cluster yet")
                .advise("set its address with --node-endpoint"));
        }
    };
    session
        .channel(global, vec![endpoint], ExpectedServer::Node(id))
        .await
}

/// The same at several addresses that the node may have, through the routes of the context.
pub(crate) async fn open_node_at(
    global: &Global,
    session: &Session,
    id: NodeId,
    endpoints: Vec<Endpoint>,
) -> Result<Channel, Failure> {
    let reached = endpoints.into_iter().map(|at| session.context.reach(at));
    let reached: Result<Vec<_>, _> = reached.collect();
    session
        .channel(global, reached?, ExpectedServer::Node(id))
        .await
}

/// Client options: `--timeout` bounds connecting and each call.
pub(crate) fn options(global: &Global) -> Options {
    Options {
        connect_timeout: global.timeout,
        call_timeout: global.timeout,
        clock: tls::wall_clock(),
        ..Options::default()
    }
}

/// The endpoints on the command line, for a command that has no context yet.
pub(crate) fn given_endpoints(global: &Global) -> Result<&[Endpoint], Failure> {
    match &global.endpoints[..] {
        [] => Err(Failure::new(Kind::Local, "connect to the cluster")
            .because("--endpoint is required")
            .advise("name a node of the cluster: --endpoint HOST[:PORT]")),
        given => Ok(given),
    }
}

fn own_credentials(name: &str, error: TlsError) -> Failure {
    Failure::new(
        Kind::Refused,
        format!("use the certificate of context {name:?}"),
    )
    .because(error)
    .advise("get a new certificate with `hearthctl cluster take-ownership`")
}
