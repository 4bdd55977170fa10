//! The keys of Kubernetes' Secrets, for an owner who gives access to controllers that cannot get it from another one.
//! The curators open none of them.

use std::collections::BTreeMap;

use hearth_api::recovery::{RecoveryRecipient, WrappedKey};
use hearth_api::secrets_keys::{WRAPPED_KEY, parse_wrapped, wrapped_message};
use hearth_api::v1::get_secrets_keys_response::{Controller, Key};
use hearth_api::v1::{
    GetSecretsKeysResponse, ProvideSecretsKeysRequest, ProvideSecretsKeysResponse,
};
use hearth_cluster::decisions::Rejection;
use hearth_consensus::fenced::WriteError;
use hearth_consensus::secrets_keys::{Known, SecretsKeysError, StoredKey};
use tonic::Status;

use crate::core::Core;
use crate::status::unavailable;

/// Maximum number of keys in a request.
const MOST_KEYS: usize = 4096;
/// Maximum number of attempts, if controllers write the same records at the same time.
const WRITE_ATTEMPTS: usize = 5;

/// All keys and controllers.
pub(super) async fn list(core: &Core) -> Result<GetSecretsKeysResponse, Status> {
    let known = read(core).await?;
    let keys = known.keys.iter().map(|(&generation, read)| {
        let stored = &read.content;
        let wrapped = stored.wrapped.iter();
        Key {
            generation,
            id: stored.id.clone(),
            wrapped: wrapped.map(|(to, key)| wrapped_message(to, key)).collect(),
            rewritten: stored.rewritten,
        }
    });
    let controllers = known.controllers.iter().map(|(node, read)| Controller {
        node_id: node.to_string(),
        recipient: read.content.recipient.as_bytes().to_vec(),
        generation: read.content.generation,
    });
    Ok(GetSecretsKeysResponse {
        keys: keys.collect(),
        controllers: controllers.collect(),
    })
}

async fn read(core: &Core) -> Result<Known, Status> {
    core.secrets_keys.read().await.map_err(|error| match error {
        SecretsKeysError::Consensus(error) => unavailable(&error),
        error @ SecretsKeysError::Field { .. } => {
            tracing::error!("{error}");
            Status::internal(error.to_string())
        }
    })
}

/// A key for a controller.
type Provided = (RecoveryRecipient, WrappedKey);

/// Adds wrapped keys. What is there already is left as it is.
pub(super) async fn provide(
    core: &Core,
    request: ProvideSecretsKeysRequest,
) -> Result<ProvideSecretsKeysResponse, Status> {
    let provided = parse(&request)?;
    for _ in 0..WRITE_ATTEMPTS {
        match write(core, &read(core).await?, &provided).await? {
            Written::All => return Ok(ProvideSecretsKeysResponse {}),
            Written::Conflict => {}
        }
    }
    Err(Status::aborted(
        "the keys of Secrets are changed by others at the same time: retry",
    ))
}

fn parse(request: &ProvideSecretsKeysRequest) -> Result<BTreeMap<u32, Vec<Provided>>, Rejection> {
    let rejection = |field, wanted, found| Rejection::Field {
        field,
        wanted,
        found,
    };
    if request.keys.len() > MOST_KEYS {
        let found = request.keys.len().to_string();
        return Err(rejection("keys", "at most 4096", found));
    }
    let mut all: BTreeMap<u32, Vec<Provided>> = BTreeMap::new();
    for one in &request.keys {
        let wrapped = one.wrapped.clone().unwrap_or_default();
        let parsed = parse_wrapped(&wrapped)
            .map_err(|error| rejection("keys.wrapped", WRAPPED_KEY, error.to_string()))?;
        all.entry(one.generation).or_default().push(parsed);
    }
    Ok(all)
}

enum Written {
    All,
    Conflict,
}

async fn write(
    core: &Core,
    known: &Known,
    provided: &BTreeMap<u32, Vec<Provided>>,
) -> Result<Written, Status> {
    for (generation, keys) in provided {
        let Some(stored) = with(known, *generation, keys)? else {
            continue;
        };
        match core.secrets_keys.put(known, *generation, &stored).await {
            Ok(()) => tracing::info!(
                key = stored.id,
                "the owner has given access to a key of Secrets"
            ),
            Err(WriteError::Conflict) => return Ok(Written::Conflict),
            Err(WriteError::Consensus(error)) => return Err(unavailable(&error)),
        }
    }
    Ok(Written::All)
}

/// The record with these keys added; `None` if it has them already.
fn with(known: &Known, generation: u32, keys: &[Provided]) -> Result<Option<StoredKey>, Rejection> {
    let read = known.keys.get(&generation).ok_or(Rejection::Field {
        field: "keys.generation",
        wanted: "a generation in GetSecretsKeysResponse",
        found: generation.to_string(),
    })?;
    let mut stored = read.content.clone();
    let before = stored.wrapped.len();
    for (recipient, wrapped) in keys {
        let mut controllers = known.controllers.values();
        if !controllers.any(|one| one.content.recipient == *recipient) {
            return Err(Rejection::Field {
                field: "keys.wrapped.recipient",
                wanted: "that of a controller in GetSecretsKeysResponse",
                found: recipient.to_string(),
            });
        }
        if stored.wrapped_for(recipient).is_none() {
            stored.wrapped.push((*recipient, wrapped.clone()));
        }
    }
    Ok((stored.wrapped.len() > before).then_some(stored))
}
