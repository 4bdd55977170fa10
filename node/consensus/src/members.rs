//! etcd's membership: reading and changing it.
//!
//! etcd lists its members as of the log entries that the queried member has applied, which may be
//! far behind. Code that decides anything by the list makes a linearizable read first: the same
//! etcd has then applied every earlier change.
//!
//! A membership change is not a transaction, and so cannot be fenced. Each change is therefore
//! identified such that it does no harm when it is late: a member is added with the peer URL of its
//! node, which etcd accepts once only, and promoted or removed by its member ID, which is never
//! reused.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Client, ClusterClient, Error, MaintenanceClient,
    MemberAddOptions,
};
use hearth_api::identity::NodeId;
use hearth_api::names::PORT_ETCD_PEER;

use super::client::{ConsensusError, RootClient, within};

/// Timeout of a call: a membership change waits for the agreement of the members.
const CALL_BOUND: Duration = Duration::from_secs(10);

/// etcd's member ID. It is assigned when the member is added, and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The URL under which peers reach the etcd of a node.
pub fn peer_url(node: NodeId) -> String {
    format!("https://{node}:{PORT_ETCD_PEER}")
}

/// The node that has this peer URL.
pub(crate) fn node(peer_urls: &[String]) -> Option<NodeId> {
    let [url] = peer_urls else {
        return None;
    };
    let host = url.strip_prefix("https://")?.split(':').next()?;
    host.parse().ok()
}

/// One etcd member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Assigned by etcd.
    pub id: MemberId,
    /// The member's name; empty until it has started and published it.
    pub name: String,
    /// The URLs under which its peers reach it.
    pub peer_urls: Vec<String>,
    /// Whether it is a learner: it replicates, but does not vote.
    pub learner: bool,
}

impl Member {
    fn of(told: &etcd_client::Member) -> Self {
        Self {
            id: MemberId(told.id()),
            name: told.name().to_owned(),
            peer_urls: told.peer_urls().to_vec(),
            learner: told.is_learner(),
        }
    }

    /// The node that the member runs, or will run, on: the host in its peer URL.
    pub fn node(&self) -> Option<NodeId> {
        node(&self.peer_urls)
    }

    /// Whether it has started and published its name since it was added.
    pub fn started(&self) -> bool {
        !self.name.is_empty()
    }
}

/// Status of the etcd on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// The member's own ID.
    pub id: MemberId,
    /// Whether it is a learner.
    pub learner: bool,
    /// The Raft leader, as far as this member knows.
    pub leader: Option<MemberId>,
    /// Index of the last committed log entry that this member knows.
    pub committed: u64,
    /// Index of the last log entry that it has applied.
    pub applied: u64,
    /// Revision of the store.
    pub revision: i64,
    /// Size of this member's database file in bytes.
    pub file: u64,
    /// Bytes of the file in use, history included.
    pub used: u64,
    /// Whether any member has raised an alarm.
    pub alarmed: bool,
}

/// An alarm of an etcd member; it stays until it is disarmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// The database file has reached the quota: no member accepts writes.
    NoSpace,
    /// The member's data differ from those of most members. The alarm of member 0 says that no majority agrees.
    Corrupt,
}

/// Client of etcd's membership and maintenance APIs, through the member on this node.
#[derive(Clone)]
pub struct Members {
    etcd: Arc<Client>,
    bound: Duration,
}

impl RootClient {
    /// The client of the membership.
    pub fn members(&self) -> Members {
        Members {
            etcd: self.etcd.clone(),
            bound: CALL_BOUND,
        }
    }
}

impl Members {
    /// The same client with another timeout for every call.
    pub fn bounded(&self, bound: Duration) -> Self {
        Self {
            bound,
            ..self.clone()
        }
    }

    fn cluster(&self) -> ClusterClient {
        self.etcd.cluster_client()
    }

    fn maintenance(&self) -> MaintenanceClient {
        self.etcd.maintenance_client()
    }

    async fn step<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, ConsensusError> {
        within(self.bound, what, call).await
    }

    /// The members that this etcd knows; see the module for how recent the list is. A learner
    /// refuses the call.
    pub async fn list(&self) -> Result<Vec<Member>, ConsensusError> {
        let mut client = self.cluster();
        let answer = self.step("list members", client.member_list()).await?;
        Ok(answer.members().iter().map(Member::of).collect())
    }

