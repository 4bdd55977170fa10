//! gRPC messages on HTTP/2 streams, and calls to etcd, as far as forwarding needs them.
//!
//! A message is a header of five bytes (the compression flag and the length) and its content. A
//! call ends with a status in the trailers, or in the headers of a response that has nothing else.
//! Encoding of messages and statuses is left to the libraries.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::uri::{self, Authority, PathAndQuery, Scheme, Uri};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tonic::{Code, Status};

use super::{CALL_BOUND, LARGEST_REQUEST};

/// Header of a message: compression flag and length.
const FRAME_HEADER_BYTES: usize = 5;
const CONTENT_TYPE_GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// Headers of a call that are forwarded: its timeout, and that it requires a leader.
const KEPT_HEADERS: [HeaderName; 2] = [
    HeaderName::from_static("grpc-timeout"),
    HeaderName::from_static("hasleader"),
];

/// The error for a connection that broke: it is unknown whether the call was executed.
fn broken(error: &h2::Error) -> Status {
    Status::unavailable(format!("the connection was lost: {error}"))
}

/// Code and message of a status, without the metadata of its transport.
fn told(status: &Status) -> Status {
    Status::new(status.code(), status.message())
}

/// Messages up to this size are not counted: there are many of them, and a stream may have as many
/// bytes in its window anyway.
const SMALL: usize = 64 << 10;

/// What answers of etcd may take together, in bytes.
#[derive(Clone)]
pub(super) struct AnswerMemory {
    limit: usize,
    free: Arc<Semaphore>,
}

impl AnswerMemory {
    pub(super) fn of(bytes: u64) -> Self {
        let limit = usize::try_from(bytes).unwrap_or(usize::MAX);
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self {
            limit,
            free: Arc::new(Semaphore::new(limit)),
        }
    }

    /// Takes what a message needs, until the permit is dropped.
    fn take(&self, length: usize) -> Result<Option<OwnedSemaphorePermit>, Status> {
        if length <= SMALL {
            return Ok(None);
        }
        if length > self.limit {
            return Err(too_long(length, self.limit));
        }
        let needed = u32::try_from(length).map_err(|_| too_long(length, self.limit))?;
        let taken = Arc::clone(&self.free).try_acquire_many_owned(needed);
        taken.map(Some).map_err(|_| {
            Status::resource_exhausted(format!(
                "the answers that are being forwarded take too much memory: this one has {length} \
                 bytes, {} of {} are free",
                self.free.available_permits(),
                self.limit
            ))
        })
    }
}

/// Splits a byte stream into messages.
#[derive(Default)]
pub(super) struct Frames {
    held: BytesMut,
}

impl Frames {
    pub(super) fn add(&mut self, chunk: &[u8]) {
        self.held.extend_from_slice(chunk);
    }

    /// Whether no part of a further message has arrived.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The length of the next message, once its header has arrived.
    pub(super) fn next_length(&self) -> Result<Option<usize>, Status> {
        match self.held.first_chunk::<FRAME_HEADER_BYTES>() {
            None => Ok(None),
            Some(&[0, a, b, c, d]) => Ok(Some(u32::from_be_bytes([a, b, c, d]) as usize)),
            Some(_) => Err(Status::unimplemented("messages must not be compressed")),
        }
    }

    /// The content of the next message, once it is complete.
    pub(super) fn take(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(length) = self.next_length()? else {
            return Ok(None);
        };
        if self.held.len() < FRAME_HEADER_BYTES + length {
            return Ok(None);
        }
        self.held.advance(FRAME_HEADER_BYTES);
        Ok(Some(self.held.split_to(length).freeze()))
    }
}

fn too_long(length: usize, limit: usize) -> Status {
    Status::resource_exhausted(format!(
        "message is too large: {length} bytes, the limit is {limit}"
    ))
}

/// How the size of messages is limited.
enum Limit {
    /// Each for itself.
    Request,
    /// All answers together.
    Answer(AnswerMemory),
}

impl Limit {
    fn admit(&self, length: usize) -> Result<Option<OwnedSemaphorePermit>, Status> {
        match self {
            Limit::Request if length > LARGEST_REQUEST => Err(too_long(length, LARGEST_REQUEST)),
            Limit::Request => Ok(None),
            Limit::Answer(memory) => memory.take(length),
        }
    }
}

/// Messages received on a stream.
pub(super) struct Messages {
    stream: RecvStream,
    frames: Frames,
    limit: Limit,
    /// Whether the next message, of which a part has arrived, is admitted.
    admitted: bool,
    /// What the last message has taken, until the next one is asked for.
    taken: Option<OwnedSemaphorePermit>,
}

