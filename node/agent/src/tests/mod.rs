//! Each worker alone: the other workers are values that the test sets and
//! reads, the cluster is a curator that follows a script, the disk a temporary
//! directory.

mod addresses;
mod heartbeat;
mod hosts;
mod membership;
mod nodemgmt;
mod rolefetch;
mod statuspush;
