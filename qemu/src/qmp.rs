//! QEMU's machine protocol: JSON lines on a socket.
//!
//! Two tasks own the two directions, so that a cancelled call never leaves half a command on the wire, or an answer
//! that the next command would take for its own. Events go to a journal, so that they can be read later (the reason of
//! a shutdown is needed when QEMU has ended). All messages are written to the machine's `qmp.log`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::journal::{Cursor, Journal, Limits, Weigh, Writer, journal};

/// QEMU does not send longer lines.
const MAX_LINE: usize = 4 << 20;

const EVENTS: Limits = Limits {
    entries: 4096,
    weight: 4 << 20,
};

/// Bound for a command. QEMU's main loop answers in milliseconds; on a host with many busy machines it takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// An asynchronous message of QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// `SHUTDOWN`, `RESET`, `WATCHDOG` …
    pub name: String,
    /// Its data; null if there is none.
    pub data: Value,
    /// When it was read, since QEMU's start.
    pub at: Duration,
}

impl Weigh for Event {
    fn weight(&self) -> usize {
        self.name.len() + self.data.to_string().len()
    }
}

/// A subscription to the events, from the first that is kept.
#[derive(Debug)]
pub struct Events(Cursor<Event>);

impl Events {
    /// The next event; `None` when the connection has ended. Cancel safe.
    pub async fn next(&mut self) -> Option<Event> {
        self.0.next().await
    }
}

/// A QMP operation failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The connection failed.
    #[error("QMP: {0}")]
    Connect(#[from] crate::run_dir::RunDirError),
    /// The log could not be written.
    #[error("QMP log {path}: {source}")]
    Log {
        /// Path of the log.
        path: std::path::PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// The first line was not QEMU's greeting.
    #[error("QMP: expected QEMU's greeting, got {0:?}")]
    Greeting(String),
    /// The connection ended before the answer.
    #[error("QMP: the connection was closed before the answer to {0}")]
    Closed(String),
    /// There was no answer in time.
    #[error("QMP: no answer to {command} within {after:?} (another client on the same socket?)")]
    Timeout {
        /// The command.
        command: String,
        /// The timeout.
        after: Duration,
    },
    /// QEMU returned an error.
    #[error("QMP: {command} failed: {class}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's class of the error.
        class: String,
        /// QEMU's description.
        description: String,
    },
    /// The answer has an unexpected form.
    #[error("QMP: unexpected answer to {command}: {answer}")]
    Answer {
        /// The command.
        command: String,
        /// The answer.
        answer: String,
    },
}

/// A parsed line from QEMU.
#[derive(Debug, PartialEq)]
enum Message {
    Greeting,
    Event {
        name: String,
        data: Value,
    },
    Return {
        id: u64,
        value: Value,
    },
    Error {
        id: u64,
        class: String,
        description: String,
    },
    /// Well-formed, and not used here.
    Other,
}

/// Parses one line. `None`: not a JSON object.
fn parse(line: &[u8]) -> Option<Message> {
    let Value::Object(mut object) = serde_json::from_slice(line).ok()? else {
        return None;
    };
    let mut take = |key: &str| object.remove(key);
    let text = |value: Option<Value>| match value {
        Some(Value::String(text)) => text,
        _ => String::new(),
    };
    if take("QMP").is_some() {
        return Some(Message::Greeting);
    }
    if let Some(Value::String(name)) = take("event") {
        let data = take("data").unwrap_or(Value::Null);
        return Some(Message::Event { name, data });
    }
    let Some(id) = take("id").and_then(|id| id.as_u64()) else {
        return Some(Message::Other);
    };
    if let Some(value) = take("return") {
        return Some(Message::Return { id, value });
    }
    if let Some(Value::Object(mut error)) = take("error") {
        return Some(Message::Error {
            id,
            class: text(error.remove("class")),
            description: text(error.remove("desc")),
        });
    }
    Some(Message::Other)
}

type Answer = Result<Value, (String, String)>;

/// Commands that wait for their answers; `None` after the end.
type Pending = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>>;

