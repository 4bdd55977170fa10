//! Consensus as it is printed.

use hearth_api::v1::{self, membership_change::Kind};
use serde::Serialize;

use super::word;
use crate::table::{Table, printable};

/// Its members, and what is about to change.
#[derive(Debug, Serialize)]
pub struct Consensus {
    members: Vec<Member>,
    changes: Vec<Change>,
}

#[derive(Debug, Serialize)]
struct Member {
    /// 16 hexadecimal digits.
    member_id: String,
    node_id: Option<String>,
    learner: bool,
    started: bool,
    leader: bool,
    peer_urls: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Change {
    node_id: String,
    kind: String,
    member_id: Option<String>,
    reason: String,
}

impl From<&v1::GetConsensusStatusResponse> for Consensus {
    fn from(status: &v1::GetConsensusStatusResponse) -> Self {
        let member = |member: &v1::ConsensusMemberStatus| Member {
            member_id: format!("{:016x}", member.member_id),
            node_id: (!member.node_id.is_empty()).then(|| member.node_id.clone()),
            learner: member.learner,
            started: member.started,
            leader: member.leader,
            peer_urls: member.peer_urls.clone(),
        };
        let change = |change: &v1::MembershipChange| Change {
            node_id: change.node_id.clone(),
            kind: word(change.kind, Kind::as_str_name, "KIND_"),
            member_id: (change.member_id != 0).then(|| format!("{:016x}", change.member_id)),
            reason: change.reason.clone(),
        };
        Self {
            members: status.members.iter().map(member).collect(),
            changes: status.changes.iter().map(change).collect(),
        }
    }
}

impl Consensus {
    /// As text for people.
    pub fn text(&self) -> String {
        let mut members = Table::new(&["MEMBER", "NODE", "PART", "STARTED", "PEER URLS"]);
        for member in &self.members {
            let part = match (member.leader, member.learner) {
                (true, _) => "leader",
                (false, true) => "learner",
                (false, false) => "voter",
            };
            members.row([
                member.member_id.clone(),
                printable(member.node_id.as_deref().unwrap_or("")),
                part.to_owned(),
                if member.started { "yes" } else { "no" }.to_owned(),
                printable(&member.peer_urls.join(",")),
            ]);
        }
        let mut text = members.to_string();
        if !self.changes.is_empty() {
            let mut changes = Table::new(&["TO COME", "NODE", "WAITS FOR"]);
            for change in &self.changes {
                changes.row([
                    change.kind.clone(),
                    printable(&change.node_id),
                    printable(&change.reason),
                ]);
            }
            text.push('\n');
            text.push_str(&changes.to_string());
        }
        text
    }
}
