//! List and watch: all objects of a kind, and each change of them.
//!
//! A list has a resource version, and a watch returns the changes since a resource version. The
//! server ends each watch after some minutes; it is resumed from the last version. When the server
//! has compacted that version, the objects are listed again, and consumers get one event with all
//! objects: those that are missing from it have been deleted.
//!
//! Of each object only what the consumer wants is kept, from the page on in which it was read, and
//! within the limits of a [`Store`]: a page is bounded, all objects of a kind are not.
//!
//! The stream never ends. An error is an item of it, and the watch is retried after
//! [`RETRY_DELAY`]. There is no exponential backoff: on a node that has just started the first
//! attempts come too early, and with a long delay it would have no DNS for that time.

use std::io;
use std::time::Duration;

use futures::stream::{BoxStream, Stream, StreamExt as _, TryStreamExt as _, unfold};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::time::{sleep, timeout};
use tokio_util::codec::{FramedRead, LinesCodec};
use tokio_util::io::StreamReader;

use super::fields::{Metadata, Object};
use super::store::{Event, Full, Kept, Key, Store};
use super::{ApiError, Objects, message};

/// Delay before a retry.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// `timeoutSeconds` of a watch: the server ends it after this time.
const WATCH_LASTS: Duration = Duration::from_secs(290);
/// A watch without any event for this long is broken: the server should have ended it.
const WATCH_ENDS_WITHIN: Duration = Duration::from_secs(330);
/// Objects per page of a list, unless the page would be too large.
const PAGE_OBJECTS: usize = 100;
/// Maximum size of an event; etcd has no larger objects.
const MAX_OBJECT_BYTES: usize = 8 << 20;

/// Which objects are watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// All objects.
    All,
    /// The objects with this label, `KEY=VALUE`.
    Labelled(String),
    /// The object of this name, whether it exists or not.
    Named(String),
}

impl Which {
    /// Key and value of the query parameter; `None` if there is no selector.
    fn selector(&self) -> Option<(&'static str, String)> {
        match self {
            Self::All => None,
            Self::Labelled(label) => Some(("labelSelector", label.clone())),
            Self::Named(name) => Some(("fieldSelector", format!("metadata.name={name}"))),
        }
    }
}

/// Lists and watches objects. The stream never ends. `read` returns what is kept of an object, or
/// `None` to ignore it. The objects are listed again after some minutes if `full` has been set.
pub fn watch<O, T>(
    objects: Objects,
    which: Which,
    read: fn(O) -> Option<T>,
    full: Full,
) -> impl Stream<Item = Result<Event<T>, ApiError>> + Send
where
    O: Object + DeserializeOwned,
    T: Kept + Send,
{
    let follower = Follower {
        objects,
        which,
        full,
        state: State::Unknown,
        pause: false,
    };
    unfold(follower, move |mut follower| async move {
        Some((next(&mut follower, read).await, follower))
    })
}

/// The next event. What is in here is compiled for each kind of objects, the rest of this module once.
async fn next<O, T>(follower: &mut Follower, read: fn(O) -> Option<T>) -> Result<Event<T>, ApiError>
where
    O: Object + DeserializeOwned,
    T: Kept + Send,
{
    loop {
        let mut all = Store::default();
        let mut insert = |object: &RawValue| {
            if let (key, Some(value)) = parse(object, read)? {
                all.insert(key, value);
            }
            Ok(())
        };
        match follower.step(&mut insert).await? {
            Step::Again => {}
            Step::Listed => return Ok(Event::All(all)),
            Step::Change(change, object) => {
                let (key, value) = parse(&object, read).inspect_err(|_| follower.reopen())?;
                return Ok(match (change, value) {
                    (Change::Written, Some(value)) => Event::Changed(key, value),
                    (Change::Written, None) | (Change::Deleted, _) => Event::Gone(key),
                });
            }
        }
    }
}

/// Key and kept part of an object.
fn parse<O: Object + DeserializeOwned, T>(
    object: &RawValue,
    read: fn(O) -> Option<T>,
) -> Result<(Key, Option<T>), ApiError> {
    let object: O = serde_json::from_str(object.get())?;
    let Metadata {
        namespace, name, ..
    } = object.metadata();
    let key = (namespace.clone(), name.clone());
    Ok((key, read(object)))
}

struct Follower {
    objects: Objects,
    which: Which,
    full: Full,
    state: State,
    /// Wait before the next step: the last one has failed.
    pause: bool,
}

