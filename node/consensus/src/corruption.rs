//! Members whose data differ, as etcd notices it.
//!
//! Every member computes a checksum of its whole store whenever it compacts the history, which all do at the same
//! revision. The leader compares them (etcd's feature `CompactHashCheck`). Where a majority agrees, it raises the alarm
//! CORRUPT for each of the others, otherwise one for no member in particular. While there is such an alarm, no member
//! accepts writes, not even those by which an operator removes the damaged member. etcd leaves that to an administrator.
//! Here the cluster goes on:
//!
//! - A member with the alarm notes durably that its data are damaged, disarms the alarm and ends. From then on, it does
//!   not start etcd on these data, which are those of a minority.
//! - What others have not disarmed after [`PATIENCE`] is disarmed by any member: a member that is off must not stop the
//!   others, and where no majority agrees, nobody knows more after a longer wait. etcd raises the alarm again at its next
//!   check, as long as the member is there and differs.
//! - The alarm of a member that has been removed is disarmed by any member that sees it.
//!
//! etcd's check at the start of a member (`InitialCorruptCheck`) is off. It ends a member that differs from any other,
//! which after a damage are those whose data are right; and members that start together wait for each other's checksums
//! until a time limit, which takes a cluster of three 18 seconds.

use std::time::Duration;

use hearth_base::event::Writer;
use hearth_base::supervisor::Failure;
use hearth_host::layout;
use hearth_sys::files;
use tokio::time::{Instant, sleep};

use super::client::{ConsensusError, RootClient};
use super::damage::{Damage, Damaged, DataReport};
use super::member_record::MemberRecordError;
use super::members::{Alarm, MemberId, Members};

/// How often to check for alarms.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// How long a member has to disarm its alarm itself. All members have seen it by then.
const PATIENCE: Duration = Duration::from_secs(15);
/// The member in an alarm that concerns all of them.
const NO_MEMBER: MemberId = MemberId(0);

/// What a member has noted whose data are damaged.
pub(super) fn noted(etcd: &layout::Etcd) -> Option<Damaged> {
    etcd.damaged().exists().then(|| Damaged {
        damage: Damage::Values,
        words: "they differ from those of most consensus members (etcd's alarm CORRUPT)".into(),
    })
}

/// Handles alarms. Returns once this member's data are known to be damaged, or with an error of the disk.
pub(super) async fn keep(
    root: &RootClient,
    etcd: &layout::Etcd,
    report: &Writer<Option<DataReport>>,
) -> Failure {
    let members = root.members();
    let mut seen = Vec::new();
    loop {
        match look(&members, &mut seen, report).await {
            Ok(None) => {}
            Ok(Some(own)) => {
                let note = files::write_atomic(&etcd.damaged(), b"", files::PRIVATE_FILE);
                if let Err(error) = note {
                    return MemberRecordError::from(error).into();
                }
                // If this fails, the others do it.
                if let Err(error) = members.disarm(own, Alarm::Corrupt).await {
                    warn(&error);
                }
                return Failure::msg("values in etcd's database are damaged");
            }
            Err(error) => warn(&error),
        }
        sleep(LOOK_INTERVAL).await;
    }
}

fn warn(error: &ConsensusError) {
    tracing::warn!(
        "cannot handle etcd's alarm CORRUPT: {}",
        hearth_api::chain(error)
    );
}

/// Disarms what is to be disarmed by this member. `seen` are the alarms of the last time, and since when. Returns the
/// member's own ID if it has the alarm.
async fn look(
    members: &Members,
    seen: &mut Vec<(MemberId, Instant)>,
    report: &Writer<Option<DataReport>>,
) -> Result<Option<MemberId>, ConsensusError> {
    let status = members.status().await?;
    let mut alarms = members.alarms(&status).await?;
    alarms.retain(|(_, alarm)| *alarm == Alarm::Corrupt);
    if alarms.is_empty() {
        seen.clear();
        return Ok(None);
    }
    if alarms.iter().any(|(id, _)| *id == status.id) {
        return Ok(Some(status.id));
    }
    let there = members.list().await?;
    let now = Instant::now();
    let before = std::mem::take(seen);
    for (id, _) in alarms {
        let since = before.iter().find(|(known, _)| *known == id);
        let since = since.map_or(now, |(_, since)| *since);
        if since == now {
            match id {
                NO_MEMBER => {
                    tracing::error!("etcd's members have different data, and no majority agrees");
                    report.set(Some(DataReport::Undecided));
                }
                id => tracing::error!(member = %id, "the data of an etcd member are damaged"),
            }
        }
        let is_there = id == NO_MEMBER || there.iter().any(|member| member.id == id);
        if is_there && now < since + PATIENCE {
            seen.push((id, since));
        } else {
            tracing::warn!(member = %id, "disarming etcd's alarm CORRUPT: writes are accepted again");
            members.disarm(id, Alarm::Corrupt).await?;
        }
    }
    Ok(None)
}
