//! Registrations: too many, with a wrong ticket, or interrupted.

use anyhow::{Context, bail, ensure};
use hearth_api::certificates::ClusterCa;
use hearth_api::client::{Curators, Endpoint, Options, within};
use hearth_api::identity::{JoinKey, NodeKey};
use hearth_api::proofs;
use hearth_api::tls::{self, ExpectedServer};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::{NodeState, RegisterNodeRequest, RegisterNodeResponse, node_parameters};
use hearth_tests::{Cluster, Outcome, TestCtx, bounds, here, retry_unavailable};
use tonic::{Code, Status};

/// Number of registrations in the flood.
const FLOOD: usize = 1000;
/// Maximum number of nodes that wait for approval, as documented.
const WAITING: usize = 128;

/// A simulated machine: keys of its own, and a connection to a curator.
struct Stranger {
    request: RegisterNodeRequest,
    curators: Curators,
}

impl Stranger {
    fn new(curator: Endpoint, ca: &[u8], ticket: Vec<u8>) -> anyhow::Result<Self> {
        let (node, join) = (NodeKey::generate(), JoinKey::generate());
        let ca = ClusterCa::parse(ca)?;
        let tls =
            tls::possession_client_config(&node, ca, ExpectedServer::AnyNode, tls::wall_clock())?;
        Ok(Self {
            request: RegisterNodeRequest {
                register_ticket: ticket,
                join_key: join.public().as_bytes().to_vec(),
                join_key_proof: proofs::prove_join_key(&node.public(), &join).to_vec(),
                tpm_is_present: false,
                labels: Vec::new(),
                proof: None,
            },
            curators: Curators::new(vec![curator], tls, Options::default()),
        })
    }

    async fn registers(&self) -> Result<RegisterNodeResponse, Status> {
        let mut curator = CuratorClient::new(self.curators.channel());
        let call = curator.register_node(self.request.clone());
        Ok(within(bounds::CALL, call).await?.into_inner())
    }
}

/// A thousand machines register at once, with the right ticket: a bounded number of them waits for approval, and
/// neither operators nor nodes are affected. After the ticket was rotated, none is accepted any more.
#[tokio::test]
async fn a_flood_of_registrations_is_bounded() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded(&test, 1).await?;
    let parameters = cluster.owner().register_parameters().await?;
    let Some(node_parameters::Cluster::ClusterRegister(told)) = parameters.cluster else {
        bail!("no parameters for a registration");
    };
    let curator = cluster.node(1).vm()?.curator()?;
    let writer = cluster.writer(1).await?;
    let (mut taken, mut turned_away) = (0, 0);
    for _ in 0..FLOOD / 50 {
        let strangers = (0..50).map(|_| {
            let ticket = told.register_ticket.clone();
            Stranger::new(curator.clone(), &told.ca_certificate, ticket)
        });
        let strangers: Vec<Stranger> = strangers.collect::<Result<_, _>>()?;
        let calls = strangers.iter().map(Stranger::registers);
        for answer in futures::future::join_all(calls).await {
            match answer {
                Ok(answer) => {
                    ensure!(answer.state() == NodeState::New, "{answer:?}");
                    taken += 1;
                }
                Err(_) => turned_away += 1,
            }
        }
        // Operators are served during the flood.
        writer.goes_on().await?;
    }
    ensure!(
        taken <= WAITING && turned_away + taken == FLOOD,
        "{taken} accepted, {turned_away} rejected"
    );
    let nodes = cluster.owner().nodes().await?;
    let waiting = nodes.iter().filter(|node| node.state() == NodeState::New);
    ensure!(
        waiting.count() <= WAITING,
        "too many nodes wait for approval"
    );
    cluster.all_healthy().await?;

    let owner = cluster.owner().once();
    let rotated = retry_unavailable(|| owner.register_ticket(true)).await;
    let rotated = rotated.context("cannot rotate the ticket")?;
    ensure!(rotated != told.register_ticket, "the same ticket");
    let late = Stranger::new(curator, &told.ca_certificate, told.register_ticket)?;
    let refused = late
        .registers()
        .await
        .err()
        .context("an old ticket was accepted")?;
    ensure!(
        matches!(
            refused.code(),
            Code::PermissionDenied | Code::ResourceExhausted
        ),
        "{refused:?}"
    );
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}
