//! Whom a node asks for the time.
//!
//! The first of these that there are: the time servers of its parameters, of the cluster's setting,
//! of DHCP; otherwise other nodes. A consensus member compares its clock with those of the other
//! members; its own heartbeats go to its own curator, which would only tell it its own time. Any
//! other node follows the curator that answers its heartbeats.

use std::collections::BTreeMap;
use std::net::IpAddr;

use hearth_api::identity::NodeId;
use hearth_api::time_server::TimeServer;
use hearth_api::v1::{ClusterDirectory, TimeSource};

/// What is known of the sources.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// From the parameters.
    pub parameters: Vec<TimeServer>,
    /// From the cluster's setting.
    pub setting: Vec<TimeServer>,
    /// From DHCP.
    pub dhcp: Vec<TimeServer>,
    /// This node runs a curator.
    pub is_member: bool,
    /// The other consensus members.
    pub members: BTreeMap<NodeId, IpAddr>,
    /// This node has a cluster.
    pub has_cluster: bool,
}

/// Whom a node asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sources {
    /// Nobody.
    Nobody,
    /// Time servers.
    Servers(TimeSource, Vec<TimeServer>),
    /// The other consensus members.
    Members(BTreeMap<NodeId, IpAddr>),
    /// The curator of its heartbeats.
    Curator,
}

impl Known {
    pub(super) fn sources(&self) -> Sources {
        let servers = [
            (TimeSource::Parameters, &self.parameters),
            (TimeSource::ClusterSetting, &self.setting),
            (TimeSource::Dhcp, &self.dhcp),
        ];
        let mut servers = servers.into_iter();
        if let Some((source, servers)) = servers.find(|(_, servers)| !servers.is_empty()) {
            return Sources::Servers(source, servers.clone());
        }
        match (self.has_cluster, self.is_member, self.members.is_empty()) {
            (false, ..) | (true, true, true) => Sources::Nobody,
            (true, true, false) => Sources::Members(self.members.clone()),
            (true, false, _) => Sources::Curator,
        }
    }
}

impl Sources {
    /// The kind, for operators.
    pub(super) fn kind(&self) -> TimeSource {
        match self {
            Self::Nobody => TimeSource::None,
            Self::Servers(source, _) => *source,
            Self::Members(_) => TimeSource::ConsensusMembers,
            Self::Curator => TimeSource::Curator,
        }
    }

    /// Who is asked, for operators.
    pub(super) fn names(&self) -> Vec<String> {
        match self {
            Self::Nobody | Self::Curator => Vec::new(),
            Self::Servers(_, servers) => servers.iter().map(ToString::to_string).collect(),
            Self::Members(members) => members.keys().map(ToString::to_string).collect(),
        }
    }
}

/// The consensus members but this node, each with one address.
pub(super) fn members(directory: &ClusterDirectory, own: NodeId) -> BTreeMap<NodeId, IpAddr> {
    let members = directory.nodes.iter().filter_map(|node| {
        let id = node.id.parse().ok()?;
        let mut hosts = node.addresses.iter();
        let host = hosts.find_map(|address| address.host.parse().ok())?;
        (id != own).then_some((id, host))
    });
    members.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(text: &str) -> Vec<TimeServer> {
        vec![text.parse().unwrap()]
    }

    #[test]
    fn the_first_source_that_there_is_is_asked() {
        let members = BTreeMap::from([(NodeId::from_bytes([2; 16]), [192, 0, 2, 2].into())]);
        let mut known = Known {
            parameters: servers("192.0.2.11"),
            setting: servers("192.0.2.12"),
            dhcp: servers("192.0.2.13"),
            is_member: true,
            members: members.clone(),
            has_cluster: true,
        };
        let asks = |known: &Known, kind: TimeSource, name: &str| {
            let sources = known.sources();
            assert_eq!(sources.kind(), kind);
            assert_eq!(sources.names().first().map_or("", |first| first), name);
        };
        asks(&known, TimeSource::Parameters, "192.0.2.11");
        known.parameters.clear();
        asks(&known, TimeSource::ClusterSetting, "192.0.2.12");
        known.setting.clear();
        asks(&known, TimeSource::Dhcp, "192.0.2.13");
        known.dhcp.clear();
        assert_eq!(known.sources(), Sources::Members(members));
        known.is_member = false;
        assert_eq!(known.sources(), Sources::Curator);
        known.is_member = true;
        known.members.clear();
        assert_eq!(known.sources(), Sources::Nobody);
        assert_eq!(Known::default().sources(), Sources::Nobody);
    }
}
