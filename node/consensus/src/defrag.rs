//! The way out of a store that is full.
//!
//! etcd's file grows to its quota and never shrinks: what is deleted, and the
//! history that is forgotten every hour, becomes free within it. A member whose
//! file would have to grow further raises an alarm, and from then on no member
//! takes writes, curators' neither, until the alarm is taken back. etcd leaves
//! that to an administrator. Here each member does it by itself:
//!
//! 1. All history is forgotten. Who still wants it (a watch that is behind)
//!    reads everything anew.
//! 2. The file is written anew, without what is free in it.
//! 3. If there is room now, the alarm is taken back.
//!
//! If there is none, everything in it is wanted. Bare deletions are taken even
//! then (Kubernetes' are; the node's own writes put at least their epoch), so
//! after the next one it is tried again, though not all the time: to write a
//! file takes seconds in which this member answers nothing.
//!
//! Each member cares for its own alarm and its own file. They need not take
//! turns: who stands still keeps nobody from writing who could write now. An
//! alarm of a member that has been removed is taken back by whoever sees it.
//!
//! This is for accidents. Who might fill the store in earnest is kept from it,
//! see [`etcd_proxy::quota`](super::etcd_proxy::quota).

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::client::{ConsensusError, RootClient};
use super::members::{Alarm, MemberStatus, Members};

/// How far below its limit a full store has to be to be none, as a part of it:
/// one that is at its limit would be full and not full by turns.
const RELIEF_DIVISOR: u64 = 16;
/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// After the file was written anew in vain.
const DEFRAG_INTERVAL: Duration = Duration::from_secs(10);
/// A file of the quota's size is read, and as much of it written as is in use.
const DEFRAG_BOUND: Duration = Duration::from_secs(300);

/// What a store that was full may have in use to be full no more.
pub(super) const fn relieved(limit: u64) -> u64 {
    limit - limit / RELIEF_DIVISOR
}

/// Watches over this member's file, which may have `quota` bytes.
pub(super) async fn keep(root: &RootClient, quota: u64) -> Infallible {
    let mut keeper = Keeper::of(root, quota);
    loop {
        if let Err(error) = keeper.look().await {
            tracing::warn!("room in the store: {}", hearth_api::chain(&error));
        }
        sleep(LOOK_INTERVAL).await;
    }
}

struct Keeper {
    members: Members,
    store: RootClient,
    quota: u64,
    /// When there was no room to be made, and at which revision.
    last_failed_defrag: Option<(Instant, i64)>,
}

impl Keeper {
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
                tracing::info!(member = %id, "a member that is gone needs no room");
                self.members.has_space(*id).await?;
            }
        }
        if full.iter().all(|(id, _)| *id != status.id) {
            return Ok(());
        }
        self.reclaim_space(status).await
    }

    /// This member is out of space.
    async fn reclaim_space(&mut self, status: MemberStatus) -> Result<(), ConsensusError> {
        if let Some((at, revision)) = self.last_failed_defrag
            && (revision == status.revision || at.elapsed() < DEFRAG_INTERVAL)
        {
            return Ok(());
        }
        let (quota, file) = (self.quota, status.file);
        tracing::warn!(quota, file, "the store is full: history is forgotten");
        self.store.compact(status.revision).await?;
        self.members.bounded(DEFRAG_BOUND).defragment().await?;
        let file = self.members.status().await?.file;
        if file > relieved(quota) {
            tracing::error!(
                quota,
                file,
                "the store is full: something has to be deleted"
            );
            self.last_failed_defrag = Some((Instant::now(), status.revision));
            return Ok(());
        }
        self.members.has_space(status.id).await?;
        tracing::info!(quota, file, "there is room in the store again");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::client::NamespacedClient;
    use super::super::fenced::{Condition, Write, WriteError};
    use super::super::testing::{Running, Site};
    use super::super::wire::{DeleteRangeRequest, kv_client::KvClient};
    use super::*;
    use hearth_base::testing::soon;

    /// Large enough, and values small enough, for the file to be nearly all in
    /// use when it is full.
    const QUOTA: u64 = 64 << 20;
    static VALUE: [u8; 64 << 10] = [7; 64 << 10];
    /// Values that are written at once.
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
        panic!("it is never full");
    }

    async fn takes_writes(client: &NamespacedClient) {
        soon("room in the store", async {
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
        // As the one does that runs beside it.
        let mut keeper = Keeper::of(running.handle().root(), QUOTA);
        keeper.look().await.unwrap();
        assert!(keeper.last_failed_defrag.is_some());
        let status = keeper.members.status().await.unwrap();
        let full = [(status.id, Alarm::NoSpace)];
        assert_eq!(keeper.members.alarms(&status).await.unwrap(), full);
        put_one(&client).await.unwrap_err();

        let mut kv = KvClient::new(client.channel());
        let some = DeleteRangeRequest {
            key: b"namespaced:curator/a1".into(),
            range_end: b"namespaced:curator/a2".into(),
            ..Default::default()
        };
        let gone = kv.delete_range(some).await.unwrap().into_inner().deleted;
        assert!(gone > 50, "{gone}");
        takes_writes(&client).await;
        assert_eq!(client.get("a0").await.unwrap().unwrap().value, VALUE);
        running.stop().await;
    }
}
