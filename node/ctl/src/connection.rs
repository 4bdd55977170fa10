//! Opens channels: to the curators of the selected cluster, or to one node.

use std::path::PathBuf;

use hearth_api::client::{Channel, Curators, Endpoint, Options};
use hearth_api::identity::{NodeId, UserCredentials};
use hearth_api::names::PORT_NODE_MANAGEMENT;
use hearth_api::tls::{self, ExpectedServer, TlsError};

use crate::args::Global;
use crate::context::{Context, Contexts};
use crate::failure::{Failure, Kind};

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

    fn channel(
        &self,
        global: &Global,
        endpoints: Vec<Endpoint>,
        expected: ExpectedServer,
    ) -> Result<Channel, Failure> {
        let config = tls::user_client_config(&self.credentials, expected, tls::wall_clock())
            .map_err(|error| own_credentials(&self.name, error))?;
        Ok(Curators::new(endpoints, config, options(global)).channel())
    }
}

/// Opens a channel to the selected cluster, as the user of the context.
pub(crate) fn open(global: &Global) -> Result<Channel, Failure> {
    open_session(global, &Session::new(global)?)
}

/// The same, for a session that is loaded already.
pub(crate) fn open_session(global: &Global, session: &Session) -> Result<Channel, Failure> {
    let endpoints = match &global.endpoints[..] {
        [] => session.context.endpoints()?,
        given => given.to_vec(),
    };
    if endpoints.is_empty() {
        return Err(Failure::new(
            Kind::Local,
            format!("connect to the cluster of context {:?}", session.name),
        )
        .because("the context has no endpoints")
        .advise("set one with --endpoint"));
    }
    session.channel(global, endpoints, ExpectedServer::AnyNode)
}

/// Opens a channel to these curators of the cluster.
pub(crate) fn open_at(
    global: &Global,
    session: &Session,
    curators: Vec<Endpoint>,
) -> Result<Channel, Failure> {
    session.channel(global, curators, ExpectedServer::AnyNode)
}

/// Opens a channel to the management service of node `id`, whose certificate is verified. It
/// connects to the endpoint `given`, or to `address`, which the cluster knows, through the routes
/// of the context.
pub(crate) fn open_node(
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
    session.channel(global, vec![endpoint], ExpectedServer::Node(id))
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
