//! What a cluster records about itself, and the rules by which requests change it.
//!
//! [`state`] defines the records in etcd: their keys, their encoding, and what makes them valid.
//! [`decisions`] are functions from a request and the records that were found to an answer or a
//! fenced write. [`messages`] are what the texts for callers have in common.
//!
//! Nothing here has a clock, a socket or a store: the curator reads the records, decides, and
//! executes the write. So the rules are tested without etcd, and every curator decides alike.

pub mod decisions;
pub mod messages;
pub mod state;
