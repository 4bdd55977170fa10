//! What a caller is told of errors that are no fault of its own, in one place:
//! whatever asks etcd says the same.

use hearth_consensus::ConsensusError;
use tonic::Status;

use super::state::RecordError;

/// What a caller is told when etcd did not do its part.
pub fn unavailable(error: &ConsensusError) -> Status {
    tracing::warn!("a call failed: {error}");
    if error.is_full() {
        return Status::resource_exhausted(
            "the cluster's store is full, and nothing can be written until there is room again: \
             `hearthctl etcd members` shows it",
        );
    }
    Status::unavailable(format!(
        "consensus did not answer this curator ({error}): ask another one, or try again"
    ))
}

/// A record in etcd is one that this curator cannot use.
pub fn unusable(error: &RecordError) -> Status {
    tracing::error!("{error}");
    Status::internal(error.to_string())
}
