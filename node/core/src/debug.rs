//! The unauthenticated debug service: internal state of the node, and fault injection.
//!
//! It is built into debug images only. Tests read internal state that a release image does not
//! expose, and inject the failures that a node must survive.

use std::fs;
use std::net::{Ipv6Addr, SocketAddr};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use hearth_api::names;
use hearth_api::server::{Server, Services, Transport};
use hearth_api::v1::node_debug_server::{NodeDebug, NodeDebugServer};
use hearth_api::v1::provoke_request::Kind;
use hearth_api::v1::{
    ClusterState, GetStateRequest, GetStateResponse, LogsRequest, LogsResponse, ProvokeRequest,
    ProvokeResponse, RunnableState,
};
use hearth_base::event::Value;
use hearth_base::logtree::{Backlog, Entry, LogTree, Query};
use hearth_base::supervisor::{Context, Failure, Outcome, Tree};
use hearth_host::handover::MemberData;
use hearth_host::layout::Root;
use hearth_host::{cluster_state, logs};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tonic::{Request, Response, Status};

/// Faults that this service injects into other runnables.
#[derive(Default)]
pub struct InjectedFaults {
    /// The runnable `victim` panics.
    panic: Notify,
    /// The root runnable fails.
    pub root_error: Notify,
}

/// What the service exposes.
pub struct Debug {
    /// The supervisor's tree of runnables.
    pub tree: Value<Tree>,
    /// The logs of all runnables.
    pub log_tree: LogTree,
    /// The cluster state as this node sees it.
    pub cluster_state: cluster_state::ClusterState,
    /// The identity of this node.
    pub member: Value<MemberData>,
    /// The paths of this node's files.
    pub root: Root,
    /// Faults that other runnables act on.
    pub injected_faults: Arc<InjectedFaults>,
}

/// Serves on the debug port.
pub async fn run(ctx: Context, debug: Arc<Debug>) -> Outcome {
    let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, names::PORT_DEBUG));
    let listener = TcpListener::bind(address).await?;
    tracing::warn!(%address, "debug image: the debug service is open to anyone");
    let injected_faults = debug.injected_faults.clone();
    ctx.run("victim", move |ctx| victim(ctx, injected_faults.clone()))?;
    ctx.healthy();
    let services = Services::new().with(NodeDebugServer::from_arc(debug));
    Server::new(Transport::Plain)
        .serve(listener, services, ctx.token())
        .await?;
    match ctx.is_cancelled() {
        true => Ok(()),
        false => Err(Failure::msg("the debug service stopped unexpectedly")),
    }
}

#[tonic::async_trait]
impl NodeDebug for Debug {
    async fn get_state(
        &self,
        _: Request<GetStateRequest>,
    ) -> Result<Response<GetStateResponse>, Status> {
        let runnables = self
            .tree
            .get()
            .map(|tree| tree.snapshot())
            .unwrap_or_default();
        let runnables = runnables.into_iter().map(|runnable| RunnableState {
            name: runnable.name.to_string(),
            state: runnable.state.to_string(),
            restarts: runnable.restarts,
            last_error: runnable.last_error.unwrap_or_default(),
        });
        let (processes, zombies) = processes();
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Ok(Response::new(GetStateResponse {
            runnables: runnables.collect(),
            cluster_state: ClusterState::from(self.cluster_state.get()).into(),
            node_id: self
                .member
                .get()
                .map(|member| member.own.node().to_string())
                .unwrap_or_default(),
            zombies,
            processes,
            hosts: read(self.root.ephemeral.hosts()),
            machine_id: read(self.root.ephemeral.machine_id()).trim().to_owned(),
            host_name: read("/proc/sys/kernel/hostname".into()).trim().to_owned(),
            resident_bytes: ["1", "self"].into_iter().map(resident).sum(),
            used_bytes: used(&read("/proc/meminfo".into())),
        }))
    }

    type LogsStream = BoxStream<'static, Result<LogsResponse, Status>>;

    async fn logs(
        &self,
        request: Request<LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let query = match request.subtree || request.dn.is_empty() {
            true => Query::subtree(request.dn),
            false => Query::exact(request.dn),
        };
        let query = Query {
            backlog: match request.backlog {
                0 => Backlog::All,
                count => Backlog::Count(count as usize),
            },
            follow: request.follow,
            ..query
        };
        let pieces = logs::read(&self.log_tree, query).map(|piece| {
            Ok(LogsResponse {
                lines: piece.entries.iter().map(line).collect(),
                missed: piece.missed,
            })
        });
        Ok(Response::new(pieces.boxed()))
    }

