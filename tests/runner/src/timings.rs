//! The compile time of each crate, from the report of `cargo test --timings`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::RunnerError;

/// Compile times of the last call of cargo.
#[derive(Debug)]
pub struct Compilation {
    /// Path of cargo's report.
    pub page: PathBuf,
    /// The crates, the slowest first.
    pub crates: Vec<Crate>,
}

/// All that one crate took: its library, its tests, and each set of features that it was compiled with.
#[derive(Debug, Clone, PartialEq)]
pub struct Crate {
    /// Its name.
    pub name: String,
    /// Seconds of compilers' time.
    pub seconds: f64,
    /// Calls of the compiler, and of its build script.
    pub units: u32,
}

/// A unit of cargo's report: one call of the compiler, or of a build script.
#[derive(Debug, Deserialize)]
struct Unit {
    name: String,
    duration: f64,
}

impl Compilation {
    /// Reads the report that cargo has just written to its target folder.
    ///
    /// # Errors
    /// If there is none, or it has another format.
    pub fn read(target: &Path) -> Result<Compilation, RunnerError> {
        let page = target.join("cargo-timings/cargo-timing.html");
        let read = |source| RunnerError::Read {
            path: page.clone(),
            source,
        };
        let text = fs::read_to_string(&page).map_err(read)?;
        let mut crates: BTreeMap<String, (f64, u32)> = BTreeMap::new();
        for unit in units(&text, &page)? {
            let (seconds, units) = crates.entry(unit.name).or_default();
            *seconds += unit.duration;
            *units += 1;
        }
        let crates = crates.into_iter().map(|(name, (seconds, units))| Crate {
            name,
            seconds,
            units,
        });
        let mut crates: Vec<Crate> = crates.collect();
        crates.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        Ok(Compilation { page, crates })
    }
}

/// The data in the page.
fn units(page: &str, path: &Path) -> Result<Vec<Unit>, RunnerError> {
    let data = page.split_once("const UNIT_DATA = ").map(|(_, rest)| rest);
    let data = data
        .and_then(|rest| rest.split_once("];"))
        .map(|(data, _)| data);
    let units = data.and_then(|data| serde_json::from_str(&format!("{data}]")).ok());
    units.ok_or_else(|| RunnerError::Timings(path.to_owned()))
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
