//! Recovery from an exceeded etcd quota.
//!
//! etcd's database file grows up to its quota and never shrinks: deleted keys, and the history that
//! is compacted every hour, become free pages within it. If the file would have to grow further,
//! the member raises a NOSPACE alarm, and from then on no member accepts writes, not the curators'
//! either, until the alarm is disarmed. etcd leaves that to an administrator. Here each member does
//! it for itself:
//!
//! 1. It compacts the whole history. A watch that is behind has to list everything again.
//! 2. It defragments the file.
//! 3. If there is space now, it disarms the alarm.
//!
//! If there is none, all data in the store are live. etcd accepts transactions that only delete
//! even then (Kubernetes' deletions are such; Hearth's own writes put at least their epoch), so the
//! member tries again after the next one, though not all the time: a defragmentation takes seconds,
//! in which this member answers nothing.
//!
//! Each member handles its own alarm and its own file. They need not take turns: while the alarm is
//! raised nobody can write, so a member that is blocked by its defragmentation delays no write. The
//! alarm of a member that has been removed is disarmed by any member that sees it.
//!
//! This is for accidents. A client that could fill the store is limited before that, see
//! [`etcd_proxy::quota`](super::etcd_proxy::quota).

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::client::{ConsensusError, RootClient};
use super::members::{Alarm, MemberStatus, Members};

/// The fraction of the quota that has to be free before a full store counts as relieved. Without
/// this hysteresis, a store at its limit would alternate between full and not full.
const RELIEF_DIVISOR: u64 = 16;
/// How often to check for alarms.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum delay after a defragmentation that freed no space.
const DEFRAG_INTERVAL: Duration = Duration::from_secs(10);
/// Timeout of a defragmentation: it reads a file of the quota's size, and writes what is in use.
const DEFRAG_BOUND: Duration = Duration::from_secs(300);

/// The size at or below which a store that was full counts as relieved.
pub(super) const fn relieved(limit: u64) -> u64 {
    limit - limit / RELIEF_DIVISOR
}

/// Handles this member's NOSPACE alarms; its file may have `quota` bytes.
pub(super) async fn keep(root: &RootClient, quota: u64) -> Infallible {
    let mut keeper = Defragmenter::of(root, quota);
    loop {
        if let Err(error) = keeper.look().await {
            tracing::warn!(
                "cannot handle the etcd quota alarm: {}",
                hearth_api::chain(&error)
            );
        }
        sleep(LOOK_INTERVAL).await;
    }
}

struct Defragmenter {
    members: Members,
    store: RootClient,
    quota: u64,
    /// When, and at which revision, a defragmentation last freed no space.
    last_failed_defrag: Option<(Instant, i64)>,
}

impl Defragmenter {
    fn of(root: &RootClient, quota: u64) -> Self {
        Self {
            members: root.members(),
            store: root.clone(),
            quota,
            last_failed_defrag: None,
        }
    }

    async fn look(&mut self) -> Result<(), ConsensusError> {
        let status = self.members.status().await?;
        let mut full = self.members.alarms(&status).await?;
        full.retain(|(_, alarm)| *alarm == Alarm::NoSpace);
        if full.is_empty() {
            self.last_failed_defrag = None;
            return Ok(());
        }
        let there = self.members.list().await?;
        for (id, _) in &full {
            if there.iter().all(|member| member.id != *id) {
                tracing::info!(member = %id, "disarming the NOSPACE alarm of a removed member");
                self.members.disarm(*id, Alarm::NoSpace).await?;
            }
        }
        if full.iter().all(|(id, _)| *id != status.id) {
            return Ok(());
        }
        self.reclaim_space(status).await
    }

