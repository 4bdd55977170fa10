//! Waiting until a time that there may not be: state machines without a clock say when they want to be called again, if at all.

use tokio::time::{Instant, sleep_until};

/// Returns at this time; never, if there is none. Cancel safe.
pub async fn passed(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
