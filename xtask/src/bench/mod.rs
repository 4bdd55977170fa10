//! `cargo xtask bench`: what Hearth promises in numbers, measured.
//!
//! A measurement is a [`Record`]: samples under a name, reduced to minimum, median and maximum. Everything is also written as JSON
//! (`--json`), so that revisions can be compared. Where two ways of doing the same are compared, the rounds alternate
//! between them and the ratio is taken within each round ([`ratio`]): what disturbs the machine disturbs both, and a
//! ratio of two separately found medians would not cancel it.

mod boot;
mod cluster;
mod curator;
mod image;
mod kubernetes;
mod promises;

pub use promises::Bound;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use hearth_image::output;
use hearth_qemu::accel;
use serde::Serialize;

use crate::command::{Interrupted, Interrupts};
use crate::image::{Flavour, ensure, revision};
use crate::run;
use crate::sizes;
use crate::ui::Ui;

/// `cargo xtask bench`: measure, print a table, write JSON.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// What to measure [default: everything]
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Write the records to this file, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Rounds per comparison [default: 7 images, 5 direct boots, 3 boots through UEFI, 3 clusters, 5 of the rates, 3 of Kubernetes]
    #[arg(long, visible_alias = "runs", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// What to boot on; the promises are made for tcg, which is the same everywhere
    #[arg(long, default_value_t = accel::Choice::Tcg, value_parser = run::accelerators())]
    accel: accel::Choice,
}

/// What can be measured.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Image assembly, beside other tools
    Image,
    /// Power-on to HOME, beside a bare init
    Boot,
    /// Power-on to three voters, beside one node
    Cluster,
    /// The curator on this machine, without any other: rates, and thousands of nodes
    Curator,
    /// Power-on to a pod that runs, beside a shell script; the memory of Hearth's own processes, the image's size
    Kubernetes,
}

/// One thing measured.
#[derive(Serialize, Debug, Clone, PartialEq)]
pub struct Record {
    /// Dotted, from the part to the quantity: `image.wall_ratio_genimage`.
    pub name: String,
    /// Number of samples.
    pub n: usize,
    /// The least of them.
    pub min: f64,
    /// The middle one; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The greatest of them.
    pub max: f64,
    /// `s`, `bytes`, `ratio`, or `boolean` (1 is yes).
    pub unit: &'static str,
    /// Of the source that was measured.
    pub revision: String,
}

/// Collects the records of one run.
#[derive(Debug)]
pub struct Records {
    revision: String,
    records: Vec<Record>,
}

impl Records {
    /// No records yet, of this checkout.
    pub fn new(ui: &Ui) -> Result<Records> {
        Ok(Records::of_revision(revision(ui)?))
    }

    /// No records yet, of a named revision.
    pub fn of_revision(revision: impl Into<String>) -> Records {
        Records {
            revision: revision.into(),
            records: Vec::new(),
        }
    }

    /// Adds what was measured. No samples, no record.
    pub fn add(&mut self, name: impl Into<String>, unit: &'static str, samples: &[f64]) {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else {
            return;
        };
        self.records.push(Record {
            name: name.into(),
            n: sorted.len(),
            min,
            median: median(&sorted),
            max,
            unit,
            revision: self.revision.clone(),
        });
    }

    /// All of them, in the order they came.
    pub fn all(&self) -> &[Record] {
        &self.records
    }

    /// As JSON, an array.
    pub fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(&self.records)? + "\n")
    }

    /// As a table for people, with what is promised and whether the median keeps it.
    pub fn table(&self) -> String {
        let heading = ["", "n", "min", "median", "max", "unit", "promised"].map(str::to_owned);
        let rows = self.records.iter().map(|record| {
            let number = |value| number(value, record.unit);
            [
                record.name.clone(),
                record.n.to_string(),
                number(record.min),
                number(record.median),
                number(record.max),
                record.unit.to_owned(),
                verdict(record),
            ]
        });
        let rows: Vec<[String; 7]> = std::iter::once(heading).chain(rows).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..6).map(width).collect();
        let line = |row: &[String; 7]| {
            let [name, n, min, median, max, unit, promised] = row;
            let line = format!(
                "{name:<0$}  {n:>1$}  {min:>2$}  {median:>3$}  {max:>4$}  {unit:<5$}  {promised}\n",
                widths[0], widths[1], widths[2], widths[3], widths[4], widths[5]
            );
            line.trim_end().to_owned() + "\n"
        };
        rows.iter().map(line).collect()
    }
}