    async fn provoke(
        &self,
        request: Request<ProvokeRequest>,
    ) -> Result<Response<ProvokeResponse>, Status> {
        let kind = request.into_inner().kind();
        tracing::warn!(?kind, "injecting fault");
        match kind {
            Kind::Unspecified => return Err(Status::invalid_argument("kind is required")),
            Kind::ServicePanic => self.injected_faults.panic.notify_one(),
            Kind::Orphan => leave_orphans().map_err(|error| Status::internal(error.to_string()))?,
            Kind::CoreAbort => std::process::abort(),
            Kind::CoreHang => hang(),
            Kind::RootError => self.injected_faults.root_error.notify_one(),
        }
        Ok(Response::new(ProvokeResponse {}))
    }
}

fn line(entry: &Entry) -> String {
    entry.concise(0)
}

/// The number of processes, and how many of them are zombies. Kernel threads are not counted:
/// their number varies with load.
fn processes() -> (u32, u32) {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = entries.filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.parse::<u32>().ok()?;
        fs::read_to_string(entry.path().join("stat")).ok()
    });
    let states = stats.filter_map(|stat| state(&stat));
    states.fold((0, 0), |(all, zombies), state| {
        (all + 1, zombies + u32::from(state == 'Z'))
    })
}

/// The state of a process from its line in `/proc/PID/stat`; `None` if it is a kernel thread.
fn state(stat: &str) -> Option<char> {
    const KERNEL: u32 = 0x0020_0000;
    // The name may contain any character; it ends at the last parenthesis.
    let mut fields = stat.rsplit(") ").next()?.split(' ');
    let state = fields.next()?.chars().next()?;
    let flags: u32 = fields.nth(5)?.parse().ok()?;
    (flags & KERNEL == 0).then_some(state)
}

/// Resident memory of a process in bytes; 0 if it cannot be read.
fn resident(process: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    bytes(&status, "VmRSS:")
}

/// The memory of the machine that is in use, in bytes, by `/proc/meminfo`.
fn used(meminfo: &str) -> u64 {
    bytes(meminfo, "MemTotal:").saturating_sub(bytes(meminfo, "MemAvailable:"))
}

/// A number of a file in `/proc` that has one with its unit, kB, on each line; 0 if it is not there.
fn bytes(file: &str, name: &str) -> u64 {
    let line = file.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// How long the victim runs before it reports that it is healthy.
const PROVEN_AFTER: Duration = Duration::from_secs(30);

/// A service that panics on request. It reports that it is healthy only after [`PROVEN_AFTER`], so
/// that panics in quick succession are a crash loop.
async fn victim(ctx: Context, injected_faults: Arc<InjectedFaults>) -> Outcome {
    let told = injected_faults.panic.notified();
    tokio::pin!(told);
    tokio::select! {
        () = &mut told => panic!("injected panic"),
        () = tokio::time::sleep(PROVEN_AFTER) => ctx.healthy(),
        () = ctx.cancelled() => return Ok(()),
    }
    tokio::select! {
        () = told => panic!("injected panic"),
        () = ctx.cancelled() => Ok(()),
    }
}

/// Blocks every thread of the runtime, so that the core makes no progress and does not feed the
/// watchdog.
#[expect(clippy::disallowed_methods, reason = "an injected fault")]
fn hang() {
    const MORE_THAN_THERE_ARE: usize = 64;
    for _ in 0..MORE_THAN_THERE_ARE {
        tokio::spawn(async {
            loop {
                std::thread::park();
            }
        });
    }
}

const ORPHANS: usize = 20;
/// First argument of a process that leaves an orphan, and of the orphan.
const PARENT: &str = "debug-parent";
const ORPHAN: &str = "debug-orphan";

/// Starts processes that exit before their children do.
fn leave_orphans() -> std::io::Result<()> {
    for _ in 0..ORPHANS {
        Command::new(PROGRAM).arg(PARENT).spawn()?.wait()?;
    }
    Ok(())
}

const PROGRAM: &str = "/init";

/// Runs the parent or the orphan if the binary was started as one of them; otherwise `None`.
pub fn run_injected_fault() -> Option<ExitCode> {
    match std::env::args().nth(1)?.as_str() {
        PARENT => {
            let orphan = Command::new(PROGRAM).arg(ORPHAN).spawn();
            Some(orphan.map_or(ExitCode::FAILURE, |_| ExitCode::SUCCESS))
        }
        ORPHAN => {
            while nix::unistd::getppid().as_raw() != 1 {
                std::thread::yield_now();
            }
            Some(ExitCode::SUCCESS)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_own_are_no_processes() {
        let kernels = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 4 0 0 20 0 1";
        assert_eq!(state(kernels), None);
        let named = "17 (a ) Z 0 0) Z 1 17 4 0 -1 4194304 101 0 0";
        assert_eq!(state(named), Some('Z'));
        assert_eq!(state("17 (cut"), None);
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(state(&own).is_some());
        let (processes, _) = processes();
        assert!(processes > 0);
    }
}
