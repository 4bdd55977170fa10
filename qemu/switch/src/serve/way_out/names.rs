//! DNS over UDP: each query is sent to the host's resolvers, one after the other, until one answers.
//!
//! Each from a socket of its own, so that its port is as hard to guess as that of the host's own queries. A query that
//! no resolver answers is not answered: the machine asks again, as it would ask the resolvers themselves.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::time::timeout;

use super::super::Shared;
use crate::way_out::{Flow, dns, reply, too_large};

/// Bound for one resolver to answer, before the next is asked: less than a machine waits before it asks again.
const PATIENCE: Duration = Duration::from_millis(1500);

/// The largest message over UDP.
const LARGEST: usize = 64 << 10;

/// Asks the resolvers.
pub(super) fn ask(shared: &Rc<Shared>, flow: Flow, query: Vec<u8>) {
    let Some(sockets) = &shared.sockets else {
        return;
    };
    if !dns::is_query(&query) {
        return;
    }
    let servers = sockets.resolvers.borrow_mut().present();
    if servers.is_empty() || !sockets.queries.borrow_mut().take(flow.mac) {
        return;
    }
    let of_task = shared.clone();
    shared.spawn(async move {
        let shared = of_task;
        if let Some(answer) = first_answer(&servers, &query).await {
            give(&shared, &flow, answer);
        }
        if let Some(sockets) = &shared.sockets {
            sockets.queries.borrow_mut().release(flow.mac);
        }
    });
}

async fn first_answer(servers: &[SocketAddr], query: &[u8]) -> Option<Vec<u8>> {
    for server in servers {
        match timeout(PATIENCE, answer_of(*server, query)).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => tracing::debug!(%server, %error, "a resolver does not answer"),
            Err(_) => tracing::debug!(%server, "a resolver does not answer in time"),
        }
    }
    None
}

async fn answer_of(server: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let socket = UdpSocket::bind(super::any_for(server)).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut buffer = vec![0; LARGEST];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let answer = &buffer[..length];
        if dns::answers(answer, query) {
            return Ok(answer.to_vec());
        }
    }
}

/// Gives the machine the answer; one that does not fit into a packet makes it ask over TCP.
fn give(shared: &Shared, flow: &Flow, answer: Vec<u8>) {
    let answer = match too_large(flow, &answer) {
        true => dns::truncated(&answer),
        false => Some(answer),
    };
    if let Some(frame) = answer.and_then(|answer| reply(flow, &answer)) {
        super::deliver(shared, flow, &frame);
    }
}
