//! The curator as its callers meet it: over mutual TLS, with a real etcd.

mod access;
mod failures;
mod nodes;
