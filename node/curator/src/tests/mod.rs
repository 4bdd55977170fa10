//! Tests of the curator through its API: over mutual TLS, with a real etcd.

mod access;
mod administration;
mod attestation;
mod boots;
mod budget;
mod clocks;
mod configuration;
mod enrolment;
mod failures;
mod history;
mod kubernetes;
mod leaves;
mod machine;
mod networking;
mod nodes;
mod ownership;
mod partition;
mod paused;
