//! The machine-readable lines that a node prints on its console.

use std::sync::{Mutex, PoisonError};

use hearth_api::console::{Milestone, Report};

/// Prints a machine-readable line on the console.
pub fn report(report: &Report) {
    println!("{report}");
}

/// Reports a milestone once per boot: a service that restarts reaches it again.
pub fn report_once(milestone: Milestone) {
    static REACHED: Mutex<Vec<Milestone>> = Mutex::new(Vec::new());
    let mut reached = REACHED.lock().unwrap_or_else(PoisonError::into_inner);
    if !reached.contains(&milestone) {
        reached.push(milestone);
        report(&Report::Reached(milestone, String::new()));
    }
}
