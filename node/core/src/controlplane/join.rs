//! What the disk holds of etcd, brought to what the node's role says.

use std::time::Duration;

use hearth_agent::refused;
use hearth_api::identity::NodeId;
use hearth_api::v1::issue_certificate_request::{EtcdPeer, Kind};
use hearth_api::v1::{
    GetConsensusStatusRequest, GetConsensusStatusResponse, IssueCertificateRequest,
};
use hearth_base::event;
use hearth_base::supervisor::{Failure, Outcome};
use hearth_consensus::standing::{self, Verdict};
use hearth_consensus::{Joining, MemberId};
use hearth_host::pki;

use super::{Member, Worker};

/// Between two attempts to get what a join needs.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// One attempt may take so long.
const ATTEMPT_BOUND: Duration = Duration::from_secs(10);

/// Brings the disk to what the role says. Tells whether etcd is to be started.
pub(super) async fn prepare(
    worker: &Worker,
    member: &Member,
    role: Option<MemberId>,
) -> Result<bool, Failure> {
    let etcd = worker.root.data.etcd();
    loop {
        let found = standing::find(&etcd)?;
        match (standing::judge(role, found), role) {
            (Verdict::Wipe, _) => {
                tracing::warn!(
                    "this node is not the member of consensus any more that its disk is of: \
                     etcd's data are wiped"
                );
                standing::wipe(&etcd)?;
            }
            (Verdict::Join, Some(role)) => join(worker, member, role).await?,
            (Verdict::Start, _) => return Ok(true),
            (Verdict::Rest | Verdict::Join, _) => return Ok(false),
            (Verdict::Refuse, _) => {
                return Err(Failure::msg(
                    "the node's role is that of the founder of consensus, but its data are of \
                     another member: take the role from it, and give it again",
                ));
            }
        }
    }
}

/// Gets what a join needs from the curators, for as long as it takes.
async fn join(worker: &Worker, member: &Member, id: MemberId) -> Outcome {
    let mut said = String::new();
    worker.connection.watch().next().await?;
    loop {
        match tokio::time::timeout(ATTEMPT_BOUND, get_ready(worker, member, id)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => {
                let why = error.to_string();
                if said != why {
                    tracing::warn!("cannot join consensus yet: {why}");
                    said = why;
                }
            }
            Err(_) => tracing::warn!("cannot join consensus yet: no answer for {ATTEMPT_BOUND:?}"),
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Peer files first, the record last: what was cut off is done again.
async fn get_ready(worker: &Worker, member: &Member, id: MemberId) -> Outcome {
    let joining = ask_for_members(worker, member, id).await?;
    let connection = worker.connection.get().ok_or(event::Closed)?;
    let request = IssueCertificateRequest {
        kind: Some(Kind::EtcdPeer(EtcdPeer {})),
    };
    let issued = connection.curator().issue_certificate(request).await;
    let issued = issued.map_err(refused)?.into_inner();
    let etcd = worker.root.data.etcd();
    pki::save_peer(
        &etcd.peer(),
        &member.credentials.key,
        &issued.certificate,
        &issued.ca_certificate,
    )?;
    standing::save(&etcd, &joining)?;
    tracing::info!(member = %id, "this node joins consensus");
    Ok(())
}

async fn ask_for_members(
    worker: &Worker,
    member: &Member,
    id: MemberId,
) -> Result<Joining, Failure> {
    let connection = worker.connection.get().ok_or(event::Closed)?;
    let mut curator = connection.curator();
    let status = curator.get_consensus_status(GetConsensusStatusRequest {});
    let status = status.await.map_err(refused)?.into_inner();
    initial_cluster(&status, member.node_id, id)
}

/// All members by their node IDs, as etcd wants to know them.
fn initial_cluster(
    status: &GetConsensusStatusResponse,
    own: NodeId,
    id: MemberId,
) -> Result<Joining, Failure> {
    let own = own.to_string();
    let known = |member: &&hearth_api::v1::ConsensusMemberStatus| {
        member.member_id == id.0 && member.node_id == own
    };
    if !status.members.iter().any(|member| known(&member)) {
        return Err(Failure::msg(format!(
            "the curators know of no member {id} of consensus on this node"
        )));
    }
    let members = status.members.iter().flat_map(|member| {
        let urls = member.peer_urls.iter();
        urls.map(|url| format!("{}={url}", member.node_id))
    });
    Ok(Joining {
        member: id,
        initial_cluster: members.collect::<Vec<_>>().join(","),
    })
}

/// Keeps the record of the others true until etcd has taken part, which wants
/// it to be exact: they may change meanwhile.
pub(super) async fn keep_members_true(worker: &Worker, member: &Member, id: MemberId) -> Failure {
    let etcd = worker.root.data.etcd();
    while !standing::has_joined(&etcd) {
        tokio::time::sleep(RETRY_DELAY).await;
        let asked = tokio::time::timeout(ATTEMPT_BOUND, ask_for_members(worker, member, id)).await;
        let Ok(Ok(joining)) = asked else {
            continue;
        };
        match standing::load(&etcd) {
            Ok(Some(known)) if known != joining => {
                if let Err(error) = standing::save(&etcd, &joining) {
                    return error.into();
                }
            }
            Ok(_) => {}
            Err(error) => return error.into(),
        }
    }
    std::future::pending().await
}