/// A connection. Clones share the connection; the last one closes it.
#[derive(Clone, Debug)]
pub struct Qmp {
    commands: mpsc::Sender<Vec<u8>>,
    pending: Pending,
    next_id: Arc<AtomicU64>,
    events: Journal<Event>,
    _tasks: Arc<[AbortOnDropHandle<()>; 2]>,
}

/// The log of QMP traffic.
#[derive(Clone, Debug)]
struct Log {
    file: Arc<File>,
    started: Instant,
}

impl Log {
    fn open(path: &Path, started: Instant) -> Result<Self, QmpError> {
        let file = File::options()
            .append(true)
            .create(true)
            .open(path)
            .map_err(|source| QmpError::Log {
                path: path.to_owned(),
                source,
            })?;
        Ok(Self {
            file: Arc::new(file),
            started,
        })
    }

    /// A log that cannot be written (a full disk) must not stop the machine.
    fn write(&self, direction: &str, line: &[u8]) {
        let at = self.started.elapsed().as_secs_f64();
        let line = String::from_utf8_lossy(line);
        let line = format!("{at:9.3} {direction} {}\n", line.trim_end());
        if let Err(error) = (&*self.file).write_all(line.as_bytes()) {
            tracing::warn!(%error, "cannot write the QMP log");
        }
    }
}

impl Qmp {
    /// Performs the handshake with the QEMU at the other end of `stream`. Times are counted from `started`.
    ///
    /// # Errors
    /// If the peer is not QEMU, the connection ends, or the bound is exceeded.
    pub(crate) async fn handshake(
        stream: UnixStream,
        log: &Path,
        started: Instant,
    ) -> Result<Self, QmpError> {
        let log = Log::open(log, started)?;
        let (read, write) = stream.into_split();
        let mut read = BufReader::new(read);
        timeout(PATIENCE, greeting(&mut read, &log))
            .await
            .map_err(|_| QmpError::Timeout {
                command: "the greeting".to_owned(),
                after: PATIENCE,
            })??;
        let (events_in, events) = journal(EVENTS);
        let (commands, queue) = mpsc::channel(16);
        let pending: Pending = Arc::new(Mutex::new(Some(HashMap::new())));
        let reader = tokio::spawn(read_all(read, events_in, pending.clone(), log.clone()));
        let writer = tokio::spawn(write_all(write, queue, log));
        let qmp = Self {
            commands,
            pending,
            next_id: Arc::default(),
            events,
            _tasks: Arc::new([
                AbortOnDropHandle::new(reader),
                AbortOnDropHandle::new(writer),
            ]),
        };
        qmp.execute("qmp_capabilities", Value::Null).await?;
        Ok(qmp)
    }

    /// Executes a command and returns its answer. `arguments` is an object, or null for none.
    ///
    /// # Errors
    /// If QEMU returns an error, ends, or does not answer in 30 seconds.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let closed = || QmpError::Closed(command.to_owned());
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut message = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let (sender, answer) = oneshot::channel();
        with(&self.pending, |pending| {
            pending.as_mut().map(|pending| pending.insert(id, sender))
        })
        .ok_or_else(closed)?;
        let exchange = async {
            let mut line = message.to_string().into_bytes();
            line.push(b'\n');
            self.commands.send(line).await.map_err(|_| closed())?;
            answer.await.map_err(|_| closed())
        };
        let answer = timeout(PATIENCE, exchange).await;
        if answer.is_err() {
            with(&self.pending, |pending| {
                pending.as_mut().map(|pending| pending.remove(&id))
            });
        }
        answer
            .map_err(|_| QmpError::Timeout {
                command: command.to_owned(),
                after: PATIENCE,
            })??
            .map_err(|(class, description)| QmpError::Refused {
                command: command.to_owned(),
                class,
                description,
            })
    }

    /// Executes a line of the human monitor, and returns its output.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub async fn human(&self, command: &str) -> Result<String, QmpError> {
        let answer = self
            .execute("human-monitor-command", json!({ "command-line": command }))
            .await?;
        match answer {
            Value::String(text) => Ok(text),
            other => Err(QmpError::Answer {
                command: command.to_owned(),
                answer: other.to_string(),
            }),
        }
    }

    /// The machine's run state in QEMU: `running`, `paused`,
    /// `watchdog` …
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub async fn status(&self) -> Result<String, QmpError> {
        let answer = self.execute("query-status", Value::Null).await?;
        match answer["status"].as_str() {
            Some(status) => Ok(status.to_owned()),
            None => Err(QmpError::Answer {
                command: "query-status".to_owned(),
                answer: answer.to_string(),
            }),
        }
    }

    /// All events that are kept, from the start of the connection.
    pub fn events(&self) -> Events {
        Events(self.events.read())
    }

    /// Only future events.
    pub fn new_events(&self) -> Events {
        Events(self.events.read_new())
    }

    /// The last events, oldest first.
    pub(crate) fn last_events(&self) -> Vec<Event> {
        self.events.last(EVENTS.entries)
    }

    /// Waits until the connection has ended and all events were read.
    pub(crate) async fn ended(&self) {
        self.events.ended().await;
    }
}

