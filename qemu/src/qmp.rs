//! QEMU's machine protocol: JSON lines on a socket.
//!
//! Two tasks own the two directions, so that a caller who gives up half way
//! never leaves half a command on the wire, nor an answer that the next
//! command would take for its own. Events go to a journal: whoever looks late
//! (the reason of a shutdown is asked for when QEMU is already gone) still
//! finds them. Everything that is said goes to the machine's `qmp.log`.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Write},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;

use crate::journal::{Cursor, Journal, Limits, Weigh, Writer, journal};

/// Longer lines come from no QEMU.
const MAX_LINE: usize = 4 << 20;

const EVENTS: Limits = Limits {
    entries: 4096,
    weight: 4 << 20,
};

/// How long QEMU may take for a command. Its main loop answers in
/// milliseconds; on a host with many busy machines it takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Something that QEMU said unasked.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// `SHUTDOWN`, `RESET`, `WATCHDOG` …
    pub name: String,
    /// What goes with it; null if nothing does.
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

/// QMP did not do.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// Nobody listens there.
    #[error("QMP: {0}")]
    Connect(#[from] crate::run_dir::RunDirError),
    /// The log could not be written.
    #[error("QMP log {path}: {source}")]
    Log {
        /// The log.
        path: std::path::PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The first line was not QEMU's greeting.
    #[error("QMP: wanted QEMU's greeting, found {0:?}")]
    Greeting(String),
    /// The connection ended before there was an answer.
    #[error("QMP: the connection ended before {0} was answered")]
    Closed(String),
    /// There was no answer in time.
    #[error("QMP: {command} was not answered in {after:?} (another client on the same socket?)")]
    Timeout {
        /// The command.
        command: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// QEMU said no.
    #[error("QMP: {command} was refused: {class}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's class of the error.
        class: String,
        /// QEMU's words.
        description: String,
    },
    /// The answer was not of the form that it should have.
    #[error("QMP: the answer to {command} is not understood: {answer}")]
    Answer {
        /// The command.
        command: String,
        /// The answer.
        answer: String,
    },
}

/// What one line from QEMU is.
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
    /// Well-formed, and none of our business.
    Other,
}

/// Reads one line. `None`: no JSON object.
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

/// Commands that wait for their answers; `None` when there will be no more.
type Pending = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>>;

/// A connection. Clones are the same connection; the last one closes it.
#[derive(Clone, Debug)]
pub struct Qmp {
    commands: mpsc::Sender<Vec<u8>>,
    pending: Pending,
    next_id: Arc<AtomicU64>,
    events: Journal<Event>,
    _tasks: Arc<[AbortOnDropHandle<()>; 2]>,
}

/// Where QMP traffic is written.
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
            tracing::warn!(%error, "QMP log");
        }
    }
}

impl Qmp {
    /// Shakes hands with the QEMU at the other end of `stream`. Times are
    /// counted from `started`.
    ///
    /// # Errors
    /// If it is no QEMU, or the connection ends, or nothing comes in time.
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

    /// Has QEMU execute a command and gives its answer. `arguments` is an
    /// object, or null for none.
    ///
    /// # Errors
    /// If QEMU refuses, ends, or does not answer in 30 seconds.
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

    /// A line for the human monitor, and what it printed.
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

    /// QEMU's word for what the machine is doing: `running`, `paused`,
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

    /// All events since the connection was made, as far as they are kept.
    pub fn events(&self) -> Events {
        Events(self.events.read())
    }

    /// Only events from now on.
    pub fn new_events(&self) -> Events {
        Events(self.events.read_new())
    }

    /// The last events, oldest first.
    pub(crate) fn last_events(&self) -> Vec<Event> {
        self.events.last(EVENTS.entries)
    }

    /// Waits until the connection has ended and all events are read.
    pub(crate) async fn ended(&self) {
        self.events.ended().await;
    }
}

fn with<R>(
    pending: &Pending,
    f: impl FnOnce(&mut Option<HashMap<u64, oneshot::Sender<Answer>>>) -> R,
) -> R {
    // The map is whole after every step, whoever panicked.
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

/// Reads until the connection ends. QEMU that is killed resets it, which is
/// an end like any other.
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
                log.write("--", b"that was no QMP");
                break;
            }
        }
    }
    // Whoever waits is told, and whoever comes later.
    with(&pending, Option::take);
}

fn answer(pending: &Pending, id: u64, answer: Answer) {
    let waiting = with(pending, |pending| {
        pending.as_mut().and_then(|pending| pending.remove(&id))
    });
    if let Some(waiting) = waiting {
        // Whoever asked may have given up by now.
        let _ = waiting.send(answer);
    }
}

async fn write_all(mut write: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>, log: Log) {
    while let Some(line) = queue.recv().await {
        log.write("->", &line);
        if let Err(error) = write.write_all(&line).await {
            // The reader sees the end as well, and tells those who wait.
            log.write("--", error.to_string().as_bytes());
            return;
        }
    }
}

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;
