//! The implementation of the commands, one module per group.

mod cluster;
mod context;
mod etcd;
mod image;
mod kubernetes;
mod node;
mod owner;
mod parameters;

use std::io::{self, Write as _};

use clap::CommandFactory as _;
use hearth_api::client::{Channel, within};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{GetClusterInfoRequest, GetClusterInfoResponse};
use serde::Serialize;
use tonic::{Code, Status};

use crate::args::{Args, Command, Global};
use crate::failure::{Failure, Kind};
use crate::reference;

/// Runs one command.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let Args { global, command } = args;
    match command {
        Command::Cluster(command) => cluster::run(&global, command).await,
        Command::Node(command) => node::run(&global, command).await,
        Command::Image(command) => image::run(&global, command).await,
        Command::Etcd(command) => etcd::run(&global, command).await,
        Command::Kubernetes(command) => kubernetes::run(&global, command).await,
        Command::Owner(command) => owner::run(&global, command).await,
        Command::Parameters(command) => parameters::run(&global, command).await,
        Command::Context(command) => context::run(&global, command),
        Command::Version => print(&format!("hearthctl {}\n", env!("CARGO_PKG_VERSION"))),
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "hearthctl", &mut script);
            write(&script)
        }
        Command::Man { folder } => reference::write_man_pages(&folder),
        Command::Reference => print(&reference::markdown()),
    }
}

/// What a command cannot do without [`cluster_info`], where it has no better words.
const INFO: &str = "get the cluster information";

/// What the curators say of the cluster. `what` is the operation, for errors.
async fn cluster_info(
    global: &Global,
    management: &mut ManagementClient<Channel>,
    what: &str,
) -> Result<GetClusterInfoResponse, Failure> {
    let call = management.get_cluster_info(GetClusterInfoRequest {});
    let info = within(global.timeout, call).await;
    info.map(tonic::Response::into_inner)
        .map_err(|status| Failure::call(what, status))
}

/// Waits for `work`, or until the user interrupts it: a failure of `what`, with this advice.
async fn or_interrupted<T>(
    what: &str,
    advice: &str,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => {
            Err(Failure::new(Kind::Interrupted, what).because("interrupted").advise(advice))
        }
    }
}

fn print(text: &str) -> Result<(), Failure> {
    write(text.as_bytes())
}

/// Prints a value as indented JSON.
fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    json(serde_json::to_string_pretty(value))
}

/// Prints a value as JSON on one line.
fn print_json_line(value: &impl Serialize) -> Result<(), Failure> {
    json(serde_json::to_string(value))
}

fn json(text: serde_json::Result<String>) -> Result<(), Failure> {
    let text = text.map_err(|error| Failure::new(Kind::Local, "encode JSON").because(error))?;
    print(&format!("{text}\n"))
}

/// Prints the progress of a wait on standard error, if it has changed.
fn tell(told: &mut String, progress: String) {
    if progress != *told {
        eprintln!("hearthctl: {progress}");
        *told = progress;
    }
}

/// Whether the error is temporary: the same call may succeed when it is repeated.
fn passing(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded
    )
}

/// Writes to standard output and flushes it.
fn write(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(Failure::output)
}
