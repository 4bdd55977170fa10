//! `hearthctl kubernetes rotate-secrets-key` and `recover-secrets-key`: the keys that encrypt Secrets.

use std::path::Path;
use std::time::Duration;

use hearth_api::client::{Channel, within};
use hearth_api::identity::ClusterId;
use hearth_api::recovery::{RecoveryError, RecoveryKey, RecoveryRecipient};
use hearth_api::secrets_keys::{Generation, find_wrapped, parse_wrapped, wrapped_message};
use hearth_api::v1::get_secrets_keys_response::Key;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::provide_secrets_keys_request::Provided;
use hearth_api::v1::{
    ConfigureClusterRequest, GetSecretsKeysRequest, GetSecretsKeysResponse,
    ProvideSecretsKeysRequest, WrappedSecretsKey,
};
use tonic::Status;

use super::super::{INFO, cluster_info, or_interrupted, passing, print, print_json, tell};
use crate::args::{Format, Global};
use crate::failure::{Failure, Kind};
use crate::output::{SecretsKeys, safe};
use crate::{connection, keys};

const SETTING: &str = "kubernetes.secrets_key_generation";
/// Polling interval of a wait.
const LOOK: Duration = Duration::from_secs(1);

/// The calls of both commands.
struct Calls<'a> {
    global: &'a Global,
    management: ManagementClient<Channel>,
}

impl<'a> Calls<'a> {
    async fn open(global: &'a Global) -> Result<Self, Failure> {
        Ok(Self {
            global,
            management: ManagementClient::new(connection::open(global).await?),
        })
    }

    async fn keys(&mut self) -> Result<GetSecretsKeysResponse, Status> {
        let call = self.management.get_secrets_keys(GetSecretsKeysRequest {});
        let keys = within(self.global.timeout, call).await;
        keys.map(tonic::Response::into_inner)
    }
}

fn unread(status: Status) -> Failure {
    Failure::call("get the keys of Secrets", status)
}

pub(super) async fn rotate(global: &Global, wait: Duration, form: Format) -> Result<(), Failure> {
    let mut calls = Calls::open(global).await?;
    let latest = calls.keys().await.map_err(unread)?.keys.pop();
    let Some(latest) = latest.map(|key| key.generation) else {
        return Err(Failure::new(Kind::Cluster, "replace the key of Secrets")
            .because("there is none yet")
            .advise(
                "assign the role kubernetes-controller to a node, and wait until it is ready",
            ));
    };
    let info = cluster_info(global, &mut calls.management, INFO).await?;
    let mut configuration = info.configuration.unwrap_or_default();
    let kubernetes = configuration.kubernetes.get_or_insert_default();
    // The setting is ahead of the keys while no controller is running.
    let next = latest.max(kubernetes.secrets_key_generation) + 1;
    kubernetes.secrets_key_generation = next;
    let request = ConfigureClusterRequest {
        version: info.configuration_version,
        configuration: Some(configuration),
        field_mask: vec![SETTING.to_owned()],
    };
    let changed = within(global.timeout, calls.management.configure_cluster(request)).await;
    changed.map_err(|status| Failure::call("change the cluster settings", status))?;

    let mut keys = SecretsKeys::from(&calls.keys().await.map_err(unread)?);
    let waited = match wait.is_zero() {
        true => Ok(()),
        false => until_rewritten(&mut calls, next, wait, &mut keys).await,
    };
    show(&keys, form)?;
    waited
}

/// Waits until all Secrets are encrypted with the key of this generation. `keys` is what was read last.
async fn until_rewritten(
    calls: &mut Calls<'_>,
    generation: u32,
    bound: Duration,
    keys: &mut SecretsKeys,
) -> Result<(), Failure> {
    let what = "wait until all Secrets are rewritten";
    let goes_on = "the controllers go on without this command";
    let wait = or_interrupted(what, goes_on, follow(calls, generation, keys));
    tokio::time::timeout(bound, wait).await.unwrap_or_else(|_| {
        Err(Failure::new(Kind::Unreachable, what)
            .because(format!("they are not within {bound:?}"))
            .advise(goes_on))
    })
}

