//! The addresses by which Kubernetes knows this node, and what a dual-stack cluster lacks of them.
//!
//! The first one is that at which other nodes reach this one; the certificate of the kubelet's server is for
//! it. In a dual-stack cluster there is one of the other family, too, which only nodes with a static
//! configuration have. A node without it is no worse a worker for its pods and their services, which the mesh
//! connects, so that it is a condition of its own and not one of the role.

use std::fmt;
use std::net::IpAddr;

use hearth_api::names::conditions::{
    ADDRESS_IN_RANGES, KUBERNETES_DUAL_STACK, NO_ADDRESS_OF_BOTH_FAMILIES, NO_IPV4_ADDRESS,
};
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::{NodeCondition, NodeRoles};
use hearth_base::event::{Closed, Value, Watcher};

use super::Worker;

/// The addresses of this node, as its Node has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeAddresses {
    /// At which other nodes reach it.
    pub primary: IpAddr,
    /// Of the other family, in a dual-stack cluster.
    pub second: Option<IpAddr>,
}

/// Separated by a comma.
impl fmt::Display for NodeAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.second {
            None => self.primary.fmt(f),
            Some(second) => write!(f, "{},{second}", self.primary),
        }
    }
}

/// Follows the addresses of this node.
pub(crate) struct AddressWatcher {
    primary: Watcher<IpAddr>,
    second: Watcher<Option<IpAddr>>,
    /// The network worker sets it before the first one.
    known_second: Value<Option<IpAddr>>,
    is_dual: bool,
}

impl Worker {
    /// Follows the addresses of this node in a cluster with these ranges.
    pub(crate) fn addresses(&self, ranges: &ClusterRanges) -> AddressWatcher {
        AddressWatcher {
            primary: self.address.watch(),
            second: self.second_address.watch(),
            known_second: self.second_address.clone(),
            is_dual: ranges.v6.is_some(),
        }
    }
}

impl AddressWatcher {
    /// The addresses, once there is one.
    pub(crate) async fn next(&mut self) -> Result<NodeAddresses, Closed> {
        let primary = self.primary.next().await?;
        let second = self.known_second.get().flatten();
        let second = second.filter(|_| self.is_dual);
        Ok(NodeAddresses { primary, second })
    }

    /// Waits until the addresses are others than these.
    pub(crate) async fn changed(&mut self, from: &NodeAddresses) -> Result<(), Closed> {
        let NodeAddresses { primary, second } = *from;
        tokio::select! {
            moved = self.primary.wait_for(|now| *now != primary) => moved.map(drop),
            moved = self.second.wait_for(|now| *now != second), if self.is_dual => moved.map(drop),
        }
    }
}

/// The reason of a condition, and its text.
pub(crate) type Unsuitable = (&'static str, String);

/// Why Kubernetes cannot use the address of this node, with the reason of the condition; `None` if it can, and while address
/// or ranges are not known.
///
/// With an address in a range of pods or services the node would take packets of its own network for those of pods. Pods and
/// services have IPv4 addresses in every cluster, and programs of Kubernetes insist on nodes of the same family.
pub(crate) fn unsuitable(worker: &Worker) -> Option<Unsuitable> {
    let ranges = ClusterRanges::of(&*worker.settings.value().get()?).ok()?;
    let address = worker.address.get()?;
    if ranges.contains(address) {
        let (pods, services) = (ranges.pods_text(), ranges.services_text());
        let why = format!(
            "expected an address of this node outside of the ranges of pods ({pods}) and services ({services}), got \
             {address}: give it another one, or found the cluster with other ranges"
        );
        return Some((ADDRESS_IN_RANGES, why));
    }
    address.is_ipv6().then(|| {
        let why = format!(
            "expected an IPv4 address as the first one of this node, got {address}: pods and services have IPv4 addresses"
        );
        (NO_IPV4_ADDRESS, why)
    })
}

/// Waits until that is another answer than this one.
pub(crate) async fn other_than(
    worker: &Worker,
    before: &Option<Unsuitable>,
) -> Result<Option<Unsuitable>, Closed> {
    let mut addresses = worker.address.watch();
    let settings = worker.settings.value();
    let mut settings = settings.watch();
    loop {
        let now = unsuitable(worker);
        if now != *before {
            return Ok(now);
        }
        tokio::select! {
            changed = addresses.next() => changed.map(drop)?,
            changed = settings.next() => changed.map(drop)?,
        }
    }
}

/// The condition of a node in a dual-stack cluster: `None` if this is no such cluster, or if the node has no role
/// of Kubernetes.
pub(crate) fn condition(
    ranges: &ClusterRanges,
    roles: &NodeRoles,
    (address, second): (Option<IpAddr>, Option<IpAddr>),
) -> Option<NodeCondition> {
    let is_member = roles.kubernetes_worker.is_some() || roles.kubernetes_controller.is_some();
    ranges.v6.filter(|_| is_member)?;
    let address = address?;
    let met = NodeCondition {
        r#type: KUBERNETES_DUAL_STACK.to_owned(),
        met: true,
        reason: String::new(),
        message: String::new(),
    };
    if second.is_some() {
        return Some(met);
    }
    let missing = if address.is_ipv4() { "IPv6" } else { "IPv4" };
    Some(NodeCondition {
        met: false,
        reason: NO_ADDRESS_OF_BOTH_FAMILIES.to_owned(),
        message: format!(
            "this node has no {missing} address that others can use (network_config.addresses of its \
             parameters): its pods reach pods and services by {missing}, but no other machines, and \
             node ports do not listen there"
        ),
        ..met
    })
}

#[cfg(test)]
mod tests {
    use hearth_api::testing::dual_stack_ranges;
    use hearth_api::v1::node_roles;

    use super::*;

    #[test]
    fn a_node_of_a_dual_stack_cluster_should_have_both_families() {
        let dual = dual_stack_ranges();
        let worker = NodeRoles {
            kubernetes_worker: Some(node_roles::KubernetesWorker {}),
            ..NodeRoles::default()
        };
        let v4: Option<IpAddr> = "192.0.2.7".parse().ok();
        let v6: Option<IpAddr> = "2001:db8::7".parse().ok();
        assert_eq!(
            condition(&ClusterRanges::DEFAULT, &worker, (v4, None)),
            None
        );
        assert_eq!(condition(&dual, &NodeRoles::default(), (v4, None)), None);
        assert_eq!(condition(&dual, &worker, (None, None)), None);
        assert!(condition(&dual, &worker, (v4, v6)).unwrap().met);
        for (address, missing) in [(v4, "no IPv6 address"), (v6, "no IPv4 address")] {
            let unmet = condition(&dual, &worker, (address, None)).unwrap();
            assert!(!unmet.met && unmet.message.contains(missing), "{unmet:?}");
        }
    }
}