/// What is promised of a record, and how it stands with that; empty if nothing is.
fn verdict(record: &Record) -> String {
    let Some(bound) = Bound::of(&record.name) else {
        return String::new();
    };
    let word = match bound.is_met(record.median) {
        true => "met",
        false => "NOT met",
    };
    format!("{bound}  {word}")
}

/// Counts are whole; the rest has three digits behind the point.
fn number(value: f64, unit: &str) -> String {
    if matches!(unit, "bytes" | "boolean") {
        format!("{value:.0}")
    } else {
        format!("{value:.3}")
    }
}

fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        (sorted[middle - 1] + sorted[middle]) / 2.0
    }
}

/// Round by round, how many times the second the first is.
pub fn ratio(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter()
        .zip(theirs)
        .map(|(ours, theirs)| ours / theirs)
        .collect()
}

/// Runs the task. It fails where something cannot be measured, never by what the measurement says.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let mut records = Records::new(ui)?;
    let node = ensure(ui, Flavour::Release)?;
    let wanted = |part| args.parts.is_empty() || args.parts.contains(&part);
    if wanted(Part::Image) {
        image::measure(ui, &node, args.rounds, &mut records)?;
    }
    if wanted(Part::Boot) {
        boot::measure(ui, &node, args.rounds, args.accel, &mut records)?;
    }
    if wanted(Part::Cluster) {
        cluster::measure(ui, &node, args.rounds, args.accel, &mut records)?;
    }
    if wanted(Part::Curator) {
        curator::measure(ui, args.rounds, &mut records)?;
    }
    if wanted(Part::Kubernetes) {
        kubernetes::measure(ui, args.rounds, args.accel, &mut records)?;
    }
    sizes::record(&node, &mut records)?;
    print!("{}", records.table());
    if let Some(path) = &args.json {
        output::write(path, records.json()?.as_bytes())?;
    }
    Ok(())
}

/// Measures machines, which end with it, until it is done or somebody has had enough.
fn until_interrupted(measuring: impl Future<Output = Result<()>>) -> Result<()> {
    let interrupts = Interrupts::take();
    tokio::runtime::Runtime::new()?.block_on(async {
        tokio::select! {
            biased;
            () = interrupts.come(1) => Err(anyhow!(Interrupted)),
            done = measuring => done,
        }
    })
}

/// Removes what the last round has left.
fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_reduced() {
        let mut records = Records::of_revision("abc");
        records.add("odd", "s", &[3.0, 1.0, 2.0]);
        records.add("even", "s", &[4.0, 1.0, 2.0, 3.0]);
        records.add("none", "s", &[]);
        let reduced: Vec<_> = records
            .all()
            .iter()
            .map(|r| (r.n, r.min, r.median, r.max))
            .collect();
        assert_eq!(reduced, [(3, 1.0, 2.0, 3.0), (4, 1.0, 2.5, 4.0)]);
    }

    #[test]
    fn ratios_are_of_pairs() {
        // The medians of both are 2; the machine was slow in different rounds.
        assert_eq!(ratio(&[1.0, 2.0, 9.0], &[2.0, 1.0, 9.0]), [0.5, 2.0, 1.0]);
    }

    #[test]
    fn json_has_the_promised_fields() {
        let mut records = Records::of_revision("abc");
        records.add("size.init_bytes", "bytes", &[7.0]);
        let value: serde_json::Value = serde_json::from_str(&records.json().unwrap()).unwrap();
        assert_eq!(
            value,
            serde_json::json!([{
                "name": "size.init_bytes", "n": 1, "min": 7.0, "median": 7.0, "max": 7.0,
                "unit": "bytes", "revision": "abc"
            }])
        );
    }

    #[test]
    fn the_table_is_aligned() {
        let mut records = Records::of_revision("abc");
        records.add("a", "bytes", &[1_000_000.0]);
        records.add("size.uki_bytes", "bytes", &[1_000_000.0]);
        records.add("boot.uefi.home_ratio_bare", "ratio", &[1.0, 1.4, 2.0]);
        assert_eq!(
            records.table(),
            "                           n      min   median      max  unit   promised\n\
             a                          1  1000000  1000000  1000000  bytes\n\
             size.uki_bytes             1  1000000  1000000  1000000  bytes  ≤ 20000000  met\n\
             boot.uefi.home_ratio_bare  3    1.000    1.400    2.000  ratio  ≤ 1.3  NOT met\n"
        );
    }
}
