//! The control plane's worker, with a real etcd and a real curator.

mod controlplane;
mod members;
