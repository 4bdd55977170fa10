//! Consensus as it is printed.

use hearth_api::v1::{self, consensus_member_status::Alarm, membership_change::Kind};
use serde::Serialize;

use super::word;
use crate::table::{Table, printable};

/// Alarms as they are printed.
const NO_SPACE: &str = "NO_SPACE";
/// The same.
const CORRUPT: &str = "CORRUPT";

/// Its members, and what is about to change.
#[derive(Debug, Serialize)]
pub(crate) struct Consensus {
    members: Vec<Member>,
    changes: Vec<Change>,
    /// Of the member beside the curator that answered; older ones do not tell.
    store: Option<Store>,
}

#[derive(Debug, Serialize)]
struct Store {
    file_bytes: u64,
    used_bytes: u64,
    quota_bytes: u64,
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
    alarms: Vec<String>,
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
            alarms: alarms(member),
        };
        let change = |change: &v1::MembershipChange| Change {
            node_id: change.node_id.clone(),
            kind: word(change.kind, Kind::as_str_name, "KIND_"),
            member_id: (change.member_id != 0).then(|| format!("{:016x}", change.member_id)),
            reason: change.reason.clone(),
        };
        let store = |store: &v1::ConsensusStore| Store {
            file_bytes: store.file_bytes,
            used_bytes: store.used_bytes,
            quota_bytes: store.quota_bytes,
        };
        Self {
            store: status.store.as_ref().map(store),
            members: status.members.iter().map(member).collect(),
            changes: status.changes.iter().map(change).collect(),
        }
    }
}

impl Consensus {
    /// As text for people.
    pub(crate) fn text(&self) -> String {
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
        if let Some(store) = &self.store {
            let mut stores = Table::new(&["STORE", "IN USE", "QUOTA"]);
            stores.row([store.file_bytes, store.used_bytes, store.quota_bytes].map(mebibytes));
            text.push('\n');
            text.push_str(&stores.to_string());
        }
        for member in &self.members {
            for alarm in &member.alarms {
                let meaning = match &alarm[..] {
                    NO_SPACE => "its store is full; nothing can be written until it has made room",
                    CORRUPT => "it holds something else than the others",
                    other => other,
                };
                let id = &member.member_id;
                text.push_str(&format!("\nalarm of member {id}: {}\n", printable(meaning)));
            }
        }
        text
    }
}

fn mebibytes(bytes: u64) -> String {
    // Tenths are enough, and no number of bytes is too large for them.
    let tenths = u128::from(bytes) * 10 / (1 << 20);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

fn alarms(member: &v1::ConsensusMemberStatus) -> Vec<String> {
    let alarms = member.alarms.iter();
    alarms
        .map(|alarm| word(*alarm, Alarm::as_str_name, "ALARM_"))
        .collect()
}
