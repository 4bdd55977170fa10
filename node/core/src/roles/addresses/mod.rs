//! Where nodes are, by their own word.
//!
//! Each node signs its address, with a counter that grows with every change.

mod own;
mod store;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};

pub use store::{Learned, Located};

use crate::handover::MemberData;

pub(super) struct Worker {
    /// Where the own counter is kept.
    pub file: PathBuf,
    /// Will be read.
    pub member: Value<MemberData>,
    /// Will be read.
    pub address: Value<IpAddr>,
    /// Will be written: this node's word, once it is durable.
    pub own_address: Writer<Located>,
    /// Will be written: where the others are.
    pub learned: Writer<Learned>,
}

pub(super) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    tokio::select! {
        outcome = follow(&ctx, &worker) => outcome,
        () = ctx.cancelled() => Ok(()),
    }
}

async fn follow(ctx: &Context, worker: &Worker) -> Outcome {
    // The data partition is open from then on.
    worker.member.watch().next().await?;
    let _ = &worker.learned;
    ctx.healthy();
    let mut addresses = worker.address.watch();
    loop {
        let host = addresses.next().await?;
        let located = own::word(&worker.file, host, 0)?;
        if worker.own_address.value().get() != Some(located) {
            worker.own_address.set(located);
        }
    }
}
