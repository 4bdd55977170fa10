//! The replacement of the owner and of the recovery recipient.
//!
//! All replacements are kept: a node that was off during some of them follows them one after the
//! other ([`hearth_api::ownership`]).

use hearth_api::ownership::Replacement;
use hearth_api::v1::OwnerReplacement;
use hearth_consensus::fenced::Write;

use super::{Rejection, Versioned, put_cluster};
use crate::state::FullCluster;

/// Maximum number of replacements: each node gets all of them whenever it joins.
const MOST_REPLACEMENTS: usize = 64;

/// Decides about a replacement. `None` if it was made before.
pub fn replace(
    message: &OwnerReplacement,
    found: &Versioned<FullCluster>,
) -> Result<Option<Write>, Rejection> {
    let cluster = &found.content;
    let replacement = Replacement::verify(cluster.id(), message)
        .map_err(|error| Rejection::Replacement(error.to_string()))?;
    let before = cluster.owner_replacements();
    if before.last() == Some(message) {
        return Ok(None);
    }
    let owner = cluster.owner();
    if replacement.former != owner {
        return Err(Rejection::Field {
            field: "replacement.former_owner_public_key",
            wanted: "the key of the present owner",
            found: replacement.former.to_string(),
        });
    }
    if before.len() >= MOST_REPLACEMENTS {
        return Err(Rejection::TooManyReplacements(MOST_REPLACEMENTS));
    }
    let value = cluster.encode_replaced(message);
    Ok(Some(put_cluster(found, &value)))
}