/// State of the watch.
enum State {
    Unknown,
    /// Everything up to this resource version is known.
    Known(String),
    /// A watch from this resource version is open.
    Following(String, Lines),
}

/// The lines of a watch, each of which is an event.
type Lines = BoxStream<'static, Result<String, ApiError>>;

/// Receives each object of a list.
type Each<'a> = &'a mut (dyn FnMut(&RawValue) -> Result<(), ApiError> + Send);

/// What a step has brought.
enum Step {
    /// Nothing yet.
    Again,
    /// All objects have been listed.
    Listed,
    /// An object has changed.
    Change(Change, Box<RawValue>),
}

impl Follower {
    /// One step: list, open a watch, or read an event. Safe to cancel.
    async fn step(&mut self, each: Each<'_>) -> Result<Step, ApiError> {
        if self.pause {
            self.pause = false;
            sleep(RETRY_DELAY).await;
        }
        let step = match &mut self.state {
            State::Unknown => self.list(each).await,
            State::Known(version) => match open(&self.objects, &self.which, version).await {
                Ok(lines) => {
                    self.state = State::Following(std::mem::take(version), lines);
                    Ok(Step::Again)
                }
                Err(error) => Err(error),
            },
            State::Following(..) => self.event().await,
        };
        match step {
            // The version has been compacted: list again. This is not an error.
            Err(error) if error.is(StatusCode::GONE) => {
                self.state = State::Unknown;
                self.pause = true;
                Ok(Step::Again)
            }
            Err(error) => {
                self.pause = true;
                Err(error)
            }
            step => step,
        }
    }

    /// Lists all objects.
    async fn list(&mut self, each: Each<'_>) -> Result<Step, ApiError> {
        let mut pages = Pages {
            more: String::new(),
            limit: PAGE_OBJECTS,
        };
        loop {
            let (items, version) = pages.next(&self.objects, &self.which).await?;
            for object in items {
                each(&object)?;
            }
            if pages.more.is_empty() {
                self.state = State::Known(version);
                return Ok(Step::Listed);
            }
        }
    }

    /// Reads an event of the open watch.
    async fn event(&mut self) -> Result<Step, ApiError> {
        let State::Following(version, lines) = &mut self.state else {
            return Ok(Step::Again);
        };
        let told = match timeout(WATCH_ENDS_WITHIN, lines.next()).await {
            Ok(Some(Ok(line))) => told(&line, version),
            // A server that ends each watch at once must not cause a busy loop.
            Ok(None) => {
                self.pause = true;
                self.state = match self.full.take() {
                    true => State::Unknown,
                    false => State::Known(std::mem::take(version)),
                };
                return Ok(Step::Again);
            }
            Ok(Some(Err(error))) => Err(error),
            Err(_) => Err(ApiError::Silent(WATCH_ENDS_WITHIN)),
        };
        match told {
            Ok(Some((change, object))) => Ok(Step::Change(change, object)),
            Ok(None) => Ok(Step::Again),
            Err(error) => {
                self.reopen();
                Err(error)
            }
        }
    }

    /// After an event that cannot be read: continues from the last known version in another watch.
    fn reopen(&mut self) {
        self.pause = true;
        if let State::Following(version, _) = &mut self.state {
            self.state = State::Known(std::mem::take(version));
        }
    }
}

/// The pages of a list.
#[derive(Debug)]
struct Pages {
    /// Where the next page begins; empty at the begin and at the end.
    more: String,
    /// Maximum number of objects in a page.
    limit: usize,
}

impl Pages {
    async fn next(
        &mut self,
        objects: &Objects,
        which: &Which,
    ) -> Result<(Vec<Box<RawValue>>, String), ApiError> {
        #[derive(Deserialize)]
        struct Page {
            metadata: PageMetadata,
            items: Option<Vec<Box<RawValue>>>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct PageMetadata {
            resource_version: String,
            #[serde(default, rename = "continue")]
            more: String,
        }
        loop {
            let so_many = self.limit.to_string();
            let query = query(which, &[("limit", &so_many), ("continue", &self.more)]);
            let path = objects.path(None, &query)?;
            let page = match objects.client.ask(Method::GET, path, None).await {
                // A user who creates large objects must not be able to block the watch.
                Err(ApiError::Long) if self.limit > 1 => {
                    self.limit /= 2;
                    continue;
                }
                page => page?,
            };
            let page: Page = serde_json::from_slice(&page)?;
            self.more = page.metadata.more;
            let items = page.items.unwrap_or_default();
            return Ok((items, page.metadata.resource_version));
        }
    }
}

/// All objects of a kind, page by page; of each only the metadata is kept. Safe to cancel.
#[derive(Debug)]
pub struct MetadataPages {
    objects: Objects,
    /// `None` after the last page.
    pages: Option<Pages>,
}

impl MetadataPages {
    /// Begins with the first page.
    pub fn of(objects: Objects) -> Self {
        let pages = Pages {
            more: String::new(),
            limit: PAGE_OBJECTS,
        };
        Self {
            objects,
            pages: Some(pages),
        }
    }

