//! `hearthctl cluster unlock`: gives the nodes of a cluster that is not running their keys.
//!
//! [`hearth_operator::unlock`] finds the nodes and unlocks them. This module decides where to look, by
//! the endpoints and routes of this call and of the context, and waits until the cluster answers.
//! Progress is printed on standard error, the result on standard output, also if it is a failure.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use hearth_api::client::{Channel, Endpoint, within};
use hearth_api::identity::{ClusterId, NodeId};
use hearth_api::names::{PORT_CURATOR, PORT_UNLOCK};
use hearth_api::tls;
use hearth_api::v1::GetNodesRequest;
use hearth_api::v1::management_client::ManagementClient;
use hearth_operator::unlock::{
    Found, Keys, Outcome, Quorum, Scope, Search, Step, UnlockError, unlock,
};
use tonic::Status;

use super::super::{or_interrupted, passing, print, print_json, tell};
use crate::args::{Format, Global};
use crate::connection::{self, Session};
use crate::context::{Context, Contexts};
use crate::failure::{Failure, Kind};
use crate::{keys, output};

/// Polling interval while the cluster does not answer.
const LOOK: Duration = Duration::from_secs(1);

/// The flags of the command.
pub(super) struct Request<'a> {
    pub owner_key: &'a Path,
    pub recovery_key: &'a Path,
    pub scope: Scope,
    pub wait: Duration,
    pub form: Format,
}

/// What this machine knows of the cluster before anybody was asked.
struct Known {
    search: Search,
    /// Endpoints of curators.
    curators: Vec<Endpoint>,
    /// To see whether the cluster answers; `None`: there is no context.
    session: Option<Session>,
}

pub(super) async fn run(global: &Global, request: Request<'_>) -> Result<(), Failure> {
    // Check everything on this machine before the first call.
    let keys = Keys {
        owner: keys::owner_key(request.owner_key)?,
        recovery: keys::recovery_key(request.recovery_key)?,
    };
    let mut known = Known::load(global)?;
    let found = known.search.find().await.map_err(|error| {
        Failure::new(Kind::Local, "select a cluster")
            .because(error)
            .advise("name nodes of one cluster with --endpoint, or its context with --context")
    })?;
    tell_found(&found);
    let Some(cluster) = found.cluster.filter(|_| !found.locked.is_empty()) else {
        return known.nobody_waits(global, &found, request.form).await;
    };
    let told = |step: Step<'_>| eprintln!("hearthctl: {step}");
    let outcome = unlock(&found, &keys, request.scope, global.timeout, told).await;
    known.add_curators(&found);
    let waited = known.wait(global, &outcome, request.wait).await;
    let answers = waited.as_ref().ok().copied().flatten();
    show(cluster, &outcome, answers, request.form)?;
    judge(&outcome, request.scope)?;
    waited.map(drop)
}

/// Prints who waits, and who does not belong to the cluster.
fn tell_found(found: &Found) {
    for node in &found.locked {
        eprintln!(
            "hearthctl: {} at {} waits to be unlocked (cluster {})",
            node.id(),
            node.endpoint,
            node.cluster()
        );
    }
    for node in &found.strangers {
        eprintln!(
            "hearthctl: {} at {} is a node of another cluster ({}); ignoring it",
            node.id(),
            node.endpoint,
            node.cluster()
        );
    }
}

/// Prints the result.
fn show(
    cluster: ClusterId,
    outcome: &Outcome,
    answers: Option<output::Answers>,
    form: Format,
) -> Result<(), Failure> {
    let unlocking = output::Unlocking::new(cluster, outcome, answers);
    match form {
        Format::Table => print(&unlocking.text()),
        Format::Json => print_json(&unlocking),
    }
}

/// Whether the attempt was successful: with a quorum, and if all nodes are requested, with all.
fn judge(outcome: &Outcome, scope: Scope) -> Result<(), Failure> {
    let is_reached = outcome.quorum.is_reached();
    // Somebody who only claims to be a node fails as well, but then others were unlocked.
    let is_fatal = (is_reached && scope == Scope::All) || outcome.unlocked().is_empty();
    match outcome.failures().next().filter(|_| is_fatal) {
        _ if is_reached && scope == Scope::Quorum => Ok(()),
        Some((id, error)) => Err(not_unlocked(id, error)),
        None if is_reached => Ok(()),
        None => Err(too_few(&outcome.quorum)),
    }
}

