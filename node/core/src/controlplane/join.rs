//! Reconciles etcd's data on disk with the node's role: start, join or wipe.

use std::time::Duration;

use hearth_agent::refused;
use hearth_api::identity::NodeId;
use hearth_api::tls::OwnCertificate;
use hearth_api::v1::issue_certificate_request::{EtcdPeer, Kind};
use hearth_api::v1::{
    GetConsensusStatusRequest, GetConsensusStatusResponse, IssueCertificateRequest,
};
use hearth_base::event;
use hearth_base::supervisor::{Failure, Outcome};
use hearth_consensus::member_record::{self, StartMode};
use hearth_consensus::{Joining, MemberId};
use hearth_host::pki;

use super::Worker;

/// Delay between two attempts to get what a join needs.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Bound of one attempt.
const ATTEMPT_BOUND: Duration = Duration::from_secs(10);

/// Reconciles the disk with the role. Returns whether etcd is to be started.
pub(super) async fn prepare(
    worker: &Worker,
    own: &OwnCertificate,
    role: Option<MemberId>,
) -> Result<bool, Failure> {
    let etcd = worker.root.data.etcd();
    loop {
        let found = member_record::find(&etcd)?;
        match (member_record::judge(role, found), role) {
            (StartMode::Wipe, _) => {
                tracing::warn!(
                    "etcd data on disk belong to a member that this node no longer is: \
                     wiping etcd data"
                );
                member_record::wipe(&etcd)?;
            }
            (StartMode::Join, Some(role)) => join(worker, own, role).await?,
            (StartMode::Start, _) => return Ok(true),
            (StartMode::Rest | StartMode::Join, _) => return Ok(false),
            (StartMode::Refuse, _) => {
                return Err(Failure::msg(
                    "the role names the bootstrap member of etcd, but the data on disk belong to \
                     another member: remove the role from this node and assign it again",
                ));
            }
        }
    }
}

/// Gets what a join needs from the curators, and retries until that succeeds.
async fn join(worker: &Worker, own: &OwnCertificate, id: MemberId) -> Outcome {
    let mut said = String::new();
    worker.connection.watch().next().await?;
    loop {
        match tokio::time::timeout(ATTEMPT_BOUND, get_ready(worker, own, id)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => {
                let why = error.to_string();
                if said != why {
                    tracing::warn!("cannot join etcd cluster yet: {why}");
                    said = why;
                }
            }
            Err(_) => {
                tracing::warn!("cannot join etcd cluster yet: no response within {ATTEMPT_BOUND:?}")
            }
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Saves the peer certificate first and the member record last, so that an interrupted attempt is
/// repeated.
async fn get_ready(worker: &Worker, own: &OwnCertificate, id: MemberId) -> Outcome {
    let joining = ask_for_members(worker, own, id).await?;
    let connection = worker.connection.get().ok_or(event::Closed)?;
    let request = IssueCertificateRequest {
        kind: Some(Kind::EtcdPeer(EtcdPeer {})),
    };
    let issued = connection.curator().issue_certificate(request).await;
    let issued = issued.map_err(refused)?.into_inner();
    let etcd = worker.root.data.etcd();
    pki::save_peer(
        &etcd.peer(),
        own.key(),
        &issued.certificate,
        &issued.ca_certificate,
    )?;
    member_record::save(&etcd, &joining)?;
    tracing::info!(member = %id, "joining etcd cluster");
    Ok(())
}

async fn ask_for_members(
    worker: &Worker,
    own: &OwnCertificate,
    id: MemberId,
) -> Result<Joining, Failure> {
    let connection = worker.connection.get().ok_or(event::Closed)?;
    let mut curator = connection.curator();
    let status = curator.get_consensus_status(GetConsensusStatusRequest {});
    let status = status.await.map_err(refused)?.into_inner();
    initial_cluster(&status, own.node(), id)
}

/// All members by their node IDs, in the form of etcd's `--initial-cluster`.
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
            "the curators list no etcd member {id} on this node"
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

/// Keeps the saved member list up to date until etcd has joined. etcd starts only with the exact
/// list, and the members may change in the meantime.
pub(super) async fn keep_members_true(
    worker: &Worker,
    own: &OwnCertificate,
    id: MemberId,
) -> Failure {
    let etcd = worker.root.data.etcd();
    while !member_record::has_joined(&etcd) {
        tokio::time::sleep(RETRY_DELAY).await;
        let asked = tokio::time::timeout(ATTEMPT_BOUND, ask_for_members(worker, own, id)).await;
        let Ok(Ok(joining)) = asked else {
            continue;
        };
        match member_record::load(&etcd) {
            Ok(Some(known)) if known != joining => {
                if let Err(error) = member_record::save(&etcd, &joining) {
                    return error.into();
                }
            }
            Ok(_) => {}
            Err(error) => return error.into(),
        }
    }
    std::future::pending().await
}
