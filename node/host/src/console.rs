//! The lines for programs that a node prints on its console.

use std::sync::{Mutex, PoisonError};

use hearth_api::console::{Milestone, Report};

/// Prints a line for programs on the console.
pub fn report(report: &Report) {
    println!("{report}");
}

/// Says that a milestone is reached, at the first time in this boot only: a
/// service that restarts reaches it again.
pub fn report_once(milestone: Milestone) {
    static REACHED: Mutex<Vec<Milestone>> = Mutex::new(Vec::new());
    let mut reached = REACHED.lock().unwrap_or_else(PoisonError::into_inner);
    if !reached.contains(&milestone) {
        reached.push(milestone);
        report(&Report::Reached(milestone, String::new()));
    }
}