    /// The next page; `None` after the last one. Fails with [`StatusCode::GONE`] if the pages were read so slowly that
    /// the server does not know any more where they continue.
    pub async fn next(&mut self) -> Result<Option<Vec<Metadata>>, ApiError> {
        #[derive(Deserialize)]
        struct Listed {
            metadata: Metadata,
        }
        let Some(pages) = &mut self.pages else {
            return Ok(None);
        };
        let (items, _) = pages.next(&self.objects, &Which::All).await?;
        if pages.more.is_empty() {
            self.pages = None;
        }
        let items = items.iter().map(|object| {
            let Listed { metadata } = serde_json::from_str(object.get())?;
            Ok(metadata)
        });
        items.collect::<Result<_, ApiError>>().map(Some)
    }
}

/// Opens a watch from a resource version.
async fn open(objects: &Objects, which: &Which, version: &str) -> Result<Lines, ApiError> {
    let lasts = WATCH_LASTS.as_secs().to_string();
    let query = query(
        which,
        &[
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", &lasts),
            ("resourceVersion", version),
        ],
    );
    let path = objects.path(None, &query)?;
    let begun = objects.client.begin(Method::GET, path, None);
    let answer = timeout(super::ANSWER_WITHIN, begun)
        .await
        .unwrap_or(Err(ApiError::Silent(super::ANSWER_WITHIN)))?;
    let bytes = answer.into_body().into_data_stream();
    let reader = StreamReader::new(bytes.map_err(io::Error::other));
    let lines = FramedRead::new(reader, LinesCodec::new_with_max_length(MAX_OBJECT_BYTES));
    let broken = |error: tokio_util::codec::LinesCodecError| ApiError::Broken(error.into());
    Ok(lines.map_err(broken).boxed())
}

/// The query of a request. Parameters without a value are omitted.
fn query(which: &Which, rest: &[(&str, &str)]) -> String {
    let selector = which.selector();
    let selector = selector.as_ref().map(|(key, value)| (*key, value.as_str()));
    let all = selector.into_iter().chain(rest.iter().copied());
    let all = all.filter(|(_, value)| !value.is_empty());
    let parts: Vec<String> = all
        .map(|(key, value)| format!("{key}={}", escaped(value)))
        .collect();
    format!("?{}", parts.join("&"))
}

/// Percent-encodes a value of a query.
fn escaped(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// What has happened to an object.
enum Change {
    Written,
    Deleted,
}

/// Parses one line; `None` for a bookmark. Updates the resource version.
fn told(line: &str, version: &mut String) -> Result<Option<(Change, Box<RawValue>)>, ApiError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "UPPERCASE")]
    enum EventKind {
        Added,
        Modified,
        Deleted,
        Bookmark,
        Error,
    }
    #[derive(Deserialize)]
    struct Line {
        #[serde(rename = "type")]
        told: EventKind,
        object: Box<RawValue>,
    }
    #[derive(Deserialize)]
    struct Versioned {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Status {
        code: u16,
    }
    let Line { told, object } = serde_json::from_str(line)?;
    if matches!(told, EventKind::Error) {
        let Status { code } = serde_json::from_str(object.get())?;
        return Err(ApiError::Refused {
            code: StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            message: message(object.get().as_bytes()),
        });
    }
    let of: Versioned = serde_json::from_str(object.get())?;
    *version = of.metadata.resource_version;
    Ok(match told {
        EventKind::Added | EventKind::Modified => Some((Change::Written, object)),
        EventKind::Deleted => Some((Change::Deleted, object)),
        EventKind::Bookmark | EventKind::Error => None,
    })
}