impl Messages {
    pub(super) fn requests(stream: RecvStream) -> Self {
        Self::of(stream, Limit::Request)
    }

    fn of(stream: RecvStream, limit: Limit) -> Self {
        Self {
            stream,
            frames: Frames::default(),
            limit,
            admitted: false,
            taken: None,
        }
    }

    /// The next message; `None` at the end of the stream. Cancellation safe.
    pub(super) async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, Status> {
        self.next_encoded().await?.map(decoded).transpose()
    }

    /// Once for all kinds of messages: with `ask_encoded` and `send_frame` it is most of the program of a call.
    async fn next_encoded(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if !self.admitted
                && let Some(length) = self.frames.next_length()?
            {
                self.taken = None;
                self.taken = self.limit.admit(length)?;
                self.admitted = true;
            }
            if let Some(message) = self.frames.take()? {
                self.admitted = false;
                return Ok(Some(message));
            }
            match self.chunk().await? {
                Some(chunk) => self.frames.add(&chunk),
                None if self.frames.is_empty() => return Ok(None),
                None => return Err(Status::internal("the stream ended within a message")),
            }
        }
    }

    /// The next chunk, of any length. Its flow-control capacity is released at once: the size of a
    /// buffered message is limited before.
    async fn chunk(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(chunk) = self.stream.data().await else {
            return Ok(None);
        };
        let chunk = chunk.map_err(|error| broken(&error))?;
        let released = self.stream.flow_control().release_capacity(chunk.len());
        released.map_err(|error| broken(&error))?;
        Ok(Some(chunk))
    }

    /// The message of a unary call.
    pub(super) async fn one<M: Message + Default>(&mut self) -> Result<M, Status> {
        match self.next_encoded().await? {
            Some(message) => decoded(message),
            None => Err(Status::internal("expected a message, got none")),
        }
    }

    /// Waits for the end of the call and returns its status; further messages are ignored.
    pub(super) async fn ended(&mut self) -> Result<(), Status> {
        while self.chunk().await?.is_some() {}
        let trailers = self.stream.trailers().await;
        let trailers = trailers.map_err(|error| broken(&error))?;
        match trailers.as_ref().and_then(Status::from_header_map) {
            Some(status) if status.code() == Code::Ok => Ok(()),
            Some(status) => Err(told(&status)),
            None => Err(Status::internal("a call ended without a status")),
        }
    }
}

/// Sends messages at the speed of the receiver.
pub(super) struct Sink {
    stream: SendStream<Bytes>,
}

impl Sink {
    /// Sends a message; `last` closes the stream.
    pub(super) async fn send(&mut self, message: &impl Message, last: bool) -> Result<(), Status> {
        self.send_frame(framed(message)?, last).await
    }

    async fn send_frame(&mut self, mut frame: Bytes, last: bool) -> Result<(), Status> {
        while !frame.is_empty() {
            self.stream.reserve_capacity(frame.len());
            let room = match poll_fn(|cx| self.stream.poll_capacity(cx)).await {
                Some(room) => room.map_err(|error| broken(&error))?,
                None => return Err(Status::cancelled("the receiver closed the stream")),
            };
            if room == 0 {
                continue;
            }
            let part = frame.split_to(room.min(frame.len()));
            let sent = self.stream.send_data(part, last && frame.is_empty());
            sent.map_err(|error| broken(&error))?;
        }
        Ok(())
    }

    /// Closes the stream.
    pub(super) fn close(&mut self) {
        // If it fails, the stream has ended already.
        self.stream.send_data(Bytes::new(), true).ok();
    }

    /// Ends a response with a status.
    pub(super) fn end(&mut self, ended: Result<(), Status>) {
        let status = ended.err().unwrap_or_else(|| Status::ok(""));
        let mut trailers = HeaderMap::new();
        // This only fails for invalid metadata, and there are none.
        status.add_header(&mut trailers).ok();
        self.stream.send_trailers(trailers).ok();
    }

    /// Waits until the receiver resets the stream.
    pub(super) async fn abandoned(&mut self) {
        poll_fn(|cx| self.stream.poll_reset(cx)).await.ok();
    }
}

fn decoded<M: Message + Default>(message: Bytes) -> Result<M, Status> {
    let wrong = |error| Status::internal(format!("cannot decode a message: {error}"));
    M::decode(message).map_err(wrong)
}

pub(super) fn framed(message: &impl Message) -> Result<Bytes, Status> {
    let length = message.encoded_len();
    let told = u32::try_from(length).map_err(|_| too_long(length, u32::MAX as usize))?;
    let mut frame = BytesMut::with_capacity(FRAME_HEADER_BYTES + length);
    frame.put_u8(0);
    frame.put_u32(told);
    // The buffer is large enough.
    message.encode(&mut frame).ok();
    Ok(frame.freeze())
}

