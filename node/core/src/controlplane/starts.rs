//! Counts the starts of etcd, and finds out whether this is the right disk: see [`hearth_consensus::starts`].
//!
//! A member asks curators of other nodes what they remember, for a short time only: when a whole cluster starts, none of
//! them is there. A member that knows no other one, by its directory on the ESP, asks nobody, and its start takes no longer.

use std::sync::Arc;
use std::time::Duration;

use hearth_base::supervisor::Failure;
use hearth_consensus::MemberId;
use hearth_consensus::starts::{self, Behind, Known, Starts, TpmCounter};
use hearth_host::handover::MemberData;
use hearth_host::prover::{Prover, ProverError};
use tokio::time::{sleep, timeout};

use super::Worker;

/// Delay between two attempts.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Who may remember how often etcd was started.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Witnesses {
    /// The node uses its TPM.
    tpm: bool,
    /// There are curators on other nodes.
    curators: bool,
}

impl Witnesses {
    pub(super) fn of(member: &MemberData) -> Self {
        let own = member.own.node().to_string();
        Self {
            tpm: member.uses_tpm,
            curators: member.directory.nodes.iter().any(|node| node.id != own),
        }
    }
}

/// Counts a start of etcd as this member, unless the disk is behind.
pub(super) async fn count(
    worker: &Worker,
    witnesses: Witnesses,
    role: MemberId,
) -> Result<Result<Starts, Behind>, Failure> {
    let etcd = worker.root.data.etcd();
    let disk = starts::load(&etcd)?;
    let prover = worker.prover.as_ref().filter(|_| witnesses.tpm);
    let tpm = match prover {
        Some(prover) => counter(prover).await,
        None => None,
    };
    let curators = match witnesses.curators {
        true => timeout(worker.ask_bound, ask(worker, role))
            .await
            .ok()
            .flatten(),
        false => None,
    };
    let next = match starts::next(role, disk, Known { curators, tpm }) {
        Ok(next) => next,
        Err(behind) => return Ok(Err(behind)),
    };
    // The disk first: it is never behind by a power cut.
    starts::save(&etcd, next)?;
    if let (Some(prover), Some(_)) = (prover, tpm)
        && let Err(error) = prover.count().await
    {
        warn(&error);
    }
    Ok(Ok(next))
}

/// The TPM's counter, made if there is none. A TPM that fails is no reason not to start.
async fn counter(prover: &Arc<Prover>) -> Option<TpmCounter> {
    let read = async {
        let (value, is_new) = match prover.counter().await? {
            Some(value) => (value, false),
            None => (prover.count().await?, true),
        };
        Ok(TpmCounter { value, is_new })
    };
    read.await.inspect_err(warn).ok()
}

fn warn(error: &ProverError) {
    tracing::warn!(
        "cannot count the starts of etcd by the TPM: {}",
        hearth_api::chain(error)
    );
}

/// What curators remember of this member. Asks until one answers.
async fn ask(worker: &Worker, role: MemberId) -> Option<u64> {
    worker.connection.watch().next().await.ok()?;
    loop {
        let connection = worker.connection.get()?;
        match connection.member_starts().await {
            Ok(known) => {
                let known = known.filter(|known| known.member_id == role.0);
                return known.map(|known| known.count);
            }
            Err(error) => {
                tracing::debug!("cannot ask curators for the starts of etcd yet: {error}");
            }
        }
        sleep(RETRY_DELAY).await;
    }
}
