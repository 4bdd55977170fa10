//! Network policies of Kubernetes (`networking.k8s.io/v1`): from the objects to the rules of each
//! node's packet filter.
//!
//! | part | content |
//! |---|---|
//! | [`objects`] | what is read of `NetworkPolicy`, `Pod` and `Namespace` |
//! | [`selector`] | label selectors |
//! | [`plan`] | from all objects of a cluster to what each node enforces |
//! | [`node`] | what one node enforces, as it is stored and checked |
//! | [`rules`] | the same in the syntax of nft(8) |
//!
//! One place computes this for all nodes, the reconciler, and each node reads its own part. So no node
//! needs the pods of the others, with all that is in them: from the parts a node learns addresses and
//! ports of pods, and nothing else.
//!
//! All of this is a function of its input: nothing here waits, or talks to anyone.
//!
//! # What is enforced
//! - A connection between pods needs the permission of both: egress is checked on the node of the pod
//!   that connects, ingress on that of the other one. Services are translated before, so policies see
//!   pods.
//! - Each packet in the direction of a connection is checked, and not only the first one: a policy
//!   holds for connections that exist. Answers pass.
//! - A pod whose rules the node does not know yet has no network while the cluster has any policy: a pod
//!   that a policy isolates is isolated from its first packet on. The same holds for all pods of a
//!   node that has just started.
//! - A pod can always reach itself, and the DNS server of its node; the node itself can reach its
//!   pods (probes of the kubelet).
//! - Pods with the network of their node are no pods here: their address is the node's.

pub mod node;
pub mod objects;
pub mod plan;
pub mod rules;
pub mod selector;
#[cfg(test)]
mod tests;
