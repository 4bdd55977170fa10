//! The peer of a connection, scripted by a test.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::Qmp;

const GREETING: &[u8] = b"{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n";

/// The event of a guest that powers itself off.
pub(crate) const SHUTDOWN: &[u8] = b"{\"event\": \"SHUTDOWN\", \"data\": {\"guest\": true, \"reason\": \"guest-shutdown\"}, \"timestamp\": {}}\n";

/// A peer that greets, accepts the capabilities and then sends `more`. The log is in the folder.
pub(crate) async fn connected(folder: &Path, more: &'static [u8]) -> (Qmp, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    theirs.write_all(GREETING).await.expect("greeted");
    let log = folder.join("qmp.log");
    let peer = async {
        let command = next_command(&mut theirs).await;
        assert_eq!(command["execute"], "qmp_capabilities");
        answer(&mut theirs, &command, json!({})).await;
        theirs.write_all(more).await.expect("written");
    };
    let (qmp, ()) = tokio::join!(Qmp::handshake(ours, &log, Instant::now()), peer);
    (qmp.expect("a handshake"), theirs)
}

/// Answers as many lines for the monitor with these texts.
pub(crate) async fn monitor(mut peer: UnixStream, texts: Vec<String>) -> UnixStream {
    for text in texts {
        let command = next_command(&mut peer).await;
        assert_eq!(command["execute"], "human-monitor-command");
        answer(&mut peer, &command, json!(text)).await;
    }
    peer
}

/// The next command that the peer receives.
pub(crate) async fn next_command(stream: &mut UnixStream) -> Value {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        line.push(stream.read_u8().await.expect("a command"));
    }
    serde_json::from_slice(&line).expect("JSON")
}

async fn answer(stream: &mut UnixStream, command: &Value, value: Value) {
    let answer = json!({ "return": value, "id": command["id"] });
    let line = format!("{answer}\r\n");
    stream.write_all(line.as_bytes()).await.expect("answered");
}
