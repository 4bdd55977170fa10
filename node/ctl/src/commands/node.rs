//! `hearthctl node`: the cluster's nodes.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use hearth_api::client::{Channel, within};
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{GetNodesRequest, WatchEvent, WatchRequest};
use tonic::{Code, Status, Streaming};

use super::{print, print_json, print_json_line};
use crate::args::{Form, Global, Node};
use crate::connection;
use crate::failure::Failure;
use crate::output::{self, Change, node_table};

pub async fn run(global: &Global, command: Node) -> Result<(), Failure> {
    match command {
        Node::List {
            output,
            watch: false,
        } => list(global, output.form).await,
        Node::List {
            output,
            watch: true,
        } => watch(global, output.form).await,
    }
}

async fn list(global: &Global, form: Form) -> Result<(), Failure> {
    let mut management = ManagementClient::new(connection::open(global)?);
    let nodes = within(global.timeout, async {
        let request = GetNodesRequest::default();
        let mut answers = management.get_nodes(request).await?.into_inner();
        let mut nodes = Vec::new();
        while let Some(answer) = answers.message().await? {
            nodes.extend(answer.nodes.iter().map(output::Node::from));
        }
        Ok(nodes)
    })
    .await
    .map_err(|status| Failure::call("list the nodes", status))?;
    match form {
        Form::Table => print(&node_table(&nodes).to_string()),
        Form::Json => print_json(&nodes),
    }
}

/// Shows changes until interrupted. A curator that goes away is replaced by
/// another; only if the very first attempt fails, or one is refused, is that
/// the end.
async fn watch(global: &Global, form: Form) -> Result<(), Failure> {
    /// Between two attempts.
    const PAUSE: Duration = Duration::from_secs(1);
    let channel = connection::open(global)?;
    let mut view = View::new(form);
    loop {
        let Err(failed) = follow(&channel, &mut view).await;
        match failed {
            Ended::Output(failure) => return Err(failure),
            Ended::Call(status) => {
                let passing = matches!(
                    status.code(),
                    Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded
                );
                if !view.synced || !passing {
                    return Err(Failure::call("watch the nodes", status));
                }
                eprintln!("hearthctl: lost touch with the cluster, trying again");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Why the following of one stream has ended.
enum Ended {
    Call(Status),
    Output(Failure),
}

impl From<Status> for Ended {
    fn from(status: Status) -> Self {
        Self::Call(status)
    }
}

async fn follow(channel: &Channel, view: &mut View) -> Result<std::convert::Infallible, Ended> {
    let request = WatchRequest::default();
    let mut curator = CuratorClient::new(channel.clone());
    let mut events: Streaming<WatchEvent> = curator.watch(request).await?.into_inner();
    view.begin();
    loop {
        match events.message().await? {
            Some(event) => view.take(&event).map_err(Ended::Output)?,
            None => return Err(Status::unavailable("the stream has ended").into()),
        }
    }
}

/// The nodes as far as they are known, and how they are shown.
struct View {
    form: Form,
    nodes: BTreeMap<String, output::Node>,
    /// What this stream has told while its backlog runs: in the end, nodes
    /// that it did not tell are gone.
    backlog: Option<Vec<String>>,
    /// Some stream has told everything there was.
    synced: bool,
}

impl View {
    fn new(form: Form) -> Self {
        Self {
            form,
            nodes: BTreeMap::new(),
            backlog: None,
            synced: false,
        }
    }

    /// A new stream begins.
    fn begin(&mut self) {
        self.backlog = Some(Vec::new());
    }

    fn take(&mut self, event: &WatchEvent) -> Result<(), Failure> {
        for node in &event.nodes {
            if let Some(told) = &mut self.backlog {
                told.push(node.id.clone());
            }
            let node = (node.id.clone(), output::Node::from(node));
            self.tell(&Change::Node { node: &node.1 })?;
            self.nodes.insert(node.0, node.1);
        }
        let mut gone = event.tombstones.clone();
        if event.backlog_complete {
            let told = self.backlog.take().unwrap_or_default();
            gone.extend(self.nodes.keys().filter(|id| !told.contains(id)).cloned());
        }
        for id in gone {
            if self.nodes.remove(&id).is_some() {
                self.tell(&Change::Removed { id: &id })?;
            }
        }
        if event.backlog_complete {
            self.synced = true;
            self.tell(&Change::Synced)?;
        }
        if self.form == Form::Table && self.backlog.is_none() {
            self.draw()?;
        }
        Ok(())
    }

    fn tell(&self, change: &Change<'_>) -> Result<(), Failure> {
        match self.form {
            Form::Json => print_json_line(change),
            Form::Table => Ok(()),
        }
    }

    /// On a terminal in the place of the last, elsewhere one after another.
    fn draw(&self) -> Result<(), Failure> {
        let table = node_table(self.nodes.values());
        if io::stdout().is_terminal() {
            print(&format!("\x1b[H\x1b[2J{table}"))
        } else {
            print(&format!("{table}\n"))
        }
    }
}
