//! Output for the user: lines and progress, all of it on standard error, so that standard output is free for results
//! that another program reads.
//!
//! On a terminal a [`Task`] is a live line (indicatif) with a clock; elsewhere, in a CI log for instance, it is one
//! line at its start and one at its end, with its duration. A task that is dropped without [`Task::done`] leaves no
//! line: its error is printed instead.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use hearth_build::progress::{self, Length, Progress};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Handle on the user's terminal; cheap to clone.
#[derive(Clone)]
pub(crate) struct Ui {
    verbose: bool,
    live: bool,
    bars: MultiProgress,
}

impl Ui {
    /// `verbose`: external commands are printed before they run.
    pub(crate) fn new(verbose: bool) -> Ui {
        Ui {
            verbose,
            live: std::io::stderr().is_terminal(),
            bars: MultiProgress::new(),
        }
    }

    /// Whether external commands are printed.
    pub(crate) fn verbose(&self) -> bool {
        self.verbose
    }

    /// Whether the output is a terminal, where lines can change.
    pub(crate) fn live(&self) -> bool {
        self.live
    }

    /// The bars of the running tasks, for callers that draw lines of their own among them.
    pub(crate) fn bars(&self) -> &MultiProgress {
        &self.bars
    }

    /// Prints one line, above whatever is in progress.
    pub(crate) fn say(&self, line: impl Display) {
        // Not by indicatif's println, which pads the line and is confused by an echoed ^C.
        self.bars.suspend(|| {
            // Errors are ignored: standard error may be closed.
            let _ = writeln!(std::io::stderr(), "{line}");
        });
    }

    /// Prints one line with `-v` only.
    pub(crate) fn detail(&self, line: impl Display) {
        if self.verbose {
            self.say(line);
        }
    }

    /// Long work of unknown length.
    pub(crate) fn task(&self, what: impl Into<String>) -> Task {
        self.begin(what.into(), None)
    }

    /// Work that is usually done at once: shown only while it lasts, and on a terminal only.
    pub(crate) fn quiet_task(&self, what: impl Into<String>) -> Task {
        if self.live {
            return self.begin(what.into(), None);
        }
        Task {
            ui: self.clone(),
            what: what.into(),
            bar: ProgressBar::hidden(),
            started: Instant::now(),
        }
    }

    /// Long work of about `length` steps.
    pub(crate) fn counted_task(&self, what: impl Into<String>, length: u64) -> Task {
        self.begin(what.into(), Some(length))
    }

    fn begin(&self, what: String, length: Option<u64>) -> Task {
        let bar = if self.live {
            let bar = self.bars.add(match length {
                Some(length) => ProgressBar::new(length),
                None => ProgressBar::new_spinner(),
            });
            let template = match length {
                Some(_) => "{spinner} {prefix} [{bar:20}] {percent:>3} % {elapsed} {wide_msg}",
                None => "{spinner} {prefix} {elapsed} {wide_msg}",
            };
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(what.clone());
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        } else {
            eprintln!("{what} …");
            ProgressBar::hidden()
        };
        Task {
            ui: self.clone(),
            what,
            bar,
            started: Instant::now(),
        }
    }
}

/// A piece of work in progress.
pub(crate) struct Task {
    ui: Ui,
    what: String,
    bar: ProgressBar,
    started: Instant,
}

impl Task {
    /// Sets what is being done now; shown beside the bar.
    pub(crate) fn now(&self, detail: impl Into<String>) {
        self.bar.set_message(detail.into());
    }

    /// Advances by one step. A bar whose estimate was too low stays at its end.
    pub(crate) fn step(&self) {
        if self
            .bar
            .length()
            .is_none_or(|end| self.bar.position() + 1 < end)
        {
            self.bar.inc(1);
        }
    }

    /// The work succeeded: prints one line with its duration.
    pub(crate) fn done(self) {
        let took = self.started.elapsed().as_secs_f64();
        self.bar.finish_and_clear();
        self.ui.say(format_args!("{}: {took:.1} s", self.what));
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        self.ui.bars.remove(&self.bar);
    }
}

/// The progress reports of the builders.
impl Progress for Ui {
    fn say(&self, line: &str) {
        Ui::say(self, line);
    }

    fn detail(&self, line: &str) {
        Ui::detail(self, line);
    }

    fn start(&self, what: &str, length: Length) -> Box<dyn progress::Task> {
        Box::new(match length {
            Length::Unknown => self.task(what),
            Length::Moment => self.quiet_task(what),
            Length::Steps(steps) => self.counted_task(what, steps),
        })
    }
}

impl progress::Task for Task {
    fn now(&self, detail: &str) {
        Task::now(self, detail);
    }

    fn step(&self) {
        Task::step(self);
    }

    fn done(self: Box<Self>) {
        Task::done(*self);
    }
}
