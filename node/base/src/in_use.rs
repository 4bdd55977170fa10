//! Shutdown order of parts that are cancelled at the same time: a service ends after its users.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::time::timeout;

/// A lock that the users of a service hold; the service ends after they have released it.
#[derive(Clone, Debug, Default)]
pub struct ReadLock(Arc<RwLock<()>>);

impl ReadLock {
    /// Acquires the lock, as a user.
    pub async fn hold(&self) -> OwnedRwLockReadGuard<()> {
        self.0.clone().read_owned().await
    }

    /// Waits until all users have released the lock, for at most `bound`. If they take longer, a
    /// warning names `users`.
    pub async fn is_over(&self, users: &str, bound: Duration) {
        if timeout(bound, self.0.write()).await.is_err() {
            tracing::warn!("{users} is still running after {bound:?}; shutting down anyway");
        }
    }
}
