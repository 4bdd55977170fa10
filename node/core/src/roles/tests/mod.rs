//! Each worker alone: the other workers are values that the test sets and
//! reads, the cluster is a curator that follows a script, the disk a temporary
//! directory. The control plane's worker has a real etcd and a real curator.

mod addresses;
mod controlplane;
mod heartbeat;
mod hosts;
mod members;
mod membership;
mod nodemgmt;
mod rolefetch;
mod statuspush;
