//! The members of etcd: who they are, and how they are changed.
//!
//! etcd tells its members as far as the one that is asked has applied its log,
//! which may be long ago. Who decides anything by them makes a linearizable
//! read first: the same etcd has then applied everything that was decided
//! before.
//!
//! A change is no transaction, and so is not fenced. Each one therefore names
//! what it is about so that it can do no harm late: a member is added under
//! the URL of its node, which can be there once only, and promoted or removed
//! under its member ID, which never comes back.

use std::{fmt, future::Future, time::Duration};

use hearth_api::{identity::NodeId, names::PORT_ETCD_PEER};
use tonic::{Response, Status, transport::Channel};

use super::{
    client::{ConsensusError, RootClient, within},
    wire::{
        self, AlarmRequest, AlarmType, DefragmentRequest, MemberAddRequest, MemberListRequest,
        MemberPromoteRequest, MemberRemoveRequest, StatusRequest, alarm_request::AlarmAction,
        cluster_client::ClusterClient, maintenance_client::MaintenanceClient,
    },
};

/// A change of the membership waits for the members' agreement.
const CALL_BOUND: Duration = Duration::from_secs(10);

/// etcd's own name of a member. It is made with the member and names no other
/// one ever after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Under which its peers find the etcd of a node.
pub fn peer_url(node: NodeId) -> String {
    format!("https://{node}:{PORT_ETCD_PEER}")
}

/// One member of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// See there.
    pub id: MemberId,
    /// What it calls itself; empty until it has announced itself.
    pub name: String,
    /// Where its peers find it.
    pub peer_urls: Vec<String>,
    /// Takes part, but does not vote.
    pub learner: bool,
}

impl Member {
    /// The node that it is, or shall be, on: the one that its URL names.
    pub fn node(&self) -> Option<NodeId> {
        let [url] = &self.peer_urls[..] else {
            return None;
        };
        let host = url.strip_prefix("https://")?.split(':').next()?;
        host.parse().ok()
    }

    /// Whether it has announced itself to the others since it was added.
    pub fn started(&self) -> bool {
        !self.name.is_empty()
    }
}

impl From<wire::Member> for Member {
    fn from(member: wire::Member) -> Self {
        Self {
            id: MemberId(member.id),
            name: member.name,
            peer_urls: member.peer_urls,
            learner: member.is_learner,
        }
    }
}

/// How the etcd on this node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its own.
    pub id: MemberId,
    /// It does not vote.
    pub learner: bool,
    /// The one that leads etcd, as far as this one knows.
    pub leader: Option<MemberId>,
    /// Up to where the log is known to be agreed upon.
    pub committed: u64,
    /// Up to where it has been applied here.
    pub applied: u64,
    /// Of the store.
    pub revision: i64,
    /// Bytes that the store's file has here.
    pub file: u64,
    /// Bytes of these that hold something, history among it.
    pub used: u64,
    /// Some member, this one or another, complains of something.
    pub alarmed: bool,
}

/// What a member of etcd complains of, until somebody takes it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// Its file has reached the quota: no member takes writes.
    NoSpace,
    /// It holds something else than the others.
    Corrupt,
}

/// The membership of etcd, by way of the member on this node.
#[derive(Clone)]
pub struct Members {
    channel: Channel,
    bound: Duration,
}

impl RootClient {
    /// The membership.
    pub fn members(&self) -> Members {
        Members {
            channel: self.channel.clone(),
            bound: CALL_BOUND,
        }
    }
}

impl Members {
    /// The same with another bound on every call.
    pub fn bounded(&self, bound: Duration) -> Self {
        Self {
            bound,
            ..self.clone()
        }
    }

