//! (see docs/architecture.md)
pub mod sys;
