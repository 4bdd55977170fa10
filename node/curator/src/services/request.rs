//! Validation of fields that several requests have.

use hearth_api::identity::{NodeId, P256PublicKey};
use hearth_cluster::decisions::Rejection;
use tonic::Status;

/// Maximum number of characters of a boot ID; a UUID has 36.
const LONGEST_BOOT_ID: usize = 64;

pub(super) fn parse_node_id(id: &str) -> Result<NodeId, Status> {
    id.parse()
        .map_err(|error| Status::invalid_argument(format!("node_id: {error}")))
}

pub(super) fn check_boot_id(boot_id: &str) -> Result<(), Status> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if boot_id.is_empty() || boot_id.len() > LONGEST_BOOT_ID || !boot_id.bytes().all(good) {
        return Err(Status::invalid_argument(
            "boot_id: expected 1 to 64 letters, digits and \"-\", as in \
             /proc/sys/kernel/random/boot_id",
        ));
    }
    Ok(())
}

/// Checks that an enum's value is one that this curator knows; prost reads others as 0.
pub(super) fn known<E: Into<i32> + Copy>(
    field: &'static str,
    value: E,
    number: i32,
) -> Result<E, Rejection> {
    if value.into() == number {
        return Ok(value);
    }
    Err(Rejection::Field {
        field,
        wanted: "a value that this curator knows",
        found: number.to_string(),
    })
}

/// The P-256 key for which a certificate is requested, if any.
pub(super) fn p256_key(field: &[u8]) -> Result<Option<P256PublicKey>, Rejection> {
    P256PublicKey::from_field(field).map_err(|error| Rejection::Field {
        field: "p256_public_key",
        wanted: "an uncompressed point of P-256",
        found: error.to_string(),
    })
}

/// The rejection of an enum or oneof that is not set.
pub(super) fn unspecified(field: &'static str) -> Rejection {
    Rejection::Field {
        field,
        wanted: "a value that this curator knows",
        found: "none".into(),
    }
}
