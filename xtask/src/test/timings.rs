//! `--timings`: the slowest tests, and the compile time of each crate.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::report::{Report, Test};
use crate::target::{checkout, shown};
use crate::ui::Ui;

/// Number of tests and of crates that are shown.
const SHOWN: usize = 20;

/// A unit of cargo's report: one call of the compiler, or of a build script.
#[derive(Debug, Deserialize)]
struct Unit {
    name: String,
    duration: f64,
}

/// Prints the slowest tests of all stages.
pub(super) fn print_tests<'a>(ui: &Ui, reports: impl Iterator<Item = &'a Report>) {
    let durations = reports.flat_map(|report| report.durations());
    let mut durations: Vec<&(Test, f64)> = durations.collect();
    durations.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    ui.say("\nslowest tests:");
    for (test, seconds) in durations.iter().take(SHOWN) {
        ui.say(format_args!(
            "{seconds:>8.1} s  {} {}",
            test.krate, test.name
        ));
    }
}

/// Prints the compile time of each crate, from the report that cargo has just written. All that one crate took is added
/// up: its library, its tests, and each set of features that it was compiled with.
pub(super) fn print_compilation(ui: &Ui) -> Result<()> {
    let path = checkout()?.target().join("cargo-timings/cargo-timing.html");
    let page =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut crates: BTreeMap<String, (f64, u32)> = BTreeMap::new();
    for unit in units(&page, &path)? {
        let (seconds, units) = crates.entry(unit.name).or_default();
        *seconds += unit.duration;
        *units += 1;
    }
    let mut crates: Vec<(String, (f64, u32))> = crates.into_iter().collect();
    crates.sort_by(|(_, (one, _)), (_, (other, _))| other.total_cmp(one));
    let total: f64 = crates.iter().map(|(_, (seconds, _))| seconds).sum();
    ui.say(format_args!(
        "\nslowest crates to compile, of {total:.0} s of compilers' time ({}):",
        shown(&path)
    ));
    for (name, (seconds, units)) in crates.iter().take(SHOWN) {
        ui.say(format_args!("{seconds:>8.1} s  {name} ({units} units)"));
    }
    Ok(())
}

/// The data in the page.
fn units(page: &str, path: &Path) -> Result<Vec<Unit>> {
    let data = page.split_once("const UNIT_DATA = ").map(|(_, rest)| rest);
    let data = data
        .and_then(|rest| rest.split_once("];"))
        .map(|(data, _)| data);
    let data = data.with_context(|| format!("{} has no UNIT_DATA", path.display()))?;
    serde_json::from_str(&format!("{data}]"))
        .with_context(|| format!("cannot read UNIT_DATA of {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_data_of_each_unit() {
        let page = "<script>\nconst UNIT_DATA = [\n  {\n    \"i\": 0,\n    \"name\": \"libc\",\n    \"duration\": 1.5,\n    \"sections\": null\n  }\n];\nconst OTHER = [];";
        let units = units(page, Path::new("x")).unwrap();
        assert_eq!((units.len(), units[0].name.as_str()), (1, "libc"));
        assert!((units[0].duration - 1.5).abs() < f64::EPSILON);
        assert!(super::units("", Path::new("x")).is_err());
    }
}
