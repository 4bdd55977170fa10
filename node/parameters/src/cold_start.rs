//! The cold-start policy of a new cluster: who opens its encrypted nodes when none of them runs.
//!
//! What the parameters alone can decide is checked when they are parsed ([`check`]). What depends on
//! the machine's TPM is decided when the cluster is created ([`cold_start_policy`]).
//!
//! A policy is refused if the cluster would be lost at the first power cut, or with one broken TPM,
//! and nobody has said that this is acceptable (`accept_loss`).

use hearth_api::v1::{ColdStartPolicy, StorageSecurity, TpmUsage};

use super::Problem;

/// Why a machine cannot create a cluster with these parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ColdStartError {
    /// No policy is configured, and neither TPM nor OWNER is possible.
    #[error(
        "cold_start_policy: expected a TPM that can seal this node's keys (for TPM), a \
         recovery_recipient (for OWNER; `hearthctl owner init` makes a recovery key), or NONE with \
         accept_loss, got no policy, TPM or recipient"
    )]
    Undecided,
    /// Policy TPM, but this node does not seal its keys.
    #[error(
        "cold_start_policy: expected a TPM that can seal this node's keys, as the policy is TPM, \
         got TPM usage {0}: choose OWNER, or set accept_loss"
    )]
    NoTpm(&'static str),
    /// Policy OWNER, but no recovery recipient.
    #[error("cold_start_policy: expected a recovery_recipient, as the policy is OWNER, got none")]
    NoRecipient,
    /// Policy NONE, but not `accept_loss`.
    #[error("cold_start_policy: expected accept_loss, as the policy is NONE")]
    LossNotAccepted,
}

/// The policy of a new cluster. `configured`: that of the parameters, which may be unspecified.
///
/// # Errors
/// If the first node could not be opened by that policy, or none is possible.
pub fn cold_start_policy(
    configured: ColdStartPolicy,
    storage_security: StorageSecurity,
    tpm_usage: TpmUsage,
    has_recipient: bool,
    accept_loss: bool,
) -> Result<ColdStartPolicy, ColdStartError> {
    use ColdStartPolicy::{None, Owner, Tpm, Unspecified};
    let is_sealed = tpm_usage == TpmUsage::PresentAndUsed;
    if storage_security == StorageSecurity::Insecure {
        // There is nothing to unlock.
        return Ok(match configured {
            Unspecified => None,
            policy => policy,
        });
    }
    match configured {
        Unspecified if is_sealed => Ok(Tpm),
        Unspecified if has_recipient => Ok(Owner),
        // accept_loss permits NONE, but may have been set for the TPM that this machine has not.
        Unspecified => Err(ColdStartError::Undecided),
        Tpm if !is_sealed && !accept_loss => Err(ColdStartError::NoTpm(tpm_usage.word())),
        Owner if !has_recipient => Err(ColdStartError::NoRecipient),
        None if !accept_loss => Err(ColdStartError::LossNotAccepted),
        policy => Ok(policy),
    }
}

/// Rejects parameters that are wrong whatever the machine.
pub(super) fn check(
    configured: ColdStartPolicy,
    storage_security: StorageSecurity,
    has_recipient: bool,
    accept_loss: bool,
) -> Result<(), Problem> {
    const RECIPIENT: &str = "cluster_bootstrap.recovery_recipient";
    let (field, wanted, found) = match configured {
        _ if storage_security == StorageSecurity::Insecure => return Ok(()),
        ColdStartPolicy::Owner if !has_recipient => (
            RECIPIENT,
            "32 bytes, as the cold-start policy is OWNER (`hearthctl owner init` makes a recovery \
             key)",
            "none",
        ),
        ColdStartPolicy::None if !accept_loss => (
            "cluster_bootstrap.accept_loss",
            "true, as with cold-start policy NONE the data are lost when all nodes are off",
            "false",
        ),
        _ if !has_recipient && !accept_loss => (
            RECIPIENT,
            "32 bytes (`hearthctl owner init` makes a recovery key), or accept_loss, as without a \
             recovery key the data are lost with the TPMs of the nodes",
            "none",
        ),
        _ => return Ok(()),
    };
    Err(Problem::unwanted(field, wanted, found))
}

