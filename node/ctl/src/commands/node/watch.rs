//! `hearthctl node list --watch`.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use hearth_api::client::Channel;
use hearth_api::v1::curator_client::CuratorClient;
use hearth_api::v1::{WatchEvent, WatchRequest};
use tonic::{Status, Streaming};

use super::super::{print, print_json_line};
use super::passing;
use crate::args::{Form, Global};
use crate::connection;
use crate::failure::Failure;
use crate::output::{self, Change, node_table};

/// Shows changes until interrupted. A curator that goes away is replaced by
/// another; only if the very first attempt fails, or one is refused, is that
/// the end.
pub(super) async fn run(global: &Global, form: Form) -> Result<(), Failure> {
    /// Between two attempts.
    const PAUSE: Duration = Duration::from_secs(1);
    let channel = connection::open(global)?;
    let mut view = View::new(form);
    loop {
        let Err(failed) = follow(&channel, &mut view).await;
        match failed {
            Ended::Output(failure) => return Err(failure),
            Ended::Call(status) => {
                if !view.synced || !passing(&status) {
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
