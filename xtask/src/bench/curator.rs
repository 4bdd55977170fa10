//! Curator benchmark on the host: its rates compared with an etcd that is called directly, and thousands of nodes that
//! call it.
//!
//! `node/curator/bench` does the measuring; here it is built like the node and run, and its records are collected.

use std::path::Path;

use anyhow::{Context, Result};

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

/// Measures `rounds` rounds of the rates, and each number of nodes once.
pub(super) fn measure(ui: &Ui, rounds: Option<u32>, records: &mut Records) -> Result<()> {
    setup::ensure(ui, Needs::NODE)?;
    let folder = target::folder("bench")?;
    let program = build_curator_host(ui, &folder.join("curator-host"))?;
    // The program finds it by itself.
    programs::etcd(ui)?;
    let rounds = rounds.unwrap_or(5).to_string();
    let task = ui.counted_task("measuring the curator", 2 + CROWDS.len() as u64);
    task.now("rates");
    let rates = Cmd::new(&program)
        .args(["rates", &rounds])
        .env("TMPDIR", &folder);
    records.take_in(&rates.output(ui)?)?;
    task.step();
    task.now("a hostile node");
    let hostile = Cmd::new(&program)
        .args(["hostile", &rounds])
        .env("TMPDIR", &folder);
    records.take_in(&hostile.output(ui)?)?;
    task.step();
    let mut cpu = Vec::new();
    for nodes in CROWDS {
        task.now(format!("{nodes} nodes"));
        let mut crowd = Cmd::new(&program).args(["crowd", &nodes.to_string(), &SPAN.to_string()]);
        if Path::new(MEMORY).is_dir() {
            crowd = crowd.env("TMPDIR", MEMORY);
        }
        let lines = records.take_in(&crowd.output(ui)?)?;
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
