//! What to do with what a name server sends, or with its silence. Pure: no socket, no clock.
//!
//! A forwarded query has an ID and a port of its own, and only a response from the server that was
//! queried, with that ID and the same question, is accepted: a pod that floods this server with
//! responses has to guess ID and port. Letter case does not count, because there are servers that
//! return the question in lower case; a random case in the question would protect against forgery
//! only where it is compared. Equal queries are joined ([`super::forward`]), so that nobody has many
//! guesses at one answer.
//!
//! A server is believed as far as its message can be read, header and question first:
//!
//! | response | next |
//! |---|---|
//! | to another query, or no response | it is ignored |
//! | FORMERR, NOTIMP or BADVERS to a query with EDNS | the same server, without EDNS |
//! | by UDP, with the TC flag, or ending within a record | the same server, by TCP |
//! | FORMERR, SERVFAIL, NOTIMP, REFUSED, or a code of EDNS | the next server |
//! | by TCP, ending within a record; none at all | the next server |
//! | anything else | it is the answer |
//!
//! A response may be without a question only if nothing is taken from it but its code or its TC flag:
//! some servers send an error as a bare header.
//!
//! If no server has an answer, the client gets the best of what there was: a truncated response, of
//! a server that does not answer by TCP, or else an error response. A truncated one is marked as
//! such, and a client that needs the rest knows that there is more.
//!
//! Invariants: one [`Attempt`] takes at most three exchanges, because a query loses EDNS, then UDP,
//! or the other way round, and never gets them back. A [`Search`] asks each server at most twice,
//! and twice only if it was silent: a datagram may be lost.

#[cfg(test)]
mod tests;

use hickory_proto::op::Query;

use super::wire::{Answer, Head, Transport, is_same_question};

/// Response codes.
const NO_ERROR: u16 = 0;
const FORMERR: u16 = 1;
const SERVFAIL: u16 = 2;
const NXDOMAIN: u16 = 3;
const NOTIMP: u16 = 4;
const REFUSED: u16 = 5;
const BADVERS: u16 = 16;
/// The first code that is not complete without EDNS.
const FIRST_OF_EDNS: u16 = 16;

/// A query to be forwarded. Equal ones, which differ by their letter case only, have one answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Asked {
    /// The question, with the letter case that the client has chosen.
    pub query: Query,
    /// Value of the DO flag.
    pub signatures: bool,
    /// Value of the CD flag.
    pub checking_disabled: bool,
}

/// How a query is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// With an OPT record or without.
    pub edns: bool,
    /// By which transport.
    pub by: Transport,
}

/// What a received message is worth.
#[derive(Debug)]
pub enum Verdict {
    /// No response to this query: wait for another one.
    Ignore,
    /// The server does not accept EDNS.
    WithoutEdns,
    /// There is more. What this message has is `Some` if the server says so itself.
    ByStream(Option<Answer>),
    /// An error: another server may have an answer.
    Failure(Answer),
    /// An answer.
    Answer(Answer),
}

/// Judges a message that has come from the queried server.
pub fn judge(id: u16, question: &[u8], way: Way, bytes: &[u8]) -> Verdict {
    let Some(head) = Head::read(bytes).filter(|head| head.id == id && head.is_response) else {
        return Verdict::Ignore;
    };
    let (answer, is_whole) = match head.questions {
        0 => (head.bare(question), true),
        1 if head.question.is_some_and(|q| is_same_question(q, question)) => {
            match Answer::read(bytes) {
                Some(read) => read,
                None => return Verdict::Ignore,
            }
        }
        _ => return Verdict::Ignore,
    };
    if way.edns && matches!(answer.code(), FORMERR | NOTIMP | BADVERS) {
        return Verdict::WithoutEdns;
    }
    if matches!(answer.code(), FORMERR | SERVFAIL | NOTIMP | REFUSED)
        || answer.code() >= FIRST_OF_EDNS
    {
        return Verdict::Failure(answer);
    }
    match way.by {
        Transport::Udp if answer.is_truncated() => {
            Verdict::ByStream(Some(answer).filter(|_| head.questions == 1))
        }
        Transport::Udp if !is_whole => Verdict::ByStream(None),
        _ if head.questions == 0 || !is_whole => Verdict::Ignore,
        _ => Verdict::Answer(answer),
    }
}

/// Whether a response says that there is no such name, or no record of the type.
pub fn is_negative(answer: &Answer) -> bool {
    answer.code() == NXDOMAIN || (answer.code() == NO_ERROR && !answer.has_what_was_asked())
}

