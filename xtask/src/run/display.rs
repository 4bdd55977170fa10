//! A boot as its user sees it: one line for each phase that is over, with what it took, and below them, on a terminal, the
//! phase that is going on with a clock. What the node waits for stands there as well, each reason once.

use std::time::Duration;

use hearth_api::console::Report;
use hearth_qemu::console::Line;
use hearth_qemu::phases::{Passed, Timeline};
use indicatif::{ProgressBar, ProgressStyle};

use crate::ui::Ui;

/// What a line of the console means for the boot, when it is the end of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The node will not go on by itself, and why.
    Refused(String),
    /// The node core has ended, and why.
    CoreEnded(String),
    /// The kernel has panicked: its line.
    Panic(String),
    /// The machine boots again, and nobody has asked it to.
    Rebooted,
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Refused(why) => write!(f, "the node refused: {why}"),
            Trouble::CoreEnded(why) => write!(f, "the node core ended: {why}"),
            Trouble::Panic(line) => write!(f, "the kernel panicked: {line}"),
            Trouble::Rebooted => f.write_str("the machine rebooted by itself"),
        }
    }
}

/// Follows one machine's console.
pub struct Display {
    ui: Ui,
    /// Stands before each line where there are several machines.
    label: String,
    timeline: Timeline,
    bar: Option<ProgressBar>,
    waiting: Option<String>,
    down: Option<String>,
}

impl Display {
    /// For a machine that is just being switched on; by its name, if it is one of several.
    pub fn new(ui: &Ui, name: Option<&str>) -> Display {
        let label = name.map(|name| format!("{name}  ")).unwrap_or_default();
        let template = format!("{{spinner}} {label}{{prefix:<10}} {{elapsed:>4}} {{wide_msg}}");
        let bar = ui.live().then(|| {
            let bar = ui.bars().add(ProgressBar::new_spinner());
            if let Ok(style) = ProgressStyle::with_template(&template) {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        let display = Display {
            ui: ui.clone(),
            label,
            timeline: Timeline::new(),
            bar,
            waiting: None,
            down: None,
        };
        display.show_current();
        display
    }

    /// Takes the next line of the console and shows what is new in it.
    pub fn observe(&mut self, line: &Line) -> Option<Trouble> {
        let reboots = self.timeline.reboots();
        let passed = self.timeline.observe(line);
        let rebooted = self.timeline.reboots() > reboots;
        if let Some(passed) = passed {
            self.waiting = None;
            self.ui.say(phase_line(&self.label, &passed));
            self.show_current();
        }
        if rebooted {
            return Some(Trouble::Rebooted);
        }
        if let Some(at) = line.text.find("Kernel panic - ") {
            return Some(Trouble::Panic(line.text[at..].to_owned()));
        }
        match Report::parse(&line.text)? {
            Report::Refused(why) => return Some(Trouble::Refused(why)),
            Report::CoreEnded(why) => return Some(Trouble::CoreEnded(why)),
            Report::Waiting(why) => self.show_waiting(why),
            Report::Down(how) => self.down = Some(how),
            Report::Extension(name, Some(why)) => {
                let label = &self.label;
                self.ui
                    .say(format_args!("{label}: extension {name} is refused: {why}"));
            }
            Report::Reached(..)
            | Report::State(_)
            | Report::Extension(_, None)
            | Report::Failpoint(_) => {}
        }
        None
    }

    /// The node is to be asked over the network now.
    pub fn asking(&self) {
        if let Some(bar) = &self.bar {
            bar.set_prefix("answers");
            bar.set_message("");
            bar.reset_elapsed();
        }
    }

    /// What is being waited for, beside the clock; elsewhere than on a terminal, a line.
    pub fn show_waiting(&mut self, why: String) {
        if self.waiting.as_ref() == Some(&why) {
            return;
        }
        if let Some(bar) = &self.bar {
            bar.set_message(format!("waiting for {why}"));
        } else {
            let label = &self.label;
            self.ui.say(format_args!("  {label}… waiting for {why}"));
        }
        self.waiting = Some(why);
    }

    /// The boot is over: the live line goes.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            self.ui.bars().remove(&bar);
        }
    }

    /// What the boot has come through.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// What the node has waited for last, if it still does.
    pub fn waiting(&self) -> Option<&str> {
        self.waiting.as_deref()
    }

    /// How the node said that it goes down, if it has.
    pub fn down(&self) -> Option<&str> {
        self.down.as_deref()
    }

    fn show_current(&self) {
        if let Some(bar) = &self.bar {
            let current = self.timeline.current();
            bar.set_prefix(current.map_or("", |phase| phase.word()));
            bar.set_message("");
            bar.reset_elapsed();
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.finish();
    }
}

fn phase_line(label: &str, passed: &Passed) -> String {
    let took = passed.took.as_secs_f64();
    let line = format!(
        "  {label}{:<10} {took:>6.2} s  {}",
        passed.phase, passed.detail
    );
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn display() -> Display {
        Display::new(&Ui::new(false), None)
    }

    fn see(display: &mut Display, at: u64, text: &str) -> Option<Trouble> {
        display.observe(&Line {
            at: Duration::from_millis(at),
            text: text.into(),
        })
    }

    #[test]
    fn what_ends_a_boot_is_told_apart() {
        let mut display = display();
        assert_eq!(see(&mut display, 1, "hearth: reached kernel 6.12"), None);
        assert_eq!(
            see(&mut display, 2, "hearth: refused field x: empty"),
            Some(Trouble::Refused("field x: empty".to_owned()))
        );
        assert_eq!(
            see(&mut display, 3, "hearth: core ended: exit code 3"),
            Some(Trouble::CoreEnded("exit code 3".to_owned()))
        );
        assert_eq!(
            see(&mut display, 4, "[ 1.0] Kernel panic - not syncing: x"),
            Some(Trouble::Panic("Kernel panic - not syncing: x".to_owned()))
        );
        assert_eq!(
            see(&mut display, 5, "BdsDxe: starting Boot0001"),
            Some(Trouble::Rebooted)
        );
        // The new boot goes its way.
        assert_eq!(see(&mut display, 6, "hearth: reached kernel"), None);
        assert_eq!(display.timeline().reboots(), 1);
    }

    #[test]
    fn a_reason_to_wait_holds_until_a_phase_is_over() {
        let mut display = display();
        see(&mut display, 1, "hearth: waiting for a DHCP lease");
        assert_eq!(display.waiting(), Some("a DHCP lease"));
        see(&mut display, 2, "hearth: reached network 10.0.2.15/24");
        assert_eq!(display.waiting(), None);
        assert_eq!(display.down(), None);
        see(&mut display, 3, "hearth: down power off");
        assert_eq!(display.down(), Some("power off"));
    }

    #[test]
    fn a_phase_is_one_line() {
        let passed = |detail: &str| Passed {
            phase: hearth_qemu::phases::Phase::Network,
            at: Duration::from_secs(4),
            took: Duration::from_millis(1230),
            detail: detail.to_owned(),
        };
        assert_eq!(
            phase_line("", &passed("10.0.2.15/24")),
            "  network      1.23 s  10.0.2.15/24"
        );
        assert_eq!(phase_line("", &passed("")), "  network      1.23 s");
        assert_eq!(
            phase_line("node-2  ", &passed("")),
            "  node-2  network      1.23 s"
        );
    }
}
