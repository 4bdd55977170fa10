//! gRPC statuses of errors that the caller did not cause, in one place, so that all methods return
//! the same.

use hearth_cluster::state::RecordError;
use hearth_consensus::ConsensusError;
use tonic::Status;

/// The status for a call that failed because of etcd. Logs the error.
pub fn unavailable(error: &ConsensusError) -> Status {
    tracing::warn!("call failed: {error}");
    if error.is_full() {
        return Status::resource_exhausted(
            "etcd's database has reached its quota, and nothing can be written until space is \
             freed: see `hearthctl etcd members`",
        );
    }
    Status::unavailable(format!(
        "etcd did not answer this curator ({error}): use another one, or retry"
    ))
}

/// The status for a call that needs a record that this curator cannot read. Logs the error.
pub fn unusable(error: &RecordError) -> Status {
    tracing::error!("{error}");
    Status::internal(error.to_string())
}