#[cfg(test)]
mod tests {
    use ColdStartPolicy::{None as Nobody, Owner, Tpm, Unspecified};
    use StorageSecurity::{AuthenticatedEncrypted, Encrypted, Insecure};
    use TpmUsage::{NotPresent, PresentAndUsed, PresentButUnused};

    use super::*;

    /// For each policy and use of the TPM: the result without recipient and `accept_loss`, with a
    /// recipient, with `accept_loss`, and with both.
    type Row = (
        ColdStartPolicy,
        bool,
        [Result<ColdStartPolicy, ColdStartError>; 4],
    );

    fn encrypted(usage: TpmUsage) -> [Row; 8] {
        let undecided = Err(ColdStartError::Undecided);
        let no_tpm = Err(ColdStartError::NoTpm(usage.word()));
        let no_recipient = Err(ColdStartError::NoRecipient);
        let lost = Err(ColdStartError::LossNotAccepted);
        let owner = [no_recipient, Ok(Owner), no_recipient, Ok(Owner)];
        let nobody = [lost, lost, Ok(Nobody), Ok(Nobody)];
        [
            (Unspecified, true, [Ok(Tpm); 4]),
            (
                Unspecified,
                false,
                [undecided, Ok(Owner), undecided, Ok(Owner)],
            ),
            (Tpm, true, [Ok(Tpm); 4]),
            (Tpm, false, [no_tpm, no_tpm, Ok(Tpm), Ok(Tpm)]),
            (Owner, true, owner),
            (Owner, false, owner),
            (Nobody, true, nobody),
            (Nobody, false, nobody),
        ]
    }

    #[test]
    fn a_policy_is_one_by_which_the_first_node_opens_or_the_loss_is_accepted() {
        let given = [(false, false), (true, false), (false, true), (true, true)];
        for usage in [NotPresent, PresentButUnused, PresentAndUsed] {
            let is_used = usage == PresentAndUsed;
            for (configured, _, wanted) in
                encrypted(usage).into_iter().filter(|row| row.1 == is_used)
            {
                for ((has_recipient, accept_loss), wanted) in given.into_iter().zip(wanted) {
                    let decide = |storage| {
                        cold_start_policy(configured, storage, usage, has_recipient, accept_loss)
                    };
                    let row = format!("{configured:?} {usage:?} {has_recipient} {accept_loss}");
                    assert_eq!(decide(Encrypted), wanted, "{row}");
                    assert_eq!(decide(AuthenticatedEncrypted), wanted, "{row}");
                    let insecure = match configured {
                        Unspecified => Nobody,
                        policy => policy,
                    };
                    assert_eq!(decide(Insecure), Ok(insecure), "{row}");
                    // What is wrong on every machine is rejected with the parameters.
                    let checked = check(configured, Encrypted, has_recipient, accept_loss);
                    if matches!(
                        wanted,
                        Err(ColdStartError::NoRecipient | ColdStartError::LossNotAccepted)
                    ) {
                        assert!(checked.is_err(), "{row}");
                    }
                    assert!(check(configured, Insecure, has_recipient, accept_loss).is_ok());
                }
            }
        }
    }

    #[test]
    fn parameters_without_a_recovery_key_accept_the_loss() {
        for configured in [Unspecified, Tpm, Owner, Nobody] {
            assert!(
                check(configured, Encrypted, false, false).is_err(),
                "{configured:?}"
            );
            assert!(
                check(configured, Encrypted, true, true).is_ok(),
                "{configured:?}"
            );
        }
        for (configured, has_recipient, accept_loss, is_right) in [
            (Unspecified, true, false, true),
            (Unspecified, false, true, true),
            (Tpm, true, false, true),
            (Tpm, false, true, true),
            (Owner, true, false, true),
            (Owner, false, true, false),
            (Nobody, true, false, false),
            (Nobody, false, true, true),
        ] {
            let checked = check(
                configured,
                AuthenticatedEncrypted,
                has_recipient,
                accept_loss,
            );
            assert_eq!(
                checked.is_ok(),
                is_right,
                "{configured:?} {has_recipient} {accept_loss}"
            );
        }
    }
}