fn not_unlocked(id: NodeId, error: &UnlockError) -> Failure {
    let kind = match error {
        UnlockError::RecoveryKey(_) | UnlockError::OwnerKey { .. } => Kind::Refused,
        UnlockError::Connect(_) => Kind::Unreachable,
        UnlockError::Key { .. } | UnlockError::Call(_) => Kind::Cluster,
    };
    Failure::new(kind, format!("unlock {id}")).because(hearth_api::chain(error))
}

fn too_few(quorum: &Quorum) -> Failure {
    let missing: Vec<String> = quorum.missing.iter().map(ToString::to_string).collect();
    Failure::new(Kind::Unreachable, "unlock the cluster")
        .because(format!(
            "expected {} of {} consensus members for a quorum, got {}; missing: {}",
            quorum.needed(),
            quorum.voters,
            quorum.up,
            missing.join(", ")
        ))
        .advise(
            "power on the missing nodes and repeat the command; name their addresses with \
             --endpoint if they have changed",
        )
}

impl Known {
    /// By the endpoints on the command line, or those of the context.
    fn load(global: &Global) -> Result<Self, Failure> {
        let contexts = Contexts::load(global.config.clone())?;
        // Without a context the addresses have to be given.
        let needs_context = global.context.is_some() || global.endpoints.is_empty();
        let context = match contexts.get(global.context.as_deref()) {
            Ok((_, context)) => Some(context),
            Err(failure) if needs_context => {
                return Err(
                    failure.also_advise("name nodes of the cluster: --endpoint HOST[:PORT]")
                );
            }
            Err(_) => None,
        };
        let routes = context.map(Context::parsed_routes).transpose()?;
        let routes = routes.unwrap_or_default();
        let (endpoints, curators) = match (&global.endpoints[..], context) {
            ([], Some(context)) => {
                let curators = context.endpoints()?;
                (unlock_ports(&curators, &routes), curators)
            }
            (given, _) => (given_ports(given, &routes), Vec::new()),
        };
        Ok(Self {
            search: Search {
                endpoints,
                routes,
                cluster: context.map(Context::cluster).transpose()?,
                running: Default::default(),
                timeout: global.timeout,
                clock: tls::wall_clock(),
            },
            session: context.and_then(|_| session(global)),
            curators,
        })
    }

    /// Adds the curators that the nodes know.
    fn add_curators(&mut self, found: &Found) {
        let addresses = found.curators().into_values().flatten();
        for address in addresses.map(|address| self.search.reach(address)) {
            if !self.curators.contains(&address) {
                self.curators.push(address);
            }
        }
    }

    /// Reports that there is nothing to unlock, which is no failure if the cluster is running.
    async fn nobody_waits(
        &self,
        global: &Global,
        found: &Found,
        form: Format,
    ) -> Result<(), Failure> {
        if let Some(session) = &self.session
            && let Ok(channel) = connection::open_at(global, session, self.curators.clone()).await
            && let Ok(answers) = look(global, channel).await
        {
            return match form {
                Format::Table => print(&format!(
                    "no node waits to be unlocked: the cluster answers, {answers}\n"
                )),
                Format::Json => {
                    print_json(&output::Unlocking::nothing(self.search.cluster, answers))
                }
            };
        }
        let failure = Failure::new(Kind::Unreachable, "find nodes that wait to be unlocked");
        if let Some(stranger) = found.strangers.first() {
            let expected = self.search.cluster.map(|id| id.to_string());
            return Err(failure
                .because(format!(
                    "expected nodes of cluster {}, got one of cluster {} at {}",
                    expected.unwrap_or_default(),
                    stranger.cluster(),
                    stranger.endpoint
                ))
                .advise("select the context of that cluster with --context"));
        }
        let asked = found.silent.iter();
        let asked =
            asked.map(|(endpoint, error)| format!("{endpoint}: {}", hearth_api::chain(error)));
        Err(failure
            .because(asked.collect::<Vec<_>>().join("; "))
            .advise("check that the nodes are powered on and that the addresses are right")
            .also_advise("a node whose cluster is running, or which is starting, does not wait"))
    }

    /// Waits until the cluster answers. `None`: nobody can be asked, or nobody should be.
    async fn wait(
        &self,
        global: &Global,
        outcome: &Outcome,
        bound: Duration,
    ) -> Result<Option<output::Answers>, Failure> {
        let Some(session) = self.session.as_ref().filter(|_| !bound.is_zero()) else {
            return Ok(None);
        };
        if !outcome.quorum.is_reached() {
            return Ok(None);
        }
        eprintln!("hearthctl: waiting until the cluster answers");
        let what = "wait until the cluster answers";
        let advice = "what was unlocked remains so; `hearthctl node list` shows whether the \
                      cluster answers";
        let answers = or_interrupted(what, advice, self.answers(global, session));
        let answered = tokio::time::timeout(bound, answers).await;
        match answered {
            Ok(answers) => answers.map(Some),
            Err(_) => Err(Failure::new(Kind::Unreachable, what)
                .because(format!("no answer within {bound:?}"))
                .advise(
                    "the consoles of the nodes show what they wait for; repeat the command to wait \
                     again",
                )),
        }
    }

