//! The cluster as it stands, a line for each node: redrawn in place on a terminal, and elsewhere each line anew when it has
//! changed.

use hearth_api::v1::{self, ClusterState, NodeHealth, NodeState};
use indicatif::{ProgressBar, ProgressStyle};

use crate::formation::{Candidate, member, wants};
use crate::operator::Standing;
use crate::ui::Ui;

const HEADING: [&str; 8] = [
    "MACHINE", "STATE", "HEALTH", "CLUSTER", "ROLES", "ETCD", "ADDRESS", "NODE",
];

/// What is shown of a node.
pub type Row = [String; 8];

/// Shows them.
pub struct Table {
    ui: Ui,
    shown: Vec<Row>,
    note: String,
    bars: Vec<ProgressBar>,
}

impl Table {
    /// Nothing yet.
    pub fn new(ui: &Ui) -> Table {
        Table {
            ui: ui.clone(),
            shown: Vec::new(),
            note: String::new(),
            bars: Vec::new(),
        }
    }

    /// What is to be seen now, with a note below it.
    pub fn show(&mut self, rows: Vec<Row>, note: &str) {
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

/// The line of one machine.
pub fn row(candidate: &Candidate, on: bool, standing: &Standing) -> Row {
    let dash = || "-".to_owned();
    let machine = match on {
        true => candidate.machine.clone(),
        false => format!("{} (off)", candidate.machine),
    };
    let Some(node) = candidate.node(&standing.nodes) else {
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
                word(state.as_str_name(), "CLUSTER_STATE_")
            }
            _ => dash(),
        },
        roles(node),
        etcd(node, standing),
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

fn etcd(node: &v1::Node, standing: &Standing) -> String {
    let is = match member(node, standing) {
        None => "-",
        Some(member) if member.learner => "learner",
        Some(member) if member.leader => "leader",
        Some(member) if !member.started => "not started",
        Some(_) => "voter",
    };
    use v1::membership_change::Kind;
    match wants(node, standing).map(|change| change.kind()) {
        Some(Kind::Join) => format!("{is}, joining"),
        Some(Kind::Leave) => format!("{is}, leaving"),
        Some(Kind::Unspecified) | None => is.to_owned(),
    }
}

/// Whether all that are to be are well; for the note below.
pub fn is_well(node: &v1::Node) -> bool {
    let status = node.status.as_ref();
    node.health() == NodeHealth::Healthy
        && status.is_some_and(|status| status.cluster_state() == ClusterState::Home)
}