    fn cluster(&self) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel.clone())
    }

    fn maintenance(&self) -> MaintenanceClient<Channel> {
        MaintenanceClient::new(self.channel.clone())
    }

    async fn step<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ConsensusError> {
        within(self.bound, what, call).await
    }

    /// Those that this etcd knows; see the module for how recent that is.
    /// A learner does not tell.
    pub async fn list(&self) -> Result<Vec<Member>, ConsensusError> {
        let mut client = self.cluster();
        let call = client.member_list(MemberListRequest {});
        let answer = self.step("list the members", call).await?;
        Ok(answer.members.into_iter().map(Member::from).collect())
    }

    /// Adds a learner for a node.
    pub async fn add_learner(&self, node: NodeId) -> Result<MemberId, ConsensusError> {
        const WHAT: &str = "add a learner";
        let mut client = self.cluster();
        let call = client.member_add(MemberAddRequest {
            peer_urls: vec![peer_url(node)],
            is_learner: true,
        });
        let answer = self.step(WHAT, call).await?;
        let member = answer.member.ok_or(ConsensusError::Malformed {
            what: WHAT,
            missing: "member",
        })?;
        Ok(MemberId(member.id))
    }

    /// Makes a learner a voter. etcd 3.4 does not look whether it is ready.
    pub async fn promote(&self, member: MemberId) -> Result<(), ConsensusError> {
        let mut client = self.cluster();
        let call = client.member_promote(MemberPromoteRequest { id: member.0 });
        self.step("promote a learner", call).await.map(drop)
    }

    /// Takes a member out, for good. It may be out already.
    pub async fn remove(&self, member: MemberId) -> Result<(), ConsensusError> {
        let mut client = self.cluster();
        let call = client.member_remove(MemberRemoveRequest { id: member.0 });
        match self.step("remove a member", call).await {
            Err(ConsensusError::Failed { source, .. })
                if source.code() == tonic::Code::NotFound =>
            {
                Ok(())
            }
            answer => answer.map(drop),
        }
    }

    /// How this etcd is. A learner tells, too.
    pub async fn status(&self) -> Result<MemberStatus, ConsensusError> {
        const WHAT: &str = "ask etcd how it is";
        let mut client = self.maintenance();
        let answer = self.step(WHAT, client.status(StatusRequest {})).await?;
        let header = answer.header.ok_or(ConsensusError::Malformed {
            what: WHAT,
            missing: "header",
        })?;
        Ok(MemberStatus {
            id: MemberId(header.member_id),
            learner: answer.is_learner,
            leader: Some(MemberId(answer.leader)).filter(|id| id.0 != 0),
            committed: answer.raft_index,
            applied: answer.raft_applied_index,
            revision: header.revision,
            file: answer.db_size.unsigned_abs(),
            used: answer.db_size_in_use.unsigned_abs(),
            alarmed: answer.errors.iter().any(|text| text.contains("alarm:")),
        })
    }

    /// What members complain of by a status, each member of each thing once, as
    /// far as this etcd knows. Of kinds that etcd does not have today nothing is
    /// told.
    pub async fn alarms(
        &self,
        status: &MemberStatus,
    ) -> Result<Vec<(MemberId, Alarm)>, ConsensusError> {
        // To ask for them costs etcd an entry in its log.
        if !status.alarmed {
            return Ok(Vec::new());
        }
        let mut client = self.maintenance();
        let call = client.alarm(AlarmRequest::default());
        let answer = self.step("ask etcd for its alarms", call).await?;
        let known = |alarm: &wire::AlarmMember| {
            let kind = match alarm.alarm() {
                AlarmType::None => return None,
                AlarmType::Nospace => Alarm::NoSpace,
                AlarmType::Corrupt => Alarm::Corrupt,
            };
            Some((MemberId(alarm.member_id), kind))
        };
        Ok(answer.alarms.iter().filter_map(known).collect())
    }

    /// Takes back a member's complaint that it has no space.
    pub async fn has_space(&self, member: MemberId) -> Result<(), ConsensusError> {
        let mut client = self.maintenance();
        let call = client.alarm(AlarmRequest {
            action: AlarmAction::Deactivate.into(),
            member_id: member.0,
            alarm: AlarmType::Nospace.into(),
        });
        self.step("take back etcd's alarm", call).await.map(drop)
    }

    /// Writes the file of this etcd anew, without what is free in it. It
    /// answers nothing else meanwhile.
    pub async fn defragment(&self) -> Result<(), ConsensusError> {
        let mut client = self.maintenance();
        let call = client.defragment(DefragmentRequest {});
        self.step("defragment etcd's file", call).await.map(drop)
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
