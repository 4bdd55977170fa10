use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use hearth_api::testing::{Heartbeats, Script, Seen};
use hearth_api::v1::ColdStartPolicy;
use hearth_base::event::{self, Value, Writer};
use hearth_base::testing::{TestSupervisor, next, within_timeout};
use hearth_host::boot_record::boot_id;
use hearth_host::handover::{Refusals, UnlockSettingsDigest};
use tokio::time::Instant;

use crate::CuratorConnection;
use crate::heartbeat::{Worker, run};
use crate::testing::Fake;
use crate::time::CuratorTime;

const INTERVAL: Duration = Duration::from_millis(100);

fn answer(bound_ms: u32, after: Duration) -> Heartbeats {
    Heartbeats::Answer {
        interval_ms: 100,
        bound_ms,
        after,
    }
}

struct Beating {
    fake: Fake,
    worker: TestSupervisor,
    connection: Writer<CuratorConnection>,
    acknowledged: Value<Instant>,
    refusals: Value<Refusals>,
    unlock_settings: Value<UnlockSettingsDigest>,
    curator_time: Value<CuratorTime>,
}

/// The worker, and a curator with this behaviour.
async fn beating(heartbeats: Heartbeats) -> Beating {
    let fake = Fake::new(Script {
        heartbeats,
        ..Script::default()
    })
    .await;
    let (connection_writer, connection) = event::value();
    let (acknowledged_writer, acknowledged) = event::value();
    let (refusals_writer, refusals) = event::value();
    let (unlock_settings_writer, unlock_settings) = event::value();
    let (curator_time_writer, curator_time) = event::value();
    connection_writer.set(fake.connection());
    let worker = Arc::new(Worker {
        connection,
        acknowledged: acknowledged_writer,
        refusals: Arc::new(refusals_writer),
        unlock_settings: unlock_settings_writer,
        curator_time: curator_time_writer,
    });
    Beating {
        fake,
        worker: TestSupervisor::run(move |ctx| run(ctx, worker.clone())),
        connection: connection_writer,
        acknowledged,
        refusals,
        unlock_settings,
        curator_time,
    }
}

