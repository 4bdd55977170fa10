//! What a Hearth node needs and that knows nothing of clusters (see docs/architecture.md).

pub mod event;
pub mod logtree;
pub mod supervisor;
pub mod sys;
