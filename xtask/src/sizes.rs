//! `cargo xtask sizes`: the sizes of the image and its parts, compared with their budgets.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use hearth_lab::measure::records::{Record, Records};

use crate::image::{self, Artifacts, Flavour};
use crate::promises::{self, Bound};
use crate::ui::Ui;

/// `cargo xtask sizes`: show the sizes of the image's parts; fail if one is over its budget.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Print records as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let artifacts = image::ensure(ui, Flavour::Release)?;
    let mut records = promises::records(ui)?;
    record(&artifacts, &mut records)?;
    if args.json {
        print!("{}", records.json()?);
    } else {
        print!("{}", table(&records));
        println!("\nin the initramfs, uncompressed:");
        let mut contents = artifacts.contents;
        contents.sort_by_key(|(_, size)| std::cmp::Reverse(*size));
        for (path, size) in contents {
            println!("{size:>12}  {path}");
        }
    }
    let over = over_budget(&records);
    if !over.is_empty() {
        bail!("over budget: {}", over.join(", "));
    }
    Ok(())
}

/// The sizes as records.
pub(crate) fn record(artifacts: &Artifacts, records: &mut Records) -> Result<()> {
    let file = |path: &Path| {
        fs::metadata(path)
            .with_context(|| format!("cannot read the metadata of {}", path.display()))
    };
    let mut add = |name: &str, bytes: u64| records.add(name, "bytes", &[bytes as f64]);
    add("size.init_bytes", file(&artifacts.init)?.len());
    for (path, bytes) in &artifacts.contents {
        if path == "/usr/bin/etcd" {
            add("size.etcd_bytes", *bytes);
        }
    }
    add("size.kernel_bytes", file(&artifacts.kernel)?.len());
    add("size.initramfs_bytes", file(&artifacts.initramfs)?.len());
    add("size.uki_bytes", file(&artifacts.uki)?.len());
    add(
        "size.image_allocated_bytes",
        file(&artifacts.image)?.blocks() * 512,
    );
    Ok(())
}

fn table(records: &Records) -> String {
    let line = |record: &Record| {
        let allowed = Bound::of(&record.name).map(|bound| format!("  {bound}"));
        let allowed = allowed.unwrap_or_default();
        format!("{:>12}  {}{allowed}\n", record.max, record.name)
    };
    records.all().iter().map(line).collect()
}

/// Messages for records over their budgets.
fn over_budget(records: &Records) -> Vec<String> {
    let over = |record: &Record| {
        let bound = Bound::of(&record.name).filter(|bound| !bound.is_met(record.max))?;
        Some(format!(
            "{} is {}, expected {bound}",
            record.name, record.max
        ))
    };
    records.all().iter().filter_map(over).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_over_is_named() {
        let allowed = |name| Bound::of(name).unwrap();
        let Bound::AtMost(uki) = allowed("size.uki_bytes") else {
            panic!("a size has an upper bound");
        };
        let mut records = Records::new("r");
        records.add("size.init_bytes", "bytes", &[9_000_000.0]);
        records.add("size.uki_bytes", "bytes", &[uki + 1.0]);
        records.add("size.other_bytes", "bytes", &[1e12]);
        let over = format!("size.uki_bytes is {}, expected ≤ {uki}", uki + 1.0);
        assert_eq!(over_budget(&records), [over]);
        let line = format!(
            "     9000000  size.init_bytes  {}\n",
            allowed("size.init_bytes")
        );
        assert!(table(&records).contains(&line));
    }
}
