//! `cargo xtask link`: cables of the machines of `cargo xtask run`.
//!
//! What is wrong with a cable is wrong in both directions, and for everyone who talks to the node, this host too. It is
//! the switch that does it ([`hearth_qemu::switch`]), so it holds until it is mended or the cluster is down.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use hearth_lab::{machines, state};
use hearth_qemu::cluster;
use hearth_qemu::switch::Faults;

use crate::ui::Ui;

/// Pull a node's cable, or make it a bad one
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

/// What can be done.
#[derive(clap::Subcommand, Debug)]
enum Action {
    /// Let nothing pass; what was set before stays set
    Cut {
        /// Which node: node-2, or 2
        node: String,
    },
    /// Mend everything
    Restore {
        /// Which node: node-2, or 2
        node: String,
    },
    /// Lose a share of the frames
    Loss {
        /// Which node: node-2, or 2
        node: String,
        /// How many: 5%, or 0.05
        #[arg(value_parser = share)]
        share: f64,
    },
    /// Keep each frame for a while, one way
    Delay {
        /// Which node: node-2, or 2
        node: String,
        /// How long, in milliseconds
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

    /// The faults of the link, after this.
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
            bail!("nothing is running; `cargo xtask run` boots the cluster");
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
        true => "good".to_owned(),
        false => words.join(", "),
    }
}

/// `5%`, `0.05`.
fn share(text: &str) -> Result<f64> {
    let (number, of) = match text.strip_suffix('%') {
        Some(percent) => (percent.trim_end(), 100.0),
        None => (text, 1.0),
    };
    let number: f64 = number.parse().context("wanted 5%, or 0.05")?;
    let share = number / of;
    if !(0.0..=1.0).contains(&share) {
        bail!("wanted 0% to 100%, or 0 to 1");
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
        assert_eq!(words(&mended), "good");
    }
}
