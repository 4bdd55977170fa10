//! What the machine is told: what was found at boot, and results of its work.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::identity::{NodeCredentials, PublicKey};
use hearth_api::recovery::console::WrappedRecordKey;
use hearth_api::v1::ClusterDirectory;
use hearth_host::storage::header::HeaderState;
use hearth_parameters::Parameters;

use crate::sealed::{Founding, Recovery, Registering, Stored};

/// The parameters with which the machine booted.
#[derive(Clone, Debug)]
pub enum ParametersInput {
    /// Valid parameters.
    Parameters(Arc<Parameters>),
    /// Invalid parameters, and the reason.
    Unusable(String),
    /// No parameters.
    Nothing,
}

/// The sealed configuration on the ESP.
#[derive(Clone, Debug)]
pub enum SealedState {
    /// It could be read.
    Stored(Stored),
    /// It is whole, but the TPM does not release its key.
    Locked {
        /// Why not.
        why: String,
        /// Its key for the owner, if it has one.
        recovery: Option<WrappedRecordKey>,
    },
    /// It is damaged, and how.
    Corrupt(String),
}

/// What the boot finds on the disk.
#[derive(Clone, Debug)]
pub struct DiskState {
    /// The sealed configuration on the ESP.
    pub sealed: SealedState,
    /// The header of the data partition.
    pub header: HeaderState,
}

/// The keys and IDs that an enrolment generates.
#[derive(Clone, Debug)]
pub enum Keys {
    /// For the first node of a cluster.
    Founding(Arc<Founding>),
    /// For a node that registers.
    Registering(Arc<Registering>),
}

/// What a node has received by a commit.
#[derive(Clone, Debug)]
pub struct Committed {
    /// Its key and certificates.
    pub credentials: Arc<NodeCredentials>,
    /// Addresses of curators.
    pub directory: Arc<ClusterDirectory>,
    /// The cluster owner's public key, if the cluster has told it.
    pub owner: Option<PublicKey>,
    /// The owner's way to the cluster unlock key, if the cluster has a recovery recipient.
    pub recovery: Option<Recovery>,
}

/// Why a task failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A temporary error: retried with backoff.
    Again(String),
    /// The cluster waits for something else first. It says when to ask again.
    NotYet {
        /// What the node is waiting for.
        reason: String,
        /// The delay before the next attempt.
        ask_again: Duration,
    },
    /// The cluster has refused the request. It may succeed after an operator has acted, so it is
    /// retried rarely.
    Denied(String),
    /// Final: it must not be retried.
    Refuse(String),
}
