//! Displays a run: one line for each completed phase of a boot, with its duration, and below them, on a terminal, the
//! current phase with a clock; then the table of the cluster. What a node waits for is shown as well, each reason once.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_lab::events::{Event, Observer};
use indicatif::{ProgressBar, ProgressStyle};

use super::table::Table;
use crate::ui::Ui;

/// Draws the events.
pub(super) struct Display {
    ui: Ui,
    /// The configuration of the machines, shown when one starts.
    made_of: String,
    /// Whether lines are labelled with machine names.
    several: bool,
    drawn: Mutex<Drawn>,
}

/// The changing lines on the terminal.
#[derive(Default)]
struct Drawn {
    bars: BTreeMap<String, ProgressBar>,
    table: Option<Table>,
}

impl Display {
    /// For a run of one machine or several, all with this configuration.
    pub(super) fn new(ui: &Ui, made_of: String, several: bool) -> Display {
        Display {
            ui: ui.clone(),
            made_of,
            several,
            drawn: Mutex::default(),
        }
    }

    /// The label of a machine's lines.
    fn label(&self, machine: &str) -> String {
        match self.several {
            true => format!("{machine}  "),
            false => String::new(),
        }
    }

    fn drawn(&self) -> MutexGuard<'_, Drawn> {
        self.drawn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on(&self, machine: &str, phase: &str) {
        if !self.ui.live() {
            return;
        }
        let label = self.label(machine);
        let template = format!("{{spinner}} {label}{{prefix:<10}} {{elapsed:>4}} {{wide_msg}}");
        let bar = self.ui.bars().add(ProgressBar::new_spinner());
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        show(&bar, phase);
        self.over(machine);
        self.drawn().bars.insert(machine.to_owned(), bar);
    }

    fn over(&self, machine: &str) {
        if let Some(bar) = self.drawn().bars.remove(machine) {
            bar.finish_and_clear();
            self.ui.bars().remove(&bar);
        }
    }

    fn waiting(&self, machine: &str, why: &str) {
        match self.drawn().bars.get(machine) {
            Some(bar) => bar.set_message(format!("waiting for {why}")),
            None => {
                let label = self.label(machine);
                self.ui.say(format_args!("  {label}… waiting for {why}"));
            }
        }
    }

    fn next(&self, machine: &str, what: &str) {
        if let Some(bar) = self.drawn().bars.get(machine) {
            show(bar, what);
        }
    }
}

fn show(bar: &ProgressBar, what: &str) {
    bar.set_prefix(what.to_owned());
    bar.set_message("");
    bar.reset_elapsed();
}

impl Observer for Display {
    fn event(&self, event: &Event<'_>) {
        let word = |phase: &Option<hearth_qemu::phases::Phase>| phase.map_or("", |p| p.word());
        match event {
            Event::Starts { .. } => self.ui.say(format_args!("{event}: {}", self.made_of)),
            Event::On { machine, phase } => self.on(machine, word(phase)),
            Event::Passed { machine, next, .. } => {
                let label = self.label(machine);
                self.ui.say(format_args!("  {label}{event}"));
                self.next(machine, word(next));
            }
            Event::Waiting { machine, why } => self.waiting(machine, why),
            Event::Asking { machine } => self.next(machine, "answers"),
            Event::Over { machine } => self.over(machine),
            Event::ExtensionRefused { machine, .. } => {
                self.ui.say(format_args!("{machine}: {event}"));
            }
            Event::Seen(snapshot) => {
                let mut drawn = self.drawn();
                let table = drawn.table.get_or_insert_with(|| Table::new(&self.ui));
                table.show(snapshot);
            }
            Event::AskingAgain(_) => self.ui.detail(event),
            Event::PoweringOff { .. } => {
                self.drawn().table = None;
                self.ui.say(event);
            }
            _ => self.ui.say(event),
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        let drawn = self.drawn.get_mut().unwrap_or_else(PoisonError::into_inner);
        for bar in drawn.bars.values() {
            bar.finish_and_clear();
            self.ui.bars().remove(bar);
        }
    }
}
