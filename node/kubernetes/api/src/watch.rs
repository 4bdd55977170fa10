//! All objects of a kind, and each change of them, for as long as somebody
//! listens.
//!
//! A listing says of which version it is, and a watch tells what has changed
//! since a version. A server ends each watch after some minutes, and it is
//! begun again where it stood. When the server has forgotten that version,
//! everything is listed anew: what listeners get is then everything at once, so
//! that what is missing from it is gone.
//!
//! Nothing ends here by itself. A failure is told, and after [`RETRY_DELAY`] it
//! goes on; pauses do not grow, for a node that has just started would have no names
//! for as long, when its first attempts were too early.

use std::collections::BTreeMap;
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
use super::{ApiError, Objects, message};

/// Before it goes on after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// A server is asked to end a watch after so long.
const WATCH_LASTS: Duration = Duration::from_secs(290);
/// A watch that has said nothing for so long should have been ended.
const WATCH_ENDS_WITHIN: Duration = Duration::from_secs(330);
/// So many objects are listed at a time, if they are not too large for that.
const PAGE_OBJECTS: usize = 100;
/// An object has at most so many bytes; etcd holds no larger ones.
const MAX_OBJECT_BYTES: usize = 8 << 20;

/// What a watch tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<T> {
    /// These are all that there are.
    All(Vec<T>),
    /// This one is new, or another than before.
    Changed(T),
    /// This one is gone; it was like this at last.
    Gone(T),
}

impl<T> Event<T> {
    fn try_map<U, E>(self, mut each: impl FnMut(T) -> Result<U, E>) -> Result<Event<U>, E> {
        Ok(match self {
            Self::All(all) => Event::All(all.into_iter().map(each).collect::<Result<_, E>>()?),
            Self::Changed(one) => Event::Changed(each(one)?),
            Self::Gone(one) => Event::Gone(each(one)?),
        })
    }
}

/// Which objects are followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// All.
    All,
    /// Those with this label, `KEY=VALUE`.
    Labelled(String),
    /// The one of this name, whether it is there or not.
    Named(String),
}

impl Which {
    /// As it stands in a query, if it has to.
    fn selector(&self) -> Option<(&'static str, String)> {
        match self {
            Self::All => None,
            Self::Labelled(label) => Some(("labelSelector", label.clone())),
            Self::Named(name) => Some(("fieldSelector", format!("metadata.name={name}"))),
        }
    }
}

/// Follows objects. Never ends.
pub fn watch<T: DeserializeOwned>(
    objects: Objects,
    which: Which,
) -> impl Stream<Item = Result<Event<T>, ApiError>> + Send {
    follow(objects, which).map(|told| {
        let read = |object: Box<RawValue>| serde_json::from_str(object.get());
        Ok(told?.try_map(read)?)
    })
}

/// The same, before anybody reads the objects.
fn follow(
    objects: Objects,
    which: Which,
) -> BoxStream<'static, Result<Event<Box<RawValue>>, ApiError>> {
    let follower = Follower {
        objects,
        which,
        state: State::Unknown,
        pause: false,
    };
    unfold(follower, |mut follower| async move {
        Some((follower.next().await, follower))
    })
    .boxed()
}

struct Follower {
    objects: Objects,
    which: Which,
    state: State,
    /// The last thing was no success.
    pause: bool,
}

/// How much is known.
enum State {
    Unknown,
    /// Everything up to this version.
    Known(String),
    /// The same, and what comes then is on its way.
    Following(String, Lines),
}

/// One event is one line.
type Lines = BoxStream<'static, Result<String, ApiError>>;

impl Follower {
    async fn next(&mut self) -> Result<Event<Box<RawValue>>, ApiError> {
        loop {
            if self.pause {
                self.pause = false;
                sleep(RETRY_DELAY).await;
            }
            match self.step().await {
                Ok(Some(event)) => return Ok(event),
                Ok(None) => {}
                // Forgotten: that is how it goes.
                Err(error) if error.is(StatusCode::GONE) => {
                    self.state = State::Unknown;
                    self.pause = true;
                }
                Err(error) => {
                    self.pause = true;
                    return Err(error);
                }
            }
        }
    }

