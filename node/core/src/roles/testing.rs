//! What the tests of the workers share: one worker alone under a supervisor
//! that starts it again quickly, and a curator with nothing behind it.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::{Curators, Options as ClientOptions};
use hearth_api::identity::{NodeCredentials, NodeId};
use hearth_api::server::Limits;
use hearth_api::testing::{Script, TestCluster, TestCurator};
use hearth_api::tls::{self, ExpectedServer, wall_clock};
use hearth_api::v1::node_roles::ConsensusMember;
use hearth_api::v1::{ClusterDirectory, Node, NodeRoles, NodeState as Life, NodeStatus};
use hearth_base::event::Value;
use hearth_base::logtree::{Backlog, Item, LogTree, Query, Severity};
use hearth_base::supervisor::{
    Backoff, Context, NodeState, Options, Outcome, State, Supervisor, runnable,
};
use tracing_subscriber::layer::SubscriberExt as _;

pub use crate::consensus::testing::soon;
use crate::handover::MemberData;
use crate::roles::CuratorConnection;

/// What does not happen is waited for so long. Too short a time hides a bug, but
/// it never fails a test of what is right.
const QUIET: Duration = Duration::from_millis(300);

/// Sees that something does not happen.
pub async fn never<T>(what: &str, future: impl Future<Output = T>) {
    let happened = tokio::time::timeout(QUIET, future).await.is_ok();
    assert!(!happened, "{what}");
}