async fn follow(
    calls: &mut Calls<'_>,
    generation: u32,
    keys: &mut SecretsKeys,
) -> Result<(), Failure> {
    let mut looks = tokio::time::interval(LOOK);
    let mut told = String::new();
    loop {
        looks.tick().await;
        match calls.keys().await {
            Ok(known) => {
                *keys = SecretsKeys::from(&known);
                match keys.pending(generation) {
                    None => return Ok(()),
                    Some(progress) => tell(&mut told, progress),
                }
            }
            Err(status) if passing(&status) => {
                let progress = format!("no answer: {}", safe(status.message()));
                tell(&mut told, progress);
            }
            Err(status) => return Err(unread(status)),
        }
    }
}

pub(super) async fn recover(global: &Global, file: &Path, form: Format) -> Result<(), Failure> {
    let recovery = keys::recovery_key(file)?;
    let mut calls = Calls::open(global).await?;
    let info = cluster_info(global, &mut calls.management, INFO).await?;
    let cluster = ClusterId::try_from(&info.cluster_id[..])
        .map_err(|error| Failure::new(Kind::Cluster, INFO).because(error))?;
    let known = calls.keys().await.map_err(unread)?;
    let provided = provided(&known, cluster, &recovery)?;
    if !provided.is_empty() {
        let request = ProvideSecretsKeysRequest { keys: provided };
        let call = calls.management.provide_secrets_keys(request);
        within(global.timeout, call)
            .await
            .map_err(|status| Failure::call("give access to the keys of Secrets", status))?;
    }
    let before = SecretsKeys::from(&known);
    match &before.without_access()[..] {
        [] => eprintln!("hearthctl: every controller has access already"),
        given => eprintln!("hearthctl: gave access to {}", safe(&given.join(", "))),
    }
    show(
        &SecretsKeys::from(&calls.keys().await.map_err(unread)?),
        form,
    )
}

fn show(keys: &SecretsKeys, form: Format) -> Result<(), Failure> {
    match form {
        Format::Table => print(&keys.text()),
        Format::Json => print_json(keys),
    }
}

/// The keys that controllers have no access to, wrapped for them.
fn provided(
    known: &GetSecretsKeysResponse,
    cluster: ClusterId,
    recovery: &RecoveryKey,
) -> Result<Vec<Provided>, Failure> {
    let mut all = Vec::new();
    for key in &known.keys {
        let recipients = known.controllers.iter().map(|one| &one.recipient);
        let without: Vec<_> = recipients
            .filter(|to| find_wrapped(&key.wrapped, to).is_none())
            .collect();
        if without.is_empty() {
            continue;
        }
        let generation = Generation {
            cluster,
            number: key.generation,
        };
        let wrapped =
            find_wrapped(&key.wrapped, recovery.recipient().as_bytes()).ok_or_else(|| {
                failed(key, "it is not encrypted to this recovery key").advise(
                    "use the recovery key that the cluster had when the key was last wrapped",
                )
            })?;
        let opened =
            parse_wrapped(wrapped).and_then(|(_, wrapped)| generation.recover(recovery, &wrapped));
        let opened = opened.map_err(|error| failed(key, error))?;
        if generation.id(&opened) != key.id {
            return Err(failed(key, "it opens as another key than its ID says"));
        }
        for to in without {
            let wrap = |to: &[u8]| -> Result<WrappedSecretsKey, RecoveryError> {
                let recipient = RecoveryRecipient::try_from(to)?;
                let wrapped = generation.wrap(&recipient, &opened)?;
                Ok(wrapped_message(&recipient, &wrapped))
            };
            all.push(Provided {
                generation: key.generation,
                wrapped: Some(wrap(to).map_err(|error| failed(key, error))?),
            });
        }
    }
    Ok(all)
}

fn failed(key: &Key, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
    let what = format!("open the key of Secrets {}", safe(&key.id));
    Failure::new(Kind::Cluster, what).because(why)
}
