//! The cable of a network card, for as long as a machine runs.

use serde_json::json;

use super::Vm;
use crate::qmp::QmpError;

impl Vm {
    /// Plugs the cable of a card, by its index, in or out: the guest's carrier follows.
    ///
    /// # Errors
    /// If the command fails, as for a card that the machine does not have or that has no cable.
    pub async fn set_cable(&self, card: usize, is_plugged: bool) -> Result<(), QmpError> {
        let link = json!({ "name": format!("net{card}"), "up": is_plugged });
        self.qmp().execute("set_link", link).await.map(drop)
    }
}