fn with<R>(
    pending: &Pending,
    f: impl FnOnce(&mut Option<HashMap<u64, oneshot::Sender<Answer>>>) -> R,
) -> R {
    // The map is consistent after every step, even if a thread panicked.
    f(&mut pending.lock().unwrap_or_else(PoisonError::into_inner))
}

async fn greeting(read: &mut BufReader<OwnedReadHalf>, log: &Log) -> Result<(), QmpError> {
    let line = match read_line(read).await {
        Ok(Some(line)) => line,
        Ok(None) | Err(_) => return Err(QmpError::Closed("the greeting".to_owned())),
    };
    log.write("<-", &line);
    match parse(&line) {
        Some(Message::Greeting) => Ok(()),
        _ => Err(QmpError::Greeting(
            String::from_utf8_lossy(&line).into_owned(),
        )),
    }
}

/// One line without its end; `None` at the end of the stream.
async fn read_line(read: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    loop {
        let bytes = read.fill_buf().await?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let count = end.map_or(bytes.len(), |end| end + 1);
        line.extend_from_slice(&bytes[..end.unwrap_or(count)]);
        read.consume(count);
        if end.is_some() {
            return Ok(Some(line));
        }
        if line.len() > MAX_LINE {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a line of more than {MAX_LINE} bytes"),
            ));
        }
    }
}

/// Reads until the connection ends. A QEMU that is killed resets it, which is treated as the end.
async fn read_all(
    mut read: BufReader<OwnedReadHalf>,
    events: Writer<Event>,
    pending: Pending,
    log: Log,
) {
    loop {
        let line = match read_line(&mut read).await {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(error) => {
                log.write("--", error.to_string().as_bytes());
                break;
            }
        };
        log.write("<-", &line);
        match parse(&line) {
            Some(Message::Event { name, data }) => events.push(Event {
                name,
                data,
                at: log.started.elapsed(),
            }),
            Some(Message::Return { id, value }) => answer(&pending, id, Ok(value)),
            Some(Message::Error {
                id,
                class,
                description,
            }) => answer(&pending, id, Err((class, description))),
            Some(Message::Greeting | Message::Other) => {}
            None => {
                log.write("--", b"expected QMP");
                break;
            }
        }
    }
    // Fails the waiting callers, and later ones.
    with(&pending, Option::take);
}

fn answer(pending: &Pending, id: u64, answer: Answer) {
    let waiting = with(pending, |pending| {
        pending.as_mut().and_then(|pending| pending.remove(&id))
    });
    if let Some(waiting) = waiting {
        // The caller may have been cancelled.
        let _ = waiting.send(answer);
    }
}

async fn write_all(mut write: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>, log: Log) {
    while let Some(line) = queue.recv().await {
        log.write("->", &line);
        if let Err(error) = write.write_all(&line).await {
            // The reader sees the end as well, and fails the waiting callers.
            log.write("--", error.to_string().as_bytes());
            return;
        }
    }
}

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;
