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
use crate::args::{Format, Global};
use crate::connection;
use crate::failure::Failure;
use crate::output::{self, Change, node_table};

/// Shows changes until interrupted. If the stream breaks, it is resumed, from another curator if
/// need be. It ends with an error if the first attempt fails, or if an error is not temporary.
pub(super) async fn run(global: &Global, form: Format) -> Result<(), Failure> {
    /// Delay between two attempts.
    const PAUSE: Duration = Duration::from_secs(1);
    let channel = connection::open(global).await?;
    let mut view = View::new(form);
    loop {
        let Err(failed) = follow(&channel, &mut view).await;
        match failed {
            Ended::Output(failure) => return Err(failure),
            Ended::Call(status) => {
                if !view.synced || !passing(&status) {
                    return Err(Failure::call("watch the nodes", status));
                }
                eprintln!("hearthctl: lost the connection to the cluster; retrying");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Why a stream has ended.
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

/// The known nodes, and how they are printed.
struct View {
    form: Format,
    nodes: BTreeMap<String, output::Node>,
    /// IDs of the nodes in the backlog of this stream, until the backlog is complete: then known
    /// nodes that are not in it are removed.
    backlog: Option<Vec<String>>,
    /// The backlog of some stream has been complete.
    synced: bool,
}

impl View {
    fn new(form: Format) -> Self {
        Self {
            form,
            nodes: BTreeMap::new(),
            backlog: None,
            synced: false,
        }
    }

    /// Starts a new stream.
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
        if self.form == Format::Table && self.backlog.is_none() {
            self.draw()?;
        }
        Ok(())
    }

    fn tell(&self, change: &Change<'_>) -> Result<(), Failure> {
        match self.form {
            Format::Json => print_json_line(change),
            Format::Table => Ok(()),
        }
    }

    /// Prints the table. On a terminal it replaces the previous one.
    fn draw(&self) -> Result<(), Failure> {
        let table = node_table(self.nodes.values());
        if io::stdout().is_terminal() {
            print(&format!("\x1b[H\x1b[2J{table}"))
        } else {
            print(&format!("{table}\n"))
        }
    }
}
