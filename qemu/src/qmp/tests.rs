//! The protocol against a scripted peer. Real QEMU is tested in `tests/machine.rs`.

use proptest::prelude::*;
use tokio::io::AsyncWriteExt;

use super::fake::next_command;
use super::*;

async fn connected(more: &'static [u8]) -> (Qmp, UnixStream, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let (qmp, peer) = fake::connected(folder.path(), more).await;
    (qmp, peer, folder)
}

#[tokio::test]
async fn answers_find_their_commands_in_any_order() {
    let (qmp, mut peer, folder) = connected(b"").await;
    let peer = async move {
        let first = next_command(&mut peer).await;
        let second = next_command(&mut peer).await;
        for (command, word) in [(&second, "second"), (&first, "first")] {
            let answer = json!({ "return": { "status": word }, "id": command["id"] });
            peer.write_all(format!("{answer}\n").as_bytes())
                .await
                .expect("answered");
        }
        peer
    };
    let (first, second, _peer) = tokio::join!(qmp.status(), qmp.status(), peer);
    assert_eq!(first.expect("answered"), "first");
    assert_eq!(second.expect("answered"), "second");
    let log = std::fs::read_to_string(folder.path().join("qmp.log")).expect("the log");
    assert!(log.contains("-> {\"execute\":\"query-status\""), "{log}");
    assert!(log.contains("<- {\"QMP\""), "{log}");
}

#[tokio::test]
async fn a_refusal_names_command_and_reason() {
    let (qmp, mut peer, _folder) = connected(b"").await;
    let refuse = async {
        let command = next_command(&mut peer).await;
        assert_eq!(command["arguments"]["x"], 1);
        let answer = json!({ "error": { "class": "GenericError", "desc": "no such x" }, "id": command["id"] });
        peer.write_all(format!("{answer}\n").as_bytes())
            .await
            .expect("answered");
    };
    let (error, ()) = tokio::join!(qmp.execute("set_x", json!({ "x": 1 })), refuse);
    let error = error.expect_err("refused").to_string();
    assert_eq!(error, "QMP: set_x failed: GenericError: no such x");
}

#[tokio::test]
async fn events_are_kept_for_those_who_come_late() {
    let (qmp, peer, _folder) = connected(
        b"{\"event\": \"SHUTDOWN\", \"data\": {\"guest\": true, \"reason\": \"guest-reset\"}, \"timestamp\": {}}\n",
    )
    .await;
    drop(peer);
    qmp.ended().await;
    let mut events = qmp.events();
    let event = events.next().await.expect("an event");
    assert_eq!(
        (event.name.as_str(), &event.data["reason"]),
        ("SHUTDOWN", &json!("guest-reset"))
    );
    assert_eq!(events.next().await, None);
}

#[tokio::test]
async fn whoever_waits_is_told_of_the_end() {
    let (qmp, mut peer, _folder) = connected(b"").await;
    let leave = async {
        next_command(&mut peer).await;
        drop(peer);
    };
    let (error, ()) = tokio::join!(qmp.status(), leave);
    assert!(matches!(error, Err(QmpError::Closed(command)) if command == "query-status"));
    qmp.ended().await;
    assert!(matches!(qmp.status().await, Err(QmpError::Closed(_))));
}

#[tokio::test]
async fn what_is_not_qmp_ends_the_connection() {
    let (qmp, _peer, _folder) = connected(b"hello?\n").await;
    qmp.ended().await;
    assert!(matches!(qmp.status().await, Err(QmpError::Closed(_))));
}

#[tokio::test]
async fn somebody_else_is_not_taken_for_qemu() {
    let folder = tempfile::tempdir().expect("a folder");
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    theirs.write_all(b"220 mail\r\n").await.expect("written");
    let error = Qmp::handshake(ours, &folder.path().join("log"), Instant::now()).await;
    assert!(matches!(error, Err(QmpError::Greeting(words)) if words.starts_with("220 mail")));
}

#[tokio::test(start_paused = true)]
async fn silence_ends_in_a_timeout() {
    let folder = tempfile::tempdir().expect("a folder");
    let (ours, _theirs) = UnixStream::pair().expect("a pair");
    let error = Qmp::handshake(ours, &folder.path().join("log"), Instant::now()).await;
    assert!(matches!(error, Err(QmpError::Timeout { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_line_can_be_parsed(line in proptest::collection::vec(any::<u8>(), 0..80)) {
        let _ = parse(&line);
    }

    /// Objects with the right keys and arbitrary values.
    #[test]
    fn any_object_can_be_parsed(
        key in proptest::sample::select(vec!["QMP", "event", "return", "error"]),
        value in proptest::sample::select(vec!["1", "null", "{}", "[]", "\"x\"", "{\"class\":3}"]),
        id in proptest::option::of(proptest::sample::select(vec!["-1", "7", "\"7\"", "1e9", "null"])),
    ) {
        let id = id.map(|id| format!(",\"id\":{id}")).unwrap_or_default();
        let message = parse(format!("{{\"{key}\":{value}{id}}}").as_bytes());
        prop_assert!(message.is_some());
        if key == "return" && id == ",\"id\":7" {
            let value = serde_json::from_str(value).expect("JSON");
            prop_assert_eq!(message, Some(Message::Return { id: 7, value }));
        }
    }
}
