//! What a Hearth node needs and that knows nothing of clusters (see docs/architecture.md).

pub mod event;
pub mod logtree;
pub mod supervisor;
#[cfg(any(test, feature = "testing"))]
#[allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "test code: it fails as tests do"
)]
pub mod testing;
