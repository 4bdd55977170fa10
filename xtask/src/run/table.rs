//! The status of the cluster, a line for each node: redrawn in place on a terminal; elsewhere, each line is printed
//! again when it changes.

use hearth_api::v1::{self, ClusterState, NodeHealth, NodeState};
use hearth_lab::ClusterStatus;
use hearth_lab::events::Snapshot;
use hearth_lab::formation::{Candidate, is_well, member, wants};
use indicatif::{ProgressBar, ProgressStyle};

use crate::ui::Ui;

const HEADING: [&str; 8] = [
    "MACHINE", "STATE", "HEALTH", "CLUSTER", "ROLES", "ETCD", "ADDRESS", "NODE",
];

/// The cells of a node.
type Row = [String; 8];

/// Shows the rows.
pub(super) struct Table {
    ui: Ui,
    shown: Vec<Row>,
    note: String,
    bars: Vec<ProgressBar>,
}

impl Table {
    /// An empty table.
    pub(super) fn new(ui: &Ui) -> Table {
        Table {
            ui: ui.clone(),
            shown: Vec::new(),
            note: String::new(),
            bars: Vec::new(),
        }
    }

    /// Shows a snapshot.
    pub(super) fn show(&mut self, snapshot: &Snapshot<'_>) {
        let candidates = snapshot.candidates.iter().zip(snapshot.on);
        let rows = candidates.map(|(candidate, on)| row(candidate, *on, snapshot.cluster_status));
        self.update(rows.collect(), &note(snapshot));
    }

    /// Updates the rows, with a note below them.
    fn update(&mut self, rows: Vec<Row>, note: &str) {
        if rows == self.shown && note == self.note {
            return;
        }
        if self.ui.live() {
            self.draw(&rows, note);
        } else {
            let changed = rows.iter().filter(|row| !self.shown.contains(row));
            for line in lines(&rows, changed) {
                self.ui.say(line);
            }
            if !note.is_empty() && note != self.note {
                self.ui.say(note);
            }
        }
        self.shown = rows;
        note.clone_into(&mut self.note);
    }

    fn draw(&mut self, rows: &[Row], note: &str) {
        let heading = HEADING.map(str::to_owned);
        let widths = widths(rows);
        let all = std::iter::once(&heading).chain(rows);
        let mut text: Vec<String> = all.map(|row| line(row, &widths)).collect();
        text.push(note.to_owned());
        while self.bars.len() < text.len() {
            let bar = self.ui.bars().add(ProgressBar::new_spinner());
            if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
                bar.set_style(style);
            }
            self.bars.push(bar);
        }
        for (bar, text) in self.bars.iter().zip(text) {
            bar.set_message(text);
            bar.tick();
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for bar in &self.bars {
            bar.finish_and_clear();
            self.ui.bars().remove(bar);
        }
    }
}

fn lines<'a>(all: &'a [Row], some: impl Iterator<Item = &'a Row>) -> Vec<String> {
    let widths = widths(all);
    some.map(|row| line(row, &widths)).collect()
}

fn widths(rows: &[Row]) -> [usize; 8] {
    let mut widths = HEADING.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    widths
}

fn line(row: &Row, widths: &[usize; 8]) -> String {
    let cells = row.iter().zip(widths);
    let cells: Vec<String> = cells
        .map(|(cell, width)| format!("{cell:<width$}"))
        .collect();
    cells.join("  ").trim_end().to_owned()
}

/// The row of one machine.
fn row(candidate: &Candidate, on: bool, cluster_status: &ClusterStatus) -> Row {
    let dash = || "-".to_owned();
    let machine = match on {
        true => candidate.machine.clone(),
        false => format!("{} (off)", candidate.machine),
    };
    let Some(node) = candidate.node(&cluster_status.nodes) else {
        return [
            machine,
            "unknown".to_owned(),
            dash(),
            dash(),
            dash(),
            dash(),
            candidate.address.to_string(),
            dash(),
        ];
    };
    let status = node.status.as_ref();
    let cluster = status.map(|status| status.cluster_state());
    let address = status.map(|status| status.external_address.clone());
    [
        machine,
        word(node.state().as_str_name(), "NODE_STATE_"),
        match node.state() {
            NodeState::New | NodeState::Standby => dash(),
            _ => word(node.health().as_str_name(), "NODE_HEALTH_"),
        },
        match cluster {
            Some(state) if state != ClusterState::Unspecified => {
                let state = word(state.as_str_name(), "CLUSTER_STATE_");
                // It is what the node last reported.
                if node.health() == NodeHealth::Healthy {
                    state
                } else {
                    format!("{state} (stale)")
                }
            }
            _ => dash(),
        },
        roles(node),
        etcd(node, cluster_status),
        address
            .filter(|a| !a.is_empty())
            .unwrap_or_else(|| candidate.address.to_string()),
        node.id.clone(),
    ]
}

fn word(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_owned()
}

fn roles(node: &v1::Node) -> String {
    let roles = node.roles.unwrap_or_default();
    let held = [
        (roles.consensus_member.is_some(), "consensus-member"),
        (
            roles.kubernetes_controller.is_some(),
            "kubernetes-controller",
        ),
        (roles.kubernetes_worker.is_some(), "kubernetes-worker"),
    ];
    let held: Vec<&str> = held
        .iter()
        .filter(|(held, _)| *held)
        .map(|(_, r)| *r)
        .collect();
    match held.is_empty() {
        true => "-".to_owned(),
        false => held.join(","),
    }
}

fn etcd(node: &v1::Node, cluster_status: &ClusterStatus) -> String {
    let is = match member(node, cluster_status) {
        None => "-",
        Some(member) if member.learner => "learner",
        Some(member) if member.leader => "leader",
        Some(member) if !member.started => "not started",
        Some(_) => "voter",
    };
    use v1::membership_change::Kind;
    match wants(node, cluster_status).map(|change| change.kind()) {
        Some(Kind::Join) => format!("{is}, joining"),
        Some(Kind::Leave) => format!("{is}, leaving"),
        Some(Kind::Replace) => format!("{is}, being replaced"),
        Some(Kind::Unspecified) | None => is.to_owned(),
    }
}

/// An action for the user, or the health of the members.
fn note(snapshot: &Snapshot<'_>) -> String {
    if let Some(error) = snapshot.silence {
        let why = hearth_api::chain(error);
        return format!("last known status; no curator answers now: {why}");
    }
    let nodes = &snapshot.cluster_status.nodes;
    let new = |candidate: &&Candidate| {
        let node = candidate.node(nodes);
        node.is_some_and(|node| node.state() == NodeState::New)
    };
    if let Some(candidate) = snapshot.candidates.iter().find(new)
        && let Some(key) = &candidate.public_key
    {
        let key = hex::encode(key);
        let machine = &candidate.machine;
        return format!(
            "{machine} is waiting for your approval of the key on its console: cargo xtask ctl -- node approve {key}"
        );
    }
    let members = nodes.iter().filter(|node| node.state() == NodeState::Up);
    let members: Vec<&v1::Node> = members.collect();
    match members.iter().filter(|node| !is_well(node)).count() {
        0 => format!("all {} members are healthy", members.len()),
        ill => format!("{ill} of {} members are not healthy", members.len()),
    }
}
