//! Work that blocks, for runnables.

use tokio::task::{self, JoinHandle};
use tracing::Span;

/// Runs work on a thread that may block, like [`tokio::task::spawn_blocking`], within the caller's span: what it logs is
/// the runnable's. It runs to its end even if the handle is dropped.
#[allow(
    clippy::disallowed_methods,
    reason = "this is what is used instead of it"
)]
pub fn spawn_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let span = Span::current();
    task::spawn_blocking(move || span.in_scope(work))
}
