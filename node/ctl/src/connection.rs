//! From the arguments to a channel.

use std::path::PathBuf;

use hearth_api::client::{Channel, Curators, Endpoint, Options};
use hearth_api::identity::{NodeId, UserCredentials};
use hearth_api::names::PORT_NODE_MANAGEMENT;
use hearth_api::tls::{self, ExpectedServer, TlsError};

use crate::args::Global;
use crate::context::{Context, Contexts};
use crate::failure::{Failure, Kind};

/// Which cluster is meant, and who we are to it.
pub(crate) struct Session {
    /// Of the context.
    pub name: String,
    /// The context.
    pub context: Context,
    /// The contexts file.
    pub file: PathBuf,
    credentials: UserCredentials,
}

impl Session {
    /// Of the context that is meant.
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

/// A channel to the cluster that is meant, as the user that we are to it.
pub(crate) fn open(global: &Global) -> Result<Channel, Failure> {
    open_session(global, &Session::new(global)?)
}

/// The same, of a session that is there already.
pub(crate) fn open_session(global: &Global, session: &Session) -> Result<Channel, Failure> {
    let endpoints = match &global.endpoints[..] {
        [] => session.context.endpoints()?,
        given => given.to_vec(),
    };
    if endpoints.is_empty() {
        return Err(Failure::new(
            Kind::Local,
            format!("reach the cluster of context {:?}", session.name),
        )
        .because("it has no endpoints")
        .advise("name one with --endpoint"));
    }
    session.channel(global, endpoints, ExpectedServer::AnyNode)
}

/// A channel to the management of this very node, at this address as the
/// cluster knows it, or at this one as it is reached from here.
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
            return Err(Failure::new(Kind::Cluster, format!("reach {id}"))
                .because("the cluster does not know its address: it has not reported one yet")
                .advise("name its address with --node-endpoint"));
        }
    };
    session.channel(global, vec![endpoint], ExpectedServer::Node(id))
}

/// How the client behaves.
pub(crate) fn options(global: &Global) -> Options {
    Options {
        connect_timeout: global.timeout,
        call_timeout: global.timeout,
        clock: tls::wall_clock(),
        ..Options::default()
    }
}

/// The endpoints of a command that has no context to take them from.
pub(crate) fn given_endpoints(global: &Global) -> Result<&[Endpoint], Failure> {
    match &global.endpoints[..] {
        [] => Err(Failure::new(Kind::Local, "find the cluster")
            .because("no --endpoint is given")
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
    .advise("`hearthctl cluster take-ownership` gets a new one")
}