    /// Frees space after this member's NOSPACE alarm.
    async fn reclaim_space(&mut self, status: MemberStatus) -> Result<(), ConsensusError> {
        if let Some((at, revision)) = self.last_failed_defrag
            && (revision == status.revision || at.elapsed() < DEFRAG_INTERVAL)
        {
            return Ok(());
        }
        let (quota, file) = (self.quota, status.file);
        tracing::warn!(
            quota,
            file,
            "etcd quota exceeded: compacting and defragmenting"
        );
        self.store.compact(status.revision).await?;
        self.members.bounded(DEFRAG_BOUND).defragment().await?;
        let file = self.members.status().await?.file;
        if file > relieved(quota) {
            tracing::error!(
                quota,
                file,
                "etcd quota exceeded: no space to reclaim, keys have to be deleted"
            );
            self.last_failed_defrag = Some((Instant::now(), status.revision));
            return Ok(());
        }
        self.members.disarm(status.id, Alarm::NoSpace).await?;
        tracing::info!(
            quota,
            file,
            "etcd is below its quota again: disarmed the alarm"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use etcd_client::DeleteOptions;
    use hearth_base::testing::within_timeout;

    use super::super::client::NamespacedClient;
    use super::super::fenced::{Condition, Write, WriteError};
    use super::super::testing::{Running, Site};
    use super::*;

    /// Large enough, and the values small enough, that nearly all of the file is in use when it is
    /// full.
    const QUOTA: u64 = 64 << 20;
    static VALUE: [u8; 64 << 10] = [7; 64 << 10];
    /// Values per write.
    const TOGETHER: u32 = 8;

    async fn put(
        client: &NamespacedClient,
        keys: impl Iterator<Item = String>,
    ) -> Result<i64, WriteError> {
        let always = Write::when(Condition::Absent("nothing".into()));
        let write = keys.fold(always, |write, key| write.put(key, VALUE.into()));
        client.write(write).await
    }

    async fn put_one(client: &NamespacedClient) -> Result<i64, WriteError> {
        put(client, std::iter::once("b".to_owned())).await
    }

    /// An etcd into which values are written until it refuses one.
    async fn full(key: fn(u32) -> String) -> (Site, Running) {
        let mut site = Site::new();
        site.quota_bytes = QUOTA;
        let running = site.start(true).await;
        let client = running.client();
        for number in 0..1000 {
            let keys = (0..TOGETHER).map(|one| key(number * TOGETHER + one));
            if let Err(error) = put(&client, keys).await {
                assert!(matches!(error, WriteError::Consensus(error) if error.is_full()));
                return (site, running);
            }
        }
        panic!("etcd never ran out of space");
    }

    async fn takes_writes(client: &NamespacedClient) {
        within_timeout("space in the store", async {
            while put_one(client).await.is_err() {
                sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn history_makes_room() {
        let (_site, running) = full(|number| format!("a{}", number % TOGETHER)).await;
        let client = running.client();
        takes_writes(&client).await;
        let members = running.handle().root().members();
        let status = members.status().await.unwrap();
        assert_eq!(members.alarms(&status).await.unwrap(), []);
        assert!(status.file < QUOTA / 4);
        assert_eq!(client.get("a0").await.unwrap().unwrap().value, VALUE);
        running.stop().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_wanted_is_waited_for() {
        let (_site, running) = full(|number| format!("a{number}")).await;
        let client = running.client();
        // Does what the instance within the running etcd does.
        let mut keeper = Defragmenter::of(running.handle().root(), QUOTA);
        keeper.look().await.unwrap();
        assert!(keeper.last_failed_defrag.is_some());
        let status = keeper.members.status().await.unwrap();
        let full = [(status.id, Alarm::NoSpace)];
        assert_eq!(keeper.members.alarms(&status).await.unwrap(), full);
        put_one(&client).await.unwrap_err();

        let some = DeleteOptions::new().with_range("namespaced:curator/a2");
        let deletion = client
            .kv()
            .delete("namespaced:curator/a1", Some(some))
            .await;
        let gone = deletion.unwrap().deleted();
        assert!(gone > 50, "{gone}");
        takes_writes(&client).await;
        assert_eq!(client.get("a0").await.unwrap().unwrap().value, VALUE);
        running.stop().await;
    }
}
