//! Curator benchmark on the host: its rates compared with an etcd that is called directly, and thousands of nodes that
//! call it.
//!
//! `node/curator/bench` does the measuring; here it is built like the node and run, and its records are collected.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{Records, ratio};
use crate::command::Cmd;
use crate::image::build_curator_host;
use crate::setup::{self, Needs};
use crate::ui::Ui;
use crate::{programs, target};

/// Numbers of simulated nodes, the small one first.
const CROWDS: [u32; 2] = [1000, 5000];
/// Seconds for which the simulated nodes change.
const SPAN: u32 = 20;
/// A file system in memory: the nodes measure the curator, and not the disk under its etcd.
const MEMORY: &str = "/dev/shm";

/// A line of the program's output.
#[derive(Deserialize)]
struct Line {
    name: String,
    unit: String,
    samples: Vec<f64>,
}

/// Measures `rounds` rounds of the rates, and each number of nodes once.
pub(super) fn measure(ui: &Ui, rounds: Option<u32>, records: &mut Records) -> Result<()> {
    setup::ensure(ui, Needs::NODE)?;
    let folder = target::folder("bench")?;
    let program = build_curator_host(ui, &folder.join("curator-host"))?;
    // The program finds it by itself.
    programs::etcd(ui)?;
    let rounds = rounds.unwrap_or(5).to_string();
    let task = ui.counted_task("measuring the curator", 1 + CROWDS.len() as u64);
    task.now("rates");
    let rates = Cmd::new(&program)
        .args(["rates", &rounds])
        .env("TMPDIR", &folder);
    take_in(&rates.output(ui)?, records)?;
    task.step();
    let mut cpu = Vec::new();
    for nodes in CROWDS {
        task.now(format!("{nodes} nodes"));
        let mut crowd = Cmd::new(&program).args(["crowd", &nodes.to_string(), &SPAN.to_string()]);
        if Path::new(MEMORY).is_dir() {
            crowd = crowd.env("TMPDIR", MEMORY);
        }
        let lines = take_in(&crowd.output(ui)?, records)?;
        let name = format!("curator.cpu_{nodes}");
        let line = lines.into_iter().find(|line| line.name == name);
        cpu.push(line.with_context(|| format!("no {name}"))?.samples);
        task.step();
    }
    task.done();
    if let [small, large] = &cpu[..] {
        records.add(
            "curator.cpu_growth_5000_over_1000",
            "ratio",
            &ratio(large, small),
        );
    }
    Ok(())
}

/// Adds the records of the program's output.
fn take_in(output: &str, records: &mut Records) -> Result<Vec<Line>> {
    let parse = |line: &str| -> Result<Line> {
        serde_json::from_str(line).with_context(|| format!("not a record: {line}"))
    };
    let lines: Vec<Line> = output.lines().map(parse).collect::<Result<_>>()?;
    for line in &lines {
        let known = ["1/s", "s", "ratio", "cores", "bytes", "boolean", "calls"];
        let unit = known.into_iter().find(|unit| *unit == line.unit);
        let unit = unit.with_context(|| format!("{}: unknown unit {}", line.name, line.unit))?;
        records.add(&line.name, unit, &line.samples);
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_records() {
        let mut records = Records::new("abc");
        let line = r#"{"name":"curator.cpu_1000","unit":"cores","samples":[0.25]}"#;
        let lines = take_in(line, &mut records).unwrap();
        assert_eq!(lines[0].samples, [0.25]);
        assert_eq!(records.all()[0].name, "curator.cpu_1000");
        assert!(take_in("progress", &mut records).is_err());
        assert!(
            take_in(
                r#"{"name":"x","unit":"furlongs","samples":[]}"#,
                &mut records
            )
            .is_err()
        );
    }
}
