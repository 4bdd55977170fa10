//! Each worker in isolation: the other workers are values that the test sets and reads, the cluster
//! is a scripted curator, and the disk is a temporary directory.

mod addresses;
mod certificates;
mod heartbeat;
mod hosts;
mod membership;
mod nodemgmt;
mod rolefetch;
mod statuspush;
mod time;
