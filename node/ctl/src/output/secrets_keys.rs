//! The keys that encrypt Secrets, as they are printed.

use hearth_api::secrets_keys::find_wrapped;
use hearth_api::v1::GetSecretsKeysResponse;
use serde::Serialize;

use crate::table::{Table, printable};

/// Output of the commands about keys of Secrets.
#[derive(Debug, Serialize)]
pub(crate) struct SecretsKeys {
    keys: Vec<Key>,
    controllers: Vec<Controller>,
}

#[derive(Debug, Serialize)]
struct Key {
    generation: u32,
    id: String,
    /// Whether all Secrets are encrypted with this key or a later one.
    rewritten: bool,
}

#[derive(Debug, Serialize)]
struct Controller {
    node_id: String,
    /// The generation with which its API server encrypts; 0 until it does.
    generation: u32,
    /// Whether it has access to all keys.
    has_access: bool,
}

impl From<&GetSecretsKeysResponse> for SecretsKeys {
    fn from(known: &GetSecretsKeysResponse) -> Self {
        let keys = known.keys.iter().map(|key| Key {
            generation: key.generation,
            id: key.id.clone(),
            rewritten: key.rewritten,
        });
        let controllers = known.controllers.iter().map(|one| {
            let mut keys = known.keys.iter();
            Controller {
                node_id: one.node_id.clone(),
                generation: one.generation,
                has_access: keys.all(|key| find_wrapped(&key.wrapped, &one.recipient).is_some()),
            }
        });
        Self {
            keys: keys.collect(),
            controllers: controllers.collect(),
        }
    }
}

impl SecretsKeys {
    /// The IDs of the controllers without access to all keys.
    pub(crate) fn without_access(&self) -> Vec<&str> {
        let controllers = self.controllers.iter().filter(|one| !one.has_access);
        controllers.map(|one| &one.node_id[..]).collect()
    }

    /// What is left to do until all Secrets are encrypted with the key of this generation, or a later one; `None` if
    /// nothing is.
    pub(crate) fn pending(&self, generation: u32) -> Option<String> {
        let Some(latest) = self.keys.last().filter(|key| key.generation >= generation) else {
            return Some("waiting for a controller to generate the key".to_owned());
        };
        if latest.rewritten {
            return None;
        }
        let controllers = self.controllers.iter();
        let late = controllers.filter(|one| one.generation < latest.generation);
        let late: Vec<_> = late.map(|one| printable(&one.node_id)).collect();
        Some(match &late[..] {
            [] => "all controllers use the key: rewriting all Secrets".to_owned(),
            late => format!(
                "waiting for controllers to use the key: {}",
                late.join(", ")
            ),
        })
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let mut keys = Table::new(&["GENERATION", "ID", "SECRETS REWRITTEN"]);
        for key in &self.keys {
            let rewritten = if key.rewritten { "yes" } else { "no" };
            keys.row([
                key.generation.to_string(),
                printable(&key.id),
                rewritten.to_owned(),
            ]);
        }
        let mut controllers = Table::new(&["CONTROLLER", "ACCESS", "ENCRYPTS WITH"]);
        for one in &self.controllers {
            let used = match one.generation {
                0 => "none yet".to_owned(),
                used => format!("generation {used}"),
            };
            let access = if one.has_access { "yes" } else { "no" };
            controllers.row([printable(&one.node_id), access.to_owned(), used]);
        }
        format!("{keys}\n{controllers}")
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::{WrappedSecretsKey, get_secrets_keys_response as parts};

    use super::*;

    fn known(rewritten: bool, used: [u32; 2]) -> SecretsKeys {
        let wrapped = |recipient: u8| WrappedSecretsKey {
            recipient: vec![recipient],
            wrapped_key: Vec::new(),
        };
        let key = |generation, wrapped, rewritten| parts::Key {
            generation,
            id: format!("{generation}-00"),
            wrapped,
            rewritten,
        };
        let controller = |id: u8, generation| parts::Controller {
            node_id: format!("node-{id}"),
            recipient: vec![id],
            generation,
        };
        SecretsKeys::from(&GetSecretsKeysResponse {
            keys: vec![
                key(1, vec![wrapped(1), wrapped(2)], true),
                key(2, vec![wrapped(1)], rewritten),
            ],
            controllers: vec![controller(1, used[0]), controller(2, used[1])],
        })
    }

    #[test]
    fn who_has_no_access_is_named() {
        assert_eq!(known(false, [1, 1]).without_access(), ["node-2"]);
    }

    #[test]
    fn what_a_rotation_waits_for_is_named() {
        let pending = |keys: SecretsKeys, generation| keys.pending(generation);
        let said = pending(known(true, [2, 2]), 3).unwrap();
        assert!(said.contains("generate"), "{said}");
        let said = pending(known(false, [2, 1]), 2).unwrap();
        assert!(said.ends_with(": node-2"), "{said}");
        let said = pending(known(false, [2, 2]), 2).unwrap();
        assert!(said.contains("rewriting"), "{said}");
        assert_eq!(pending(known(true, [2, 1]), 2), None);
    }
}
