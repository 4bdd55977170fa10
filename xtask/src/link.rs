//! `cargo xtask link`: network links of the machines of `cargo xtask run`.
//!
//! A fault of a link applies to both directions, and to all peers of the node, including this host. It is implemented
//! by the switch ([`hearth_qemu::switch`]), so it remains until it is reset or the cluster ends.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use hearth_lab::{machines, state};
use hearth_qemu::cluster;
use hearth_qemu::switch::Faults;

use crate::ui::Ui;

/// Cut or degrade a node's network link
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

/// The commands.
#[derive(clap::Subcommand, Debug)]
enum Action {
    /// Drop all frames; other faults remain set
    Cut {
        /// Node, such as node-2 or 2
        node: String,
    },
    /// Reset all faults
    Restore {
        /// Node, such as node-2 or 2
        node: String,
    },
    /// Drop a share of the frames
    Loss {
        /// Node, such as node-2 or 2
        node: String,
        /// Share of dropped frames, such as 5% or 0.05
        #[arg(value_parser = share)]
        share: f64,
    },
    /// Delay each frame, in each direction
    Delay {
        /// Node, such as node-2 or 2
        node: String,
        /// Delay in milliseconds
        #[arg(value_name = "MS")]
        milliseconds: u64,
    },
}

impl Action {
    fn node(&self) -> &str {
        match self {
            Action::Cut { node }
            | Action::Restore { node }
            | Action::Loss { node, .. }
            | Action::Delay { node, .. } => node,
        }
    }

    /// The faults of the link after this command.
    fn apply(&self, before: Faults) -> Faults {
        match *self {
            Action::Cut { .. } => Faults {
                cut: true,
                ..before
            },
            Action::Restore { .. } => Faults::default(),
            Action::Loss { share, .. } => Faults {
                loss: share,
                ..before
            },
            Action::Delay { milliseconds, .. } => Faults {
                delay: Duration::from_millis(milliseconds),
                ..before
            },
        }
    }
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    let folder = crate::run::folder()?;
    let record = state::record(&folder)?;
    let name = machines::name(machines::number(args.action.node(), &record)?);
    tokio::runtime::Runtime::new()?.block_on(async {
        let Some(network) = cluster::network(&folder).await? else {
            bail!("no cluster is running; boot it with `cargo xtask run`");
        };
        let before = network.faults(&name).await?;
        let after = args.action.apply(before);
        network.set_faults(&name, after).await?;
        ui.say(format_args!("link of {name}: {}", words(&after)));
        Ok(())
    })
}

fn words(faults: &Faults) -> String {
    let mut words = Vec::new();
    if faults.cut {
        words.push("cut".to_owned());
    }
    if faults.loss > 0.0 {
        words.push(format!("loses {} % of the frames", faults.loss * 100.0));
    }
    if !faults.delay.is_zero() {
        words.push(format!("delays by {} ms", faults.delay.as_millis()));
    }
    match words.is_empty() {
        true => "no faults".to_owned(),
        false => words.join(", "),
    }
}

/// Parses `5%` or `0.05`.
fn share(text: &str) -> Result<f64> {
    let (number, of) = match text.strip_suffix('%') {
        Some(percent) => (percent.trim_end(), 100.0),
        None => (text, 1.0),
    };
    let number: f64 = number
        .parse()
        .context("expected a share such as 5% or 0.05")?;
    let share = number / of;
    if !(0.0..=1.0).contains(&share) {
        bail!("expected a share from 0% to 100%, or 0 to 1");
    }
    Ok(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percent_or_parts() {
        assert_eq!(share("5%").unwrap(), 0.05);
        assert_eq!(share("0.25").unwrap(), 0.25);
        assert_eq!(share("100 %").unwrap(), 1.0);
        for wrong in ["", "x", "101%", "-1", "1.5", "NaN"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn faults_add_up_until_all_is_mended() {
        let node = || "2".to_owned();
        let delay = Action::Delay {
            node: node(),
            milliseconds: 40,
        };
        let faults = Action::Cut { node: node() }.apply(delay.apply(Faults::default()));
        assert_eq!(words(&faults), "cut, delays by 40 ms");
        let mended = Action::Restore { node: node() }.apply(faults);
        assert_eq!(words(&mended), "no faults");
    }
}
