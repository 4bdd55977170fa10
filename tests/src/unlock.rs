//! A machine that waits for its owner, unlocked as by `hearthctl cluster unlock`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, ensure};
use hearth_api::names;
use hearth_api::tls::wall_clock;
use hearth_operator::unlock::{Keys, Outcome, Scope, Search, unlock};

use crate::bounds;
use crate::node::Running;

impl Running {
    /// Unlocks it with these keys, as the only node of its cluster. Wrong keys are no error: the outcome says so.
    ///
    /// # Errors
    /// If it does not wait for its owner.
    pub async fn unlock(&self, keys: &Keys) -> anyhow::Result<Outcome> {
        let address = self.forwarded(names::PORT_UNLOCK);
        let address = address.context("the port for unlocking is not forwarded")?;
        let search = Search {
            endpoints: vec![address.into()],
            routes: BTreeMap::new(),
            cluster: None,
            running: BTreeSet::new(),
            timeout: bounds::CALL,
            clock: wall_clock(),
        };
        let found = search.find().await?;
        ensure!(
            !found.locked.is_empty(),
            "it does not wait for its owner: {:?}\n{}",
            found.silent,
            self.tail()
        );
        Ok(unlock(&found, keys, Scope::Quorum, bounds::CALL, |_| {}).await)
    }
}