/// Looks again and again until this holds: for files, which tell nobody.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    soon(what, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Tries again and again until this works.
pub async fn until_ok<T, E, F: Future<Output = Result<T, E>>>(
    what: &str,
    mut attempt: impl FnMut() -> F,
) -> T {
    soon(what, async {
        loop {
            if let Ok(value) = attempt().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// A worker that runs with nobody beside it.
pub struct Alone {
    supervisor: Supervisor,
    log: LogTree,
}

impl Alone {
    pub fn run<F, Fut>(worker: F) -> Self
    where
        F: Fn(Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcome> + Send + 'static,
    {
        let log = LogTree::new(hearth_base::logtree::Options::default());
        // The supervisor takes it with it to whatever thread it runs on.
        let logs = tracing_subscriber::registry().with(log.layer());
        let _guard = tracing::subscriber::set_default(logs);
        let worker = runnable(worker);
        let root = runnable(move |ctx: Context| {
            let worker = worker.clone();
            async move {
                ctx.run_group(vec![("worker", worker)])?;
                ctx.healthy();
                ctx.cancelled().await;
                Ok(())
            }
        });
        let backoff = Backoff {
            initial: Duration::from_millis(20),
            cap: Duration::from_millis(100),
            ..Backoff::default()
        };
        let options = Options {
            backoff,
            ..Options::default()
        };
        Self {
            supervisor: Supervisor::start(root, options),
            log,
        }
    }

    async fn reaches(&self, what: &str, mut wanted: impl FnMut(&NodeState) -> bool) {
        let tree = self.supervisor.tree();
        let mut changes = tree.watch();
        soon(what, async {
            while !tree.snapshot().iter().any(&mut wanted) {
                changes.next().await.unwrap();
            }
        })
        .await;
    }

    pub async fn is_healthy(&self) {
        let is_well =
            |node: &NodeState| node.name.ends_with(".worker") && node.state == State::Healthy;
        self.reaches("health", is_well).await;
    }

    /// Waits until the worker, or a part of it, has failed, with these words,
    /// which operators see.
    pub async fn fails(&self, why: &str) {
        self.reaches(why, |node| {
            let error = node.last_error.as_deref();
            error.is_some_and(|error| error.contains(why))
        })
        .await;
    }

    /// Waits until the worker, or a part of it, has started so often again.
    pub async fn restarted(&self, times: u64) {
        self.reaches("restarts", |node| node.restarts >= times)
            .await;
    }

    /// Shows what it has logged, for a test that fails.
    pub fn print_log(&self) {
        let query = Query {
            dn: String::new(),
            subtree: true,
            min_severity: Severity::Info,
            backlog: Backlog::All,
            follow: false,
        };
        for entry in self.log.read(query).backlog {
            println!("{}", entry.concise(300));
        }
    }

    /// The worker has not failed until now.
    pub fn is_fine(&self) {
        self.are_fine(|name| name.ends_with(".worker"));
    }

    /// Nor has any part of it.
    pub fn all_is_fine(&self) {
        self.are_fine(|_| true);
    }

    fn are_fine(&self, of_interest: impl Fn(&str) -> bool) {
        let nodes = self.supervisor.tree().snapshot();
        for node in nodes.iter().filter(|node| of_interest(&node.name)) {
            let found = (node.restarts, &node.last_error);
            assert_eq!(found, (0, &None), "{}", node.name);
        }
    }

    /// Waits until the worker has warned with these words.
    pub async fn warns(&self, words: &str) {
        let mut reader = self.log.read(Query {
            dn: String::new(),
            subtree: true,
            min_severity: Severity::Warning,
            backlog: Backlog::All,
            follow: true,
        });
        if reader.backlog.iter().any(|e| e.message.contains(words)) {
            return;
        }
        let stream = reader.stream.as_mut().unwrap();
        soon(words, async {
            loop {
                match stream.next().await.expect("the log goes on") {
                    Item::Entry(entry) if entry.message.contains(words) => return,
                    _ => {}
                }
            }
        })
        .await;
    }

    pub async fn stop(self) {
        let stragglers = soon("the worker stops", self.supervisor.shutdown()).await;
        assert!(stragglers.is_empty(), "{stragglers:?}");
    }
}

/// A node, and the curator on it.
pub struct Fake {
    pub cluster: Arc<TestCluster>,
    pub curator: TestCurator,
    pub node: Arc<NodeCredentials>,
    pub node_id: NodeId,
}

impl Fake {
    pub async fn new(script: Script) -> Self {
        let cluster = Arc::new(TestCluster::new());
        let node = cluster.node();
        Self {
            curator: {
                let limits = Limits::default();
                TestCurator::start_as(&cluster, &node, script, wall_clock(), limits).await
            },
            node_id: NodeId::from_public_key(&node.key.public()),
            node: Arc::new(node),
            cluster,
        }
    }

    /// Another curator of the cluster.
    pub async fn another(&self, script: Script) -> TestCurator {
        TestCurator::start(&self.cluster, script, wall_clock()).await
    }

    /// The node's connection to its curator.
    pub fn connection(&self) -> CuratorConnection {
        self.connection_to(&self.curator)
    }

    pub fn connection_to(&self, curator: &TestCurator) -> CuratorConnection {
        self.connection_to_all(&[curator])
    }

    /// The first of them is asked first.
    pub fn connection_to_all(&self, curators: &[&TestCurator]) -> CuratorConnection {
        let trust = tls::node_client_config(&self.node, ExpectedServer::AnyNode, wall_clock());
        let endpoints: Vec<_> = curators.iter().map(|curator| curator.endpoint()).collect();
        let curators = Curators::new(endpoints, trust.unwrap(), ClientOptions::default());
        CuratorConnection::new(self.node_id, curators)
    }

    pub fn member(&self) -> MemberData {
        MemberData {
            cluster_id: self.cluster.id,
            node_id: self.node_id,
            credentials: self.node.clone(),
            directory: ClusterDirectory::default(),
        }
    }
}

/// A node as curators know it.
pub fn record(id: &str, address: &str, roles: NodeRoles) -> Node {
    Node {
        id: id.to_owned(),
        state: Life::Up.into(),
        status: Some(NodeStatus {
            external_address: address.into(),
            ..NodeStatus::default()
        }),
        roles: Some(roles),
        ..Node::default()
    }
}

pub fn consensus_member() -> NodeRoles {
    NodeRoles {
        consensus_member: Some(ConsensusMember::default()),
        ..NodeRoles::default()
    }
}

/// The next state of a value, which must come.
pub async fn next<T: Clone + Send + Sync + 'static>(
    what: &str,
    watcher: &mut hearth_base::event::Watcher<T>,
) -> T {
    soon(what, watcher.next()).await.unwrap()
}

/// A value that stays what it is.
pub fn fixed<T: Clone + Send + Sync + 'static>(state: T) -> Value<T> {
    let (writer, value) = hearth_base::event::value();
    writer.set(state);
    value
}
