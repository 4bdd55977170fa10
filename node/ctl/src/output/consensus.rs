//! The status of etcd as it is printed.

use hearth_api::v1;
use hearth_api::v1::consensus_member_status::Alarm;
use hearth_api::v1::membership_change::Kind;
use serde::Serialize;

use super::word;
use crate::table::{Table, printable};

/// Name of etcd's alarm NOSPACE in the JSON.
const NO_SPACE: &str = "NO_SPACE";
/// Name of etcd's alarm CORRUPT in the JSON.
const CORRUPT: &str = "CORRUPT";

/// The etcd members and the pending membership changes.
#[derive(Debug, Serialize)]
pub(crate) struct Consensus {
    members: Vec<Member>,
    changes: Vec<Change>,
    /// Database of the member on the node of the curator that answered; older curators do not send
    /// it.
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
        let mut members = Table::new(&["MEMBER", "NODE", "ROLE", "STARTED", "PEER URLS"]);
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
            let mut changes = Table::new(&["PENDING", "NODE", "REASON"]);
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
            stores.row([store.file_bytes, store.used_bytes, store.quota_bytes].map(size));
            text.push('\n');
            text.push_str(&stores.to_string());
        }
        for member in &self.members {
            for alarm in &member.alarms {
                let meaning = match &alarm[..] {
                    NO_SPACE => "database quota exceeded; writes fail until space is reclaimed",
                    CORRUPT => {
                        "its data differ from those of most members; its etcd ends, and writes are accepted again \
                         within seconds"
                    }
                    other => other,
                };
                let id = &member.member_id;
                text.push_str(&format!("\nalarm on member {id}: {}\n", printable(meaning)));
            }
        }
        text
    }
}

/// With one decimal place, in MiB or, if that would be less than one, in KiB.
fn size(bytes: u64) -> String {
    let (unit, name) = if bytes < 1 << 20 {
        (1 << 10, "KiB")
    } else {
        (1 << 20, "MiB")
    };
    // u128: the product does not overflow for any number of bytes.
    let tenths = u128::from(bytes) * 10 / unit;
    format!("{}.{} {name}", tenths / 10, tenths % 10)
}

fn alarms(member: &v1::ConsensusMemberStatus) -> Vec<String> {
    let alarms = member.alarms.iter();
    alarms
        .map(|alarm| word(*alarm, Alarm::as_str_name, "ALARM_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn small_sizes_are_not_shown_as_zero() {
        assert_eq!(size(0), "0.0 KiB");
        assert_eq!(size(20 << 10), "20.0 KiB");
        assert_eq!(size(3 << 19), "1.5 MiB");
        assert_eq!(size(u64::MAX), "17592186044415.9 MiB");
    }
}