    async fn answers(
        &self,
        global: &Global,
        session: &Session,
    ) -> Result<output::Answers, Failure> {
        let mut looks = tokio::time::interval(LOOK);
        let mut told = String::new();
        // The certificate may have to be renewed first, by the same curators.
        let channel = loop {
            looks.tick().await;
            match connection::open_at(global, session, self.curators.clone()).await {
                Ok(channel) => break channel,
                Err(failure) if failure.is_unreachable() => {
                    tell(&mut told, format!("no answer yet: {failure}"));
                }
                Err(failure) => return Err(failure),
            }
        };
        loop {
            looks.tick().await;
            match look(global, channel.clone()).await {
                Ok(answers) => return Ok(answers),
                Err(status) if passing(&status) => {
                    let progress = format!("no answer yet: {}", output::safe(status.message()));
                    tell(&mut told, progress);
                }
                Err(status) => return Err(Failure::call("list the nodes", status)),
            }
        }
    }
}

/// The session of the context. The nodes can be unlocked without.
fn session(global: &Global) -> Option<Session> {
    match Session::new(global) {
        Ok(session) => Some(session),
        Err(failure) => {
            eprintln!("hearthctl: not waiting for the cluster's answer: {failure}");
            None
        }
    }
}

/// One call to the cluster.
async fn look(global: &Global, channel: Channel) -> Result<output::Answers, Status> {
    let call = hearth_operator::nodes(ManagementClient::new(channel), GetNodesRequest::default());
    let nodes = within(global.timeout, call).await?;
    Ok(output::Answers::from(&nodes[..]))
}

/// The unlock ports of the machines with these curators. Routes to unlock ports lead to all
/// machines, and then an address of the context may be a mapping itself.
fn unlock_ports(curators: &[Endpoint], routes: &BTreeMap<Endpoint, Endpoint>) -> Vec<Endpoint> {
    let to_unlock = routes.iter().filter(|(from, _)| from.port() == PORT_UNLOCK);
    let mapped: Vec<Endpoint> = to_unlock.map(|(_, via)| via.clone()).collect();
    match mapped.is_empty() {
        true => curators
            .iter()
            .map(|curator| curator.at_port(PORT_UNLOCK))
            .collect(),
        false => mapped,
    }
}

/// The same for addresses on the command line, which may also be those of unlock ports themselves.
fn given_ports(given: &[Endpoint], routes: &BTreeMap<Endpoint, Endpoint>) -> Vec<Endpoint> {
    let port = |endpoint: &Endpoint| match endpoint.port() {
        PORT_CURATOR => endpoint.at_port(PORT_UNLOCK),
        _ => endpoint.clone(),
    };
    let reached = given.iter().map(port);
    reached
        .map(|endpoint| routes.get(&endpoint).cloned().unwrap_or(endpoint))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(texts: &[&str]) -> Vec<Endpoint> {
        texts
            .iter()
            .map(|text| text.parse().expect("an endpoint"))
            .collect()
    }

    #[test]
    fn the_unlock_port_is_that_of_the_same_host_or_of_its_route() {
        let none = BTreeMap::new();
        let one = &endpoints(&["192.0.2.1", "a.example:7000"]);
        assert_eq!(
            unlock_ports(one, &none),
            endpoints(&["192.0.2.1:7840", "a.example:7840"])
        );
        assert_eq!(
            given_ports(one, &none),
            endpoints(&["192.0.2.1:7840", "a.example:7000"])
        );
        let pairs = [
            ("10.77.0.11:7836", "127.0.0.1:1"),
            ("10.77.0.11:7840", "127.0.0.1:2"),
            ("10.77.0.12:7840", "127.0.0.1:3"),
        ];
        let routes = pairs.map(|(from, via)| {
            (
                from.parse().expect("an endpoint"),
                via.parse().expect("an endpoint"),
            )
        });
        let routes = BTreeMap::from(routes);
        let all = endpoints(&["127.0.0.1:2", "127.0.0.1:3"]);
        assert_eq!(unlock_ports(&endpoints(&["127.0.0.1:35081"]), &routes), all);
        assert_eq!(
            given_ports(&endpoints(&["10.77.0.12", "127.0.0.1:9"]), &routes),
            endpoints(&["127.0.0.1:3", "127.0.0.1:9"])
        );
    }
}
