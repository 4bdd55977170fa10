//! The network configuration that an operator has set on a running node, on the ESP.
//!
//! A node has its network configuration from its parameters, or from the copy of them that was made at enrolment. An operator
//! can set another one, which is used from then on, also by later boots. It is kept together with that of the
//! parameters at that time: once the parameters say something else, somebody has changed them afterwards, and they are
//! used. So a machine that nobody reaches any more can always be brought back by its parameters.
//!
//! It is stored apart from the sealed configuration: it is not secret, is needed before anything is unsealed, and has another writer.
//! If it cannot be read, the node goes on with its parameters and says so.

use std::sync::{Mutex, PoisonError};

use hearth_api::private::{NetworkSetting as Message, StoredNetwork};
use hearth_api::v1::NetworkConfig;
use hearth_parameters::{Network, Problem};
use hearth_sys::files::FileError;
use hearth_sys::slots::{FileSlot, Loaded, SlotError, SlotFormat, SlotPair};
use prost::{DecodeError, Message as _};

use crate::layout::Esp;

const VERSION: u32 = 1;
const FORMAT: SlotFormat = SlotFormat {
    magic: *b"HRTHNETW",
    version: VERSION,
};

/// A network configuration that an operator has set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkSetting {
    /// What is used.
    pub network: Network,
    /// That of the parameters when it was set.
    pub parameters: Network,
}

impl NetworkSetting {
    /// Whether it is used on a machine with these parameters.
    pub fn applies_to(&self, parameters: &Network) -> bool {
        self.parameters == *parameters
    }
}

/// Why the setting cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum NetworkSettingError {
    /// The slots cannot be read or written, or neither is valid.
    #[error("cannot access the network configuration on the ESP")]
    Slots(#[from] SlotError),
    /// The directory of the state files cannot be created.
    #[error("cannot create the network configuration on the ESP")]
    File(#[from] FileError),
    /// A slot is valid, but its content cannot be decoded.
    #[error("cannot decode the network configuration on the ESP")]
    Content(#[from] DecodeError),
    /// A network configuration that this release does not accept.
    #[error("the network configuration on the ESP: set_by_operator.{0}")]
    Field(#[source] Problem),
}

/// The store on an ESP. A node has one instance, because it remembers which slot's last write failed.
#[derive(Debug)]
pub struct NetworkSettingStore {
    esp: Esp,
    slots: Mutex<SlotPair<FileSlot>>,
}

impl NetworkSettingStore {
    /// The store on this ESP.
    pub fn new(esp: &Esp) -> Self {
        Self {
            esp: esp.clone(),
            slots: Mutex::new(esp.network().slots(&[FORMAT])),
        }
    }

    /// Reads the setting; `None` if there is none.
    pub fn load(&self) -> Result<Option<NetworkSetting>, NetworkSettingError> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        match slots.load()? {
            Loaded::Absent | Loaded::NeverCompleted => Ok(None),
            Loaded::Value { payload, .. } => decode(&payload),
        }
    }

    /// Replaces the setting, durably. `None`: that of the parameters is used.
    pub fn save(&self, setting: Option<&NetworkSetting>) -> Result<(), NetworkSettingError> {
        self.esp.make_directories()?;
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.save_over(&encode(setting))?;
        Ok(())
    }
}

/// Decodes the record in a slot.
pub fn decode(record: &[u8]) -> Result<Option<NetworkSetting>, NetworkSettingError> {
    let Some(setting) = StoredNetwork::decode(record)?.set_by_operator else {
        return Ok(None);
    };
    let parse = |message: Option<NetworkConfig>| {
        Network::parse(message.unwrap_or_default()).map_err(NetworkSettingError::Field)
    };
    Ok(Some(NetworkSetting {
        network: parse(setting.network_config)?,
        parameters: parse(setting.parameters)?,
    }))
}

/// The record in a slot.
pub fn encode(setting: Option<&NetworkSetting>) -> Vec<u8> {
    let set_by_operator = setting.map(|setting| Message {
        network_config: setting.network.to_message(),
        parameters: setting.parameters.to_message(),
    });
    let record = StoredNetwork {
        version: VERSION,
        set_by_operator,
    };
    record.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_api::stored_form;

    use super::*;
    use crate::layout::Root;

    fn network(address: &str) -> Network {
        let message = NetworkConfig {
            addresses: vec![address.to_owned()],
            ..NetworkConfig::default()
        };
        Network::parse(message).unwrap()
    }

    fn setting() -> NetworkSetting {
        NetworkSetting {
            network: network("192.0.2.10/24"),
            parameters: network("198.51.100.7/24"),
        }
    }

    #[test]
    fn a_setting_is_kept_and_taken_back() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::under(base.path());
        let load = || NetworkSettingStore::new(&root.esp).load().unwrap();
        assert_eq!(load(), None);
        let store = NetworkSettingStore::new(&root.esp);
        fs::create_dir(root.esp.path()).unwrap();
        store.save(Some(&setting())).unwrap();
        assert_eq!(load(), Some(setting()));
        // Every device by itself is a setting, too.
        let automatic = NetworkSetting {
            network: Network::default(),
            ..setting()
        };
        store.save(Some(&automatic)).unwrap();
        assert_eq!(load(), Some(automatic));
        store.save(None).unwrap();
        assert_eq!(load(), None);
    }

    #[test]
    fn damage_is_an_error_and_the_next_setting_replaces_it() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::under(base.path());
        let store = NetworkSettingStore::new(&root.esp);
        fs::create_dir(root.esp.path()).unwrap();
        store.save(Some(&setting())).unwrap();
        for path in root.esp.network().paths() {
            fs::write(path, b"noise").unwrap();
        }
        let error = store.load().unwrap_err();
        assert!(matches!(error, NetworkSettingError::Slots(_)), "{error}");
        store.save(Some(&setting())).unwrap();
        assert_eq!(store.load().unwrap(), Some(setting()));
    }

    #[test]
    fn changed_parameters_are_used() {
        assert!(setting().applies_to(&setting().parameters));
        assert!(!setting().applies_to(&Network::default()));
    }

    #[test]
    fn the_stored_form_stays() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::under(base.path());
        fs::create_dir(root.esp.path()).unwrap();
        let store = NetworkSettingStore::new(&root.esp);
        store.save(Some(&setting())).unwrap();
        let [a, b] = root.esp.network().paths();
        let written = fs::read(a).unwrap();
        assert_eq!(fs::read(b).unwrap(), written);
        let stored = stored_form!("network-setting.slot", written);
        for path in root.esp.network().paths() {
            fs::write(path, &stored).unwrap();
        }
        assert_eq!(store.load().unwrap(), Some(setting()));
    }
}