    /// Adds a learner for a node.
    pub async fn add_learner(&self, node: NodeId) -> Result<MemberId, ConsensusError> {
        const WHAT: &str = "add a learner";
        let mut client = self.cluster();
        let learner = MemberAddOptions::new().with_is_learner();
        let call = client.member_add([peer_url(node)], Some(learner));
        let answer = self.step(WHAT, call).await?;
        let member = answer.member().ok_or(ConsensusError::Malformed {
            what: WHAT,
            missing: "member",
        })?;
        Ok(MemberId(member.id()))
    }

    /// Promotes a learner to a voter. etcd refuses one that has less than nine tenths of the leader's log. That it has
    /// all of it, that it runs, and that there is a quorum with it, is for the caller to check: etcd would look at the
    /// last only with its strict check of changes, which is off.
    pub async fn promote(&self, member: MemberId) -> Result<(), ConsensusError> {
        let mut client = self.cluster();
        let call = client.member_promote(member.0);
        self.step("promote a learner", call).await.map(drop)
    }

    /// Removes a member permanently. Succeeds if it is removed already.
    pub async fn remove(&self, member: MemberId) -> Result<(), ConsensusError> {
        let mut client = self.cluster();
        let call = client.member_remove(member.0);
        match self.step("remove a member", call).await {
            Err(ConsensusError::Failed { source, .. })
                if source.code() == tonic::Code::NotFound =>
            {
                Ok(())
            }
            answer => answer.map(drop),
        }
    }

    /// Status of this etcd. A learner answers, too.
    pub async fn status(&self) -> Result<MemberStatus, ConsensusError> {
        const WHAT: &str = "get etcd's status";
        let mut client = self.maintenance();
        let answer = self.step(WHAT, client.status()).await?;
        let header = answer.header().ok_or(ConsensusError::Malformed {
            what: WHAT,
            missing: "header",
        })?;
        Ok(MemberStatus {
            id: MemberId(header.member_id()),
            learner: answer.is_learner(),
            leader: Some(MemberId(answer.leader())).filter(|id| id.0 != 0),
            committed: answer.raft_index(),
            applied: answer.raft_applied_index(),
            revision: header.revision(),
            file: answer.db_size().unsigned_abs(),
            used: answer.raft_used_db_size().unsigned_abs(),
            alarmed: answer.errors().iter().any(|text| text.contains("alarm:")),
        })
    }

    /// The active alarms, as far as this etcd knows, each member and kind once. `status` tells whether there are any.
    pub async fn alarms(
        &self,
        status: &MemberStatus,
    ) -> Result<Vec<(MemberId, Alarm)>, ConsensusError> {
        // Listing the alarms costs etcd a log entry.
        if !status.alarmed {
            return Ok(Vec::new());
        }
        let mut client = self.maintenance();
        let call = client.alarm(AlarmAction::Get, AlarmType::None, None);
        let answer = self.step("list etcd's alarms", call).await?;
        let known = answer.alarms().iter().filter_map(|alarm| {
            let kind = match alarm.alarm() {
                AlarmType::None => return None,
                AlarmType::Nospace => Alarm::NoSpace,
                AlarmType::Corrupt => Alarm::Corrupt,
            };
            Some((MemberId(alarm.member_id()), kind))
        });
        Ok(known.collect())
    }

    /// Disarms a member's alarm.
    pub async fn disarm(&self, member: MemberId, alarm: Alarm) -> Result<(), ConsensusError> {
        let mut client = self.maintenance();
        let mut options = AlarmOptions::new();
        options.with_member(member.0);
        let kind = match alarm {
            Alarm::NoSpace => AlarmType::Nospace,
            Alarm::Corrupt => AlarmType::Corrupt,
        };
        let call = client.alarm(AlarmAction::Deactivate, kind, Some(options));
        self.step("disarm an alarm of etcd", call).await.map(drop)
    }

    /// Defragments the database file of this etcd. It answers no other call meanwhile.
    pub async fn defragment(&self) -> Result<(), ConsensusError> {
        let mut client = self.maintenance();
        let call = client.defragment();
        let done = self.step("defragment etcd's database", call).await;
        done.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_on_the_node_that_its_url_names() {
        let node = NodeId::from_bytes([7; 16]);
        let member = |urls: &[&str]| Member {
            id: MemberId(1),
            name: String::new(),
            peer_urls: urls.iter().map(|url| (*url).to_owned()).collect(),
            learner: true,
        };
        assert_eq!(member(&[&peer_url(node)]).node(), Some(node));
        assert_eq!(member(&["https://10.0.0.1:7834"]).node(), None);
        assert_eq!(member(&[]).node(), None);
        assert_eq!(member(&[&peer_url(node), "https://a:1"]).node(), None);
        assert!(!member(&[]).started());
    }
}
