//! An unauthenticated look inside the node, and a way to hurt it.
//!
//! Built into debug images only. Tests see here what an operator of a release
//! image is not meant to see, and provoke the failures that the node promises
//! to survive.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
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
use hearth_host::cluster_state;
use hearth_host::handover::MemberData;
use hearth_host::layout::Root;
use hearth_host::logs;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tonic::{Request, Response, Status};

/// What this service asks others to suffer.
#[derive(Default)]
pub struct Provocations {
    /// A runnable below the service's panics.
    panic: Notify,
    /// The root runnable errs.
    pub root_error: Notify,
}

/// What the service shows.
pub struct Debug {
    /// Of the supervisor.
    pub tree: Value<Tree>,
    /// All of it.
    pub log_tree: LogTree,
    /// As the node sees it.
    pub cluster_state: cluster_state::ClusterState,
    /// Who the node is.
    pub member: Value<MemberData>,
    /// Where things lie.
    pub root: Root,
    /// What this service cannot do itself.
    pub provocations: Arc<Provocations>,
}

/// Serves on the debug port.
pub async fn run(ctx: Context, debug: Arc<Debug>) -> Outcome {
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, names::PORT_DEBUG));
    let listener = TcpListener::bind(address).await?;
    tracing::warn!(%address, "debug image: anyone may look inside this node");
    let provocations = debug.provocations.clone();
    ctx.run("victim", move |ctx| victim(ctx, provocations.clone()))?;
    ctx.healthy();
    let services = Services::new().with(NodeDebugServer::from_arc(debug));
    Server::new(Transport::Plain)
        .serve(listener, services, ctx.token())
        .await?;
    match ctx.is_cancelled() {
        true => Ok(()),
        false => Err(Failure::msg("the debug service ended")),
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
                .map(|member| member.node_id.to_string())
                .unwrap_or_default(),
            zombies,
            processes,
            hosts: read(self.root.ephemeral.hosts()),
            machine_id: read(self.root.ephemeral.machine_id()).trim().to_owned(),
            host_name: read("/proc/sys/kernel/hostname".into()).trim().to_owned(),
            resident_bytes: ["1", "self"].into_iter().map(resident).sum(),
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
        tracing::warn!(?kind, "provoked");
        match kind {
            Kind::Unspecified => return Err(Status::invalid_argument("kind: wanted one of them")),
            Kind::ServicePanic => self.provocations.panic.notify_one(),
            Kind::Orphan => leave_orphans().map_err(|error| Status::internal(error.to_string()))?,
            Kind::CoreAbort => std::process::abort(),
            Kind::CoreHang => hang(),
            Kind::RootError => self.provocations.root_error.notify_one(),
        }
        Ok(Response::new(ProvokeResponse {}))
    }
}

fn line(entry: &Entry) -> String {
    entry.concise(0)
}

/// How many processes there are, and how many of them nobody has reaped. Without
/// the kernel's own, of which there are more when there is more to do.
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

/// The state of a process, of what the kernel tells of it in one line; `None` if
/// it is one of the kernel's own.
fn state(stat: &str) -> Option<char> {
    const KERNEL: u32 = 0x0020_0000;
    // The name may hold anything but ends with the last parenthesis.
    let mut fields = stat.rsplit(") ").next()?.split(' ');
    let state = fields.next()?.chars().next()?;
    let flags: u32 = fields.nth(5)?.parse().ok()?;
    (flags & KERNEL == 0).then_some(state)
}

/// Bytes that a process has resident; 0 if that cannot be read.
fn resident(process: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Until the victim counts as healthy.
const PROVEN_AFTER: Duration = Duration::from_secs(30);

/// A service that panics when it is told to. Like one that has to prove itself
/// it is healthy only after a while, so that panics in quick succession are a
/// crash loop.
async fn victim(ctx: Context, provocations: Arc<Provocations>) -> Outcome {
    let told = provocations.panic.notified();
    tokio::pin!(told);
    tokio::select! {
        () = &mut told => panic!("a provoked panic"),
        () = tokio::time::sleep(PROVEN_AFTER) => ctx.healthy(),
        () = ctx.cancelled() => return Ok(()),
    }
    tokio::select! {
        () = told => panic!("a provoked panic"),
        () = ctx.cancelled() => Ok(()),
    }
}

/// Takes every thread of the runtime for ever, so that nothing of the core
/// goes on, the feeding of the watchdog included.
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
/// The program's first argument in a process that is to leave an orphan, and
/// in the orphan.
const PARENT: &str = "debug-parent";
const ORPHAN: &str = "debug-orphan";

/// Starts processes whose children outlive them.
fn leave_orphans() -> std::io::Result<()> {
    for _ in 0..ORPHANS {
        Command::new(PROGRAM).arg(PARENT).spawn()?.wait()?;
    }
    Ok(())
}

const PROGRAM: &str = "/init";

/// What the binary does when it is started as one of those; `None` if it is
/// not.
pub fn act_as_provoked() -> Option<ExitCode> {
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