/// Whether a response may be cached: it is complete, and says what there is.
pub fn may_be_kept(answer: &Answer) -> bool {
    matches!(answer.code(), NO_ERROR | NXDOMAIN) && !answer.is_truncated()
}

/// How an attempt at one server has ended.
#[derive(Debug)]
pub enum Outcome {
    /// An answer.
    Answer(Answer),
    /// A truncated answer, and no other by TCP.
    Partial(Answer),
    /// An error response.
    Failure(Answer),
    /// Nothing that could be used.
    Silence,
}

/// What to do next at the same server.
#[derive(Debug)]
pub enum Step {
    /// Wait for another message.
    Wait,
    /// Send the query again, by [`Attempt::way`].
    Again,
    /// Nothing more.
    End(Outcome),
}

/// A query at one server.
#[derive(Debug)]
pub struct Attempt {
    way: Way,
    partial: Option<Answer>,
    /// Whether the server has refused EDNS.
    refused: bool,
}

impl Attempt {
    /// `edns` is whether the first query has an OPT record: not, if the server is known to refuse it.
    pub fn new(edns: bool) -> Self {
        let by = Transport::Udp;
        Self {
            way: Way { edns, by },
            partial: None,
            refused: false,
        }
    }

    /// How to send the query.
    pub fn way(&self) -> Way {
        self.way
    }

    /// Whether the server accepts the query without EDNS only: it has refused it with EDNS, and this
    /// is the outcome without.
    pub fn needs_no_edns(&self, outcome: &Outcome) -> bool {
        let is_error = |answer: &Answer| matches!(answer.code(), FORMERR | NOTIMP);
        self.refused
            && match outcome {
                Outcome::Answer(_) | Outcome::Partial(_) => true,
                Outcome::Failure(answer) => !is_error(answer),
                Outcome::Silence => false,
            }
    }

    /// A message was received.
    pub fn received(&mut self, verdict: Verdict) -> Step {
        match verdict {
            Verdict::Ignore if self.way.by == Transport::Udp => Step::Wait,
            // A stream has one response.
            Verdict::Ignore => self.failed(),
            Verdict::WithoutEdns => {
                self.refused = true;
                self.way.edns = false;
                Step::Again
            }
            Verdict::ByStream(partial) => {
                self.partial = partial;
                self.way.by = Transport::Tcp;
                Step::Again
            }
            Verdict::Failure(failure) => Step::End(match self.partial.take() {
                Some(partial) => Outcome::Partial(partial),
                None => Outcome::Failure(failure),
            }),
            Verdict::Answer(answer) => Step::End(Outcome::Answer(answer)),
        }
    }

    /// The time is over, or the socket has failed.
    pub fn failed(&mut self) -> Step {
        Step::End(match self.partial.take() {
            Some(partial) => Outcome::Partial(partial),
            None => Outcome::Silence,
        })
    }
}

/// A query at several servers, in turn.
#[derive(Debug)]
pub struct Search {
    first: usize,
    /// Whether each server was silent so far.
    silent: Vec<bool>,
    turn: usize,
    partial: Option<Answer>,
    failure: Option<Answer>,
}

impl Search {
    /// Begins with the server `first`, modulo their number.
    pub fn new(servers: usize, first: usize) -> Self {
        Self {
            first,
            silent: vec![true; servers],
            turn: 0,
            partial: None,
            failure: None,
        }
    }

    /// The server to query now. `None` if there is no other one.
    pub fn server(&mut self) -> Option<usize> {
        let servers = self.silent.len();
        while self.turn < 2 * servers {
            let is_second = self.turn >= servers;
            let server = self.first.wrapping_add(self.turn) % servers;
            // What is there may be incomplete, and is still better than waiting.
            if !is_second || (self.silent[server] && self.partial.is_none()) {
                return Some(server);
            }
            self.turn += 1;
        }
        None
    }

    /// The attempt at [`Search::server`] has ended. Returns the answer, if it is one.
    pub fn ended(&mut self, outcome: Outcome) -> Option<Answer> {
        let server = self.server()?;
        self.turn += 1;
        self.silent[server] = matches!(outcome, Outcome::Silence);
        match outcome {
            Outcome::Answer(answer) => return Some(answer),
            Outcome::Partial(answer) => self.partial = self.partial.take().or(Some(answer)),
            Outcome::Failure(answer) => self.failure = self.failure.take().or(Some(answer)),
            Outcome::Silence => {}
        }
        None
    }

    /// The best of what there was, if no server has an answer.
    pub fn best(self) -> Option<Answer> {
        self.partial.or(self.failure)
    }
}
