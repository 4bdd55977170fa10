//! `cargo xtask bench`: measures the numbers that Hearth promises.
//!
//! A measurement is a [`Record`] of [`hearth_lab::measure`], which measures machines. All records are also written as
//! JSON (`--json`), so that revisions can be compared. This module decides what is measured, in which order, and what
//! is shown.

mod boot;
mod cluster;
mod curator;
mod failover;
mod image;
mod kubernetes;
mod network;
mod storage;

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use hearth_image::output;
use hearth_lab::measure::records::{Record, Records, ratio};
use hearth_qemu::accel;

use crate::command::{Interrupted, Interrupts};
use crate::image::{Flavour, ensure};
use crate::promises::{Bound, records};
use crate::ui::Ui;
use crate::{run, sizes};

/// `cargo xtask bench`: measure, print a table, write JSON.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Benchmarks to run [default: all]
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Also write the records to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Rounds per comparison [default: 7 images, 5 direct boots, 3 boots through UEFI, 3 clusters, 5 of the rates, 20 of sealing, 3 of starts, 9 of the network, 3 of Kubernetes, 1 of failover]
    #[arg(long, visible_alias = "runs", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Accelerator; the promises apply to tcg, which behaves the same everywhere
    #[arg(long, default_value_t = accel::Choice::Tcg, value_parser = run::accelerators())]
    accel: accel::Choice,
}

/// The benchmarks.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Image assembly, compared with other tools
    Image,
    /// Power-on to HOME, compared with a bare init
    Boot,
    /// Power-on to three voters, compared with one node
    Cluster,
    /// The curator on this host, without machines: rates, and thousands of nodes
    Curator,
    /// Sealing by a TPM, compared with clevis and systemd; starts of encrypted nodes, compared with insecure ones
    Storage,
    /// Throughput of the machines' network to the host, compared with QEMU's own
    Network,
    /// Power-on to a running pod, and a pod whose image is pulled, compared with a shell script; memory of Hearth's own
    /// processes, image size
    Kubernetes,
    /// The loss of the controller with the virtual address, compared with the lease by which it has it
    Failover,
}

/// As a table, with the promise and whether the median keeps it.
fn table(records: &[Record]) -> String {
    let heading = ["", "n", "min", "median", "max", "unit", "promised"].map(str::to_owned);
    let rows = records.iter().map(|record| {
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

/// The promise for a record, and whether it is met; empty if there is none.
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

/// Counts are integers; other numbers have three decimal places.
fn number(value: f64, unit: &str) -> String {
    if matches!(unit, "bytes" | "bytes/s" | "boolean") {
        format!("{value:.0}")
    } else {
        format!("{value:.3}")
    }
}

/// Runs the task. It fails if something cannot be measured, never because of a result.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let mut records = records(ui)?;
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
    if wanted(Part::Storage) {
        storage::measure(ui, &node, args.rounds, args.accel, &mut records)?;
    }
    if wanted(Part::Network) {
        network::measure(ui, args.rounds, args.accel, &mut records)?;
    }
    if wanted(Part::Kubernetes) {
        kubernetes::measure(ui, args.rounds, args.accel, &mut records)?;
    }
    if wanted(Part::Failover) {
        failover::measure(ui, args.rounds, args.accel, &mut records)?;
    }
    sizes::record(&node, &mut records)?;
    print!("{}", table(records.all()));
    if let Some(path) = &args.json {
        output::write(path, records.json()?.as_bytes())?;
    }
    Ok(())
}

/// Measures machines, which end with it, until it is done or interrupted.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_aligned() {
        let mut records = Records::new("abc");
        records.add("a", "bytes", &[1_000_000.0]);
        records.add("size.uki_bytes", "bytes", &[1_000_000.0]);
        records.add("boot.uefi.home_ratio_bare", "ratio", &[1.0, 1.4, 2.0]);
        assert_eq!(
            table(records.all()),
            "                           n      min   median      max  unit   promised\n\
             a                          1  1000000  1000000  1000000  bytes\n\
             size.uki_bytes             1  1000000  1000000  1000000  bytes  ≤ 27000000  met\n\
             boot.uefi.home_ratio_bare  3    1.000    1.400    2.000  ratio  ≤ 1.15  NOT met\n"
        );
    }
}