#[tokio::test]
async fn what_is_acknowledged_is_when_it_was_sent() {
    let after = Duration::from_millis(200);
    let test = beating(answer(5000, after)).await;
    let mut acknowledged = test.acknowledged.watch();
    for _ in 0..3 {
        let sent = next("an acknowledgement", &mut acknowledged).await;
        // Sent before the response, and after the pause that followed the previous one.
        for (arrived, _) in test.fake.curator.seen().heartbeats {
            assert!(
                sent <= arrived || arrived + after + INTERVAL <= sent,
                "{sent:?} {arrived:?}"
            );
        }
    }
    let seen = test.fake.curator.seen();
    for (_, heartbeat) in seen.heartbeats {
        assert_eq!(heartbeat.boot_id, boot_id().unwrap());
        assert_eq!(heartbeat.protocol_version, 1);
    }
    assert_eq!(seen.calls, ["Heartbeat"], "all on one stream");
    test.worker.is_healthy().await;
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn changed_unlock_settings_are_published() {
    let test = beating(answer(5000, Duration::ZERO)).await;
    let mut published = test.unlock_settings.watch();
    let mut settings = Script::default().unlock_settings();
    assert_eq!(next("settings", &mut published).await, settings.digest());
    settings.cold_start_policy = ColdStartPolicy::Tpm;
    test.fake.curator.set_unlock_settings(&settings);
    assert_eq!(next("settings", &mut published).await, settings.digest());
    test.worker.stop().await;
}

#[tokio::test]
async fn the_end_of_the_boot_is_announced() {
    let test = beating(answer(5000, Duration::ZERO)).await;
    next("an acknowledgement", &mut test.acknowledged.watch()).await;
    test.worker.stop().await;
    let ended = |seen: &Seen| seen.heartbeats.last().is_some_and(|(_, last)| last.ending);
    within_timeout("the end", test.fake.curator.until(ended)).await;
    let seen = test.fake.curator.seen();
    let endings = seen.heartbeats.iter().filter(|(_, beat)| beat.ending);
    assert_eq!(endings.count(), 1);
}

#[tokio::test]
async fn what_is_not_answered_is_not_acknowledged() {
    let test = beating(Heartbeats::Ignore).await;
    let arrived = test.fake.curator.until(|seen| !seen.heartbeats.is_empty());
    within_timeout("a heartbeat", arrived).await;
    assert_eq!(test.acknowledged.get(), None);
    test.worker.stop().await;
}

#[tokio::test]
async fn silence_is_a_failure_and_the_next_stream_goes_on() {
    let test = beating(answer(200, Duration::ZERO)).await;
    let mut acknowledged = test.acknowledged.watch();
    next("an acknowledgement", &mut acknowledged).await;
    test.fake.curator.set_heartbeats(Heartbeats::Ignore);
    test.worker
        .fails("the curator did not answer a heartbeat in time")
        .await;
    let silent = Instant::now();
    test.fake
        .curator
        .set_heartbeats(answer(200, Duration::ZERO));
    let later = acknowledged.wait_for(|sent| *sent > silent);
    within_timeout("an acknowledgement after the silence", later)
        .await
        .unwrap();
    test.worker.stop().await;
}

#[tokio::test]
async fn a_curator_that_is_silent_on_a_good_connection_is_left_for_another() {
    let test = beating(answer(200, Duration::ZERO)).await;
    let script = Script {
        heartbeats: answer(5000, Duration::ZERO),
        ..Script::default()
    };
    let second = test.fake.another(script).await;
    let both = [&test.fake.curator, &second];
    test.connection.set(test.fake.connection_to_all(&both));
    let mut acknowledged = test.acknowledged.watch();
    next("an acknowledgement", &mut acknowledged).await;
    // It accepts heartbeats without ever answering, and otherwise works.
    test.fake.curator.set_heartbeats(Heartbeats::Ignore);
    let arrived = second.until(|seen| !seen.heartbeats.is_empty());
    within_timeout("a heartbeat elsewhere", arrived).await;
    test.worker.stop().await;
}

#[tokio::test]
async fn a_stream_that_the_curator_ends_is_opened_again() {
    let test = beating(answer(5000, Duration::ZERO)).await;
    let mut acknowledged = test.acknowledged.watch();
    next("an acknowledgement", &mut acknowledged).await;
    test.fake.curator.set_heartbeats(Heartbeats::End);
    test.worker
        .fails("the curator closed the heartbeat stream")
        .await;
    let ended = Instant::now();
    test.fake
        .curator
        .set_heartbeats(answer(5000, Duration::ZERO));
    let later = acknowledged.wait_for(|sent| *sent > ended);
    within_timeout("an acknowledgement after the end", later)
        .await
        .unwrap();
    test.worker.stop().await;
}

#[tokio::test]
async fn a_new_connection_is_used_at_once() {
    let test = beating(answer(5000, Duration::ZERO)).await;
    let first = &test.fake.curator;
    within_timeout("the first", first.until(|seen| seen.heartbeats.len() > 1)).await;
    let second = test.fake.another(Script {
        heartbeats: answer(5000, Duration::ZERO),
        ..Script::default()
    });
    let second = second.await;
    test.connection.set(test.fake.connection_to(&second));
    within_timeout(
        "the second",
        second.until(|seen| !seen.heartbeats.is_empty()),
    )
    .await;
    let before = first.seen().heartbeats.len();
    within_timeout(
        "the second",
        second.until(|seen| seen.heartbeats.len() >= 5),
    )
    .await;
    // One may have been in flight.
    assert!(first.seen().heartbeats.len() <= before + 1);
    test.worker.is_fine();
    test.worker.stop().await;
}

#[tokio::test]
async fn a_node_that_is_not_let_in_is_counted_each_time() {
    let test = beating(Heartbeats::Refuse).await;
    let mut refusals = test.refusals.watch();
    test.worker.fails("not a node of this cluster").await;
    let grown = refusals.wait_for(|count| *count >= 3);
    within_timeout("refusals", grown).await.unwrap();
    assert_eq!(test.acknowledged.get(), None);
    test.worker.stop().await;
}

#[tokio::test]
async fn who_cannot_be_reached_has_refused_nothing() {
    let test = beating(Heartbeats::End).await;
    test.worker.restarted(2).await;
    let stranger = Fake::new(Script::default()).await;
    test.connection
        .set(test.fake.connection_to(&stranger.curator));
    test.worker.fails("certificate").await;
    assert_eq!(test.refusals.get(), None);
    test.worker.stop().await;
}

#[tokio::test]
async fn the_time_of_the_curator_is_told() {
    let after = Duration::from_millis(50);
    let test = beating(answer(5000, after)).await;
    let time = next("a time", &mut test.curator_time.watch()).await;
    let told = UNIX_EPOCH + Duration::from_millis(1_790_000_000_000);
    assert_eq!(time.time, told);
    assert!(time.is_synchronised);
    assert!(time.round_trip >= after, "{time:?}");
    test.worker.stop().await;
}
