//! The parts of a node that know nothing of clusters: supervisor, event values, log tree (see
//! docs/architecture.md).
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod deadline;
pub mod event;
pub mod in_use;
pub mod logtree;
pub mod supervisor;
#[cfg(any(test, feature = "testing"))]
#[allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "test code: it fails as tests do"
)]
pub mod testing;