    /// One thing that is to be done. May be given up at any time.
    async fn step(&mut self) -> Result<Option<Event<Box<RawValue>>>, ApiError> {
        match &mut self.state {
            State::Unknown => {
                let (all, version) = list(&self.objects, &self.which).await?;
                self.state = State::Known(version);
                Ok(Some(Event::All(all)))
            }
            State::Known(version) => {
                let lines = open(&self.objects, &self.which, version).await?;
                self.state = State::Following(std::mem::take(version), lines);
                Ok(None)
            }
            State::Following(version, lines) => {
                let line = timeout(WATCH_ENDS_WITHIN, lines.next()).await;
                let told = match line {
                    Ok(Some(Ok(line))) => told(&line, version),
                    // One that is ended again and again must not be busy.
                    Ok(None) => {
                        self.pause = true;
                        self.state = State::Known(std::mem::take(version));
                        return Ok(None);
                    }
                    Ok(Some(Err(error))) => Err(error),
                    Err(_) => Err(ApiError::Silent(WATCH_ENDS_WITHIN)),
                };
                if told.is_err() {
                    self.state = State::Known(std::mem::take(version));
                }
                told
            }
        }
    }
}

/// Everything, and of which version it is.
async fn list(objects: &Objects, which: &Which) -> Result<(Vec<Box<RawValue>>, String), ApiError> {
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
    let mut all = Vec::new();
    let mut more = String::new();
    let mut limit = PAGE_OBJECTS;
    loop {
        let so_many = limit.to_string();
        let query = query(which, &[("limit", &so_many), ("continue", &more)]);
        let path = objects.path(None, &query)?;
        let page = match objects.client.ask(Method::GET, path, None).await {
            // Whoever may make large objects must not stop what follows them.
            Err(ApiError::Long) if limit > 1 => {
                limit /= 2;
                continue;
            }
            page => page?,
        };
        let page: Page = serde_json::from_slice(&page)?;
        all.extend(page.items.into_iter().flatten());
        more = page.metadata.more;
        if more.is_empty() {
            return Ok((all, page.metadata.resource_version));
        }
    }
}

/// What comes after a version.
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

/// As it stands behind a path. Empty values are left out.
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

/// A value in a query: what may be anything else there is written in digits.
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

/// What one line tells; nothing if it is but a mark. Moves the version on.
fn told(line: &str, version: &mut String) -> Result<Option<Event<Box<RawValue>>>, ApiError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "UPPERCASE")]
    enum Told {
        Added,
        Modified,
        Deleted,
        Bookmark,
        Error,
    }
    #[derive(Deserialize)]
    struct Line {
        #[serde(rename = "type")]
        told: Told,
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
    if matches!(told, Told::Error) {
        let Status { code } = serde_json::from_str(object.get())?;
        return Err(ApiError::Refused {
            code: StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            message: message(object.get().as_bytes()),
        });
    }
    let of: Versioned = serde_json::from_str(object.get())?;
    *version = of.metadata.resource_version;
    Ok(match told {
        Told::Added | Told::Modified => Some(Event::Changed(object)),
        Told::Deleted => Some(Event::Gone(object)),
        Told::Bookmark | Told::Error => None,
    })
}

/// Namespace and name.
pub type Key = (String, String);

/// What a watch has told so far, as much of it as somebody wants to know.
#[derive(Debug)]
pub struct Known<T> {
    /// Nothing is known before everything was told once.
    objects: Option<BTreeMap<Key, T>>,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { objects: None }
    }
}

impl<T: PartialEq> Known<T> {
    /// All of them; `None` as long as they are not all known.
    pub fn all(&self) -> Option<&BTreeMap<Key, T>> {
        self.objects.as_ref()
    }

    /// Takes in what was told; `read` says what of an object is wanted, if
    /// anything. Tells whether anything is different now.
    pub fn take<O: Object>(&mut self, event: Event<O>, read: impl Fn(O) -> Option<T>) -> bool {
        let keyed = |object: O| {
            let key = key(&object);
            (key, read(object))
        };
        let Some(objects) = &mut self.objects else {
            // A change before the first listing cannot be.
            let Event::All(all) = event else { return false };
            self.objects = Some(wanted(all.into_iter().map(keyed)));
            return true;
        };
        match event {
            Event::All(all) => {
                let all = wanted(all.into_iter().map(keyed));
                let news = *objects != all;
                *objects = all;
                news
            }
            Event::Changed(object) => match keyed(object) {
                (key, Some(value)) if objects.get(&key) == Some(&value) => false,
                (key, Some(value)) => {
                    objects.insert(key, value);
                    true
                }
                (key, None) => objects.remove(&key).is_some(),
            },
            Event::Gone(object) => objects.remove(&key(&object)).is_some(),
        }
    }
}

fn wanted<T>(all: impl Iterator<Item = (Key, Option<T>)>) -> BTreeMap<Key, T> {
    all.filter_map(|(key, value)| Some((key, value?))).collect()
}

fn key(object: &impl Object) -> Key {
    let metadata = object.metadata();
    (metadata.namespace.clone(), metadata.name.clone())
}
