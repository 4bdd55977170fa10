//! From the arguments to a channel.

use hearth_api::client::{Channel, Curators, Endpoint, Options};
use hearth_api::tls::{self, ExpectedServer, TlsError};

use crate::args::Global;
use crate::context::Contexts;
use crate::failure::{Failure, Kind};

/// A channel to the cluster that is meant, as the user that we are to it.
pub fn open(global: &Global) -> Result<Channel, Failure> {
    let contexts = Contexts::load(global.config.clone())?;
    let (name, context) = contexts.get(global.context.as_deref())?;
    let credentials = contexts.credentials(name, context)?;
    let endpoints = match &global.endpoints[..] {
        [] => context.endpoints()?,
        given => given.to_vec(),
    };
    if endpoints.is_empty() {
        return Err(Failure::new(
            Kind::Local,
            format!("reach the cluster of context {name:?}"),
        )
        .because("it has no endpoints")
        .advise("name one with --endpoint"));
    }
    let clock = tls::wall_clock();
    let config = tls::user_client_config(&credentials, ExpectedServer::AnyNode, clock)
        .map_err(|error| own_credentials(name, error))?;
    Ok(Curators::new(endpoints, config, options(global)).channel())
}

/// How the client behaves.
pub fn options(global: &Global) -> Options {
    Options {
        connect_timeout: global.timeout,
        call_timeout: global.timeout,
        clock: tls::wall_clock(),
        ..Options::default()
    }
}

/// The endpoints of a command that has no context to take them from.
pub fn given_endpoints(global: &Global) -> Result<&[Endpoint], Failure> {
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
