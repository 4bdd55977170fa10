//! Shutdown order of parts that are cancelled at the same time: a service ends after its users.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::time::timeout;

use super::{GONE_WITHIN, STOP_WITHIN};

/// A lock that the users of a service hold; the service ends after they have released it.
#[derive(Clone, Debug, Default)]
pub struct ReadLock(Arc<RwLock<()>>);

impl ReadLock {
    /// How long the service waits for its users: by then a program has exited or been killed.
    pub const USERS: Duration = STOP_WITHIN.saturating_add(GONE_WITHIN);

    /// Acquires the lock, as a user.
    pub async fn hold(&self) -> OwnedRwLockReadGuard<()> {
        self.0.clone().read_owned().await
    }

    /// Waits until all users have released the lock, for at most [`Self::USERS`]. If they take
    /// longer, a warning names `users`.
    pub async fn is_over(&self, users: &str) {
        if timeout(Self::USERS, self.0.write()).await.is_err() {
            tracing::warn!(
                "{users} is still running after {:?}; shutting down anyway",
                Self::USERS
            );
        }
    }
}