/// Begins a response.
pub(super) fn begin(respond: &mut SendResponse<Bytes>) -> Result<Sink, Status> {
    let mut head = Response::new(());
    head.headers_mut()
        .insert(header::CONTENT_TYPE, CONTENT_TYPE_GRPC);
    let stream = respond.send_response(head, false);
    Ok(Sink {
        stream: stream.map_err(|error| broken(&error))?,
    })
}

/// Responds with a status only.
pub(super) fn refuse(respond: &mut SendResponse<Bytes>, status: Status) {
    // If it fails, the caller is gone.
    respond.send_response(status.into_http(), true).ok();
}

/// Waits until the caller cancels the call.
pub(super) async fn abandoned(respond: &mut SendResponse<Bytes>) {
    poll_fn(|cx| respond.poll_reset(cx)).await.ok();
}

/// The request of a unary call that is forwarded.
pub(super) trait Call: Message + Default {
    /// Path of the gRPC method.
    const PATH: &'static str;
    /// The response message.
    type Answer: Message + Default;
}

/// The way of one call to etcd: the connection, and the headers that the call came with.
pub(super) struct Upward<'a> {
    etcd: &'a SendRequest<Bytes>,
    came_with: &'a HeaderMap,
    memory: &'a AnswerMemory,
    /// What the answer has taken, until the call ends.
    taken: Mutex<Option<OwnedSemaphorePermit>>,
}

impl<'a> Upward<'a> {
    pub(super) fn new(
        etcd: &'a SendRequest<Bytes>,
        came_with: &'a HeaderMap,
        memory: &'a AnswerMemory,
    ) -> Self {
        Self {
            etcd,
            came_with,
            memory,
            taken: Mutex::default(),
        }
    }

    /// Makes a unary call, with a timeout.
    pub(super) async fn ask<Q: Call>(&self, question: &Q) -> Result<Q::Answer, Status> {
        decoded(self.ask_encoded(Q::PATH, framed(question)?).await?)
    }

    async fn ask_encoded(&self, path: &'static str, question: Bytes) -> Result<Bytes, Status> {
        let answer = async {
            let (answer, mut sink) = self.call(path).await?;
            sink.send_frame(question, true).await?;
            let mut answers = self.answers(answer).await?;
            let answer = answers.next_encoded().await?;
            answers.ended().await?;
            *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = answers.taken;
            answer.ok_or_else(|| Status::internal("etcd ended a call without a response"))
        };
        let silent = |_| Err(Status::unavailable("etcd did not answer in time"));
        timeout(CALL_BOUND, answer).await.unwrap_or_else(silent)
    }

    /// Begins a call, with those of the caller's headers that matter.
    pub(super) async fn call(&self, path: &'static str) -> Result<(ResponseFuture, Sink), Status> {
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri(path)?;
        let headers = request.headers_mut();
        headers.insert(header::CONTENT_TYPE, CONTENT_TYPE_GRPC);
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        for name in KEPT_HEADERS {
            if let Some(value) = self.came_with.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        let ready = self.etcd.clone().ready().await;
        let mut etcd = ready.map_err(|error| broken(&error))?;
        let sent = etcd.send_request(request, false);
        let (answer, stream) = sent.map_err(|error| broken(&error))?;
        Ok((answer, Sink { stream }))
    }

    /// The messages of etcd's response; or its status, if it has none.
    pub(super) async fn answers(&self, answer: ResponseFuture) -> Result<Messages, Status> {
        let answer = answer.await.map_err(|error| broken(&error))?;
        if let Some(status) = Status::from_header_map(answer.headers()) {
            return Err(told(&status));
        }
        match answer.status() {
            StatusCode::OK => {
                let limit = Limit::Answer(self.memory.clone());
                Ok(Messages::of(answer.into_body(), limit))
            }
            other => Err(Status::new(
                Code::Unknown,
                format!("etcd answered with HTTP status {other}"),
            )),
        }
    }
}

fn uri(path: &'static str) -> Result<Uri, Status> {
    let mut parts = uri::Parts::default();
    parts.scheme = Some(Scheme::HTTP);
    // Only a name: the socket decides.
    parts.authority = Some(Authority::from_static("etcd.invalid"));
    parts.path_and_query = Some(PathAndQuery::from_static(path));
    Uri::from_parts(parts).map_err(|error| Status::internal(error.to_string()))
}

#[cfg(test)]
mod tests;
