//! The order in which parts end that are all told to end at once: what others
//! cannot do without outlives them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::time::timeout;

use super::{GONE_WITHIN, STOP_WITHIN};

/// Held by those without whom a part has nothing to do: it outlives them.
#[derive(Clone, Debug, Default)]
pub struct InUse(Arc<RwLock<()>>);

impl InUse {
    /// For those who use something to end, when all is to end: a program ends,
    /// or is ended, before that.
    pub const USERS: Duration = STOP_WITHIN.saturating_add(GONE_WITHIN);

    /// Holds it.
    pub async fn hold(&self) -> OwnedRwLockReadGuard<()> {
        self.0.clone().read_owned().await
    }

    /// Waits until nobody does, for as long as an end in order takes. `users`
    /// are named when they take longer.
    pub async fn is_over(&self, users: &str) {
        if timeout(Self::USERS, self.0.write()).await.is_err() {
            tracing::warn!(
                "{users} still runs after {:?}; what it uses ends all the same",
                Self::USERS
            );
        }
    }
}
