//! `cargo xtask run`: nodes, from source to a healthy cluster.
//!
//! Everything that is kept from one run to the next is in [`state`]; what the machines are made of in [`machines`], what
//! they say in [`fleet`] and [`display`]. What an owner does with the first node is in [`owner`], how the others are taken
//! in is decided in [`crate::formation`], and [`form`] does it; [`table`] shows the cluster that is complete. Here stands
//! the order of it all, and what becomes of the machines on every way out: in the foreground they are powered off by the
//! first interrupt and killed by the second; on any failure they are killed with their handles; only a cluster that is
//! complete is ever left running (`--detach`).

mod display;
pub mod fleet;
mod form;
pub mod kubernetes;
pub mod machines;
mod owner;
pub mod state;
mod table;
mod watch;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use hearth_api::names;
use hearth_qemu::accel::{self, Chosen};
use hearth_qemu::phases::Phase;
use hearth_qemu::vm::{Cause, Lifetime};

use crate::command::{Interrupted, Interrupts, is_interrupt};
use crate::formation::VOTERS;
use crate::hearthctl;
use crate::setup::{self, Needs};
use crate::target::shown;
use crate::ui::Ui;
use fleet::{Fleet, News};
use machines::Workshop;
use state::{Founding, Make, State, Storage, Wish};

/// Build everything, boot a node and watch it come home; or a cluster of several
///
/// The nodes and their cluster are kept: the next run boots them again, and `--nodes` with a greater number adds some.
/// Ctrl-C powers them off.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Start over: the cluster that is there is lost
    #[arg(long)]
    fresh: bool,
    /// How many nodes; the first founds the cluster, the others register with it and are approved by the key that their
    /// own console shows, and the first three are consensus members [default: as many as there are, or 1]
    #[arg(long, value_name = "N", conflicts_with = "parameters", value_parser = clap::value_parser!(u16).range(1..=32))]
    nodes: Option<u16>,
    /// Start the last K nodes and leave their approval to you
    #[arg(long, value_name = "K", requires = "nodes", default_value_t = 0)]
    join_later: u16,
    /// How a new cluster protects its data [default: insecure]
    #[arg(long, value_enum, conflicts_with = "parameters")]
    storage: Option<Storage>,
    /// With Kubernetes: every node is a worker, the first one or three are controllers; waits until all of them are Ready
    #[arg(long, conflicts_with = "parameters")]
    kubernetes: bool,
    /// A Kubernetes of your own: a folder made like the one that `cargo xtask kubernetes` prints
    #[arg(long, value_name = "DIR", requires = "kubernetes")]
    bundle: Option<PathBuf>,
    /// Let QEMU load the kernel itself, without firmware; faster
    #[arg(long)]
    direct: bool,
    /// Each node's memory [default: 512, with Kubernetes 2048]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..))]
    memory: Option<u32>,
    /// Each node's CPUs
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// What to run on; auto takes KVM where it truly works
    #[arg(long, default_value_t = accel::Choice::Auto, value_parser = accelerators())]
    accel: accel::Choice,
    /// Leave the nodes running in the background once they are HOME
    #[arg(long)]
    detach: bool,
    /// Parameters of your own for the node (serialised NodeParameters)
    #[arg(long, value_name = "FILE")]
    parameters: Option<PathBuf>,
    /// With the debug service, which lets anyone who reaches a node look into it
    #[arg(long)]
    debug: bool,
    /// Size of each disk of a new cluster, such as 8G [default: 4G]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    disk: Option<u64>,
    /// How long a node may take to be HOME and answer; a cluster of several gets as much for each
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
}

/// Parses `--accel`.
pub fn accelerators() -> impl TypedValueParser<Value = accel::Choice> {
    PossibleValuesParser::new(["auto", "kvm", "tcg"]).try_map(|word| word.parse::<accel::Choice>())
}

/// Runs the task.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let wish = args.wish()?;
    let state = State::open()?;
    let new = state.check(&wish)?;
    setup::ensure(ui, Needs::NODE | Needs::KERNEL | Needs::IMAGE | Needs::RUN)?;
    let accel = accel::choose(args.accel)?;
    let make = args.make(state.make(&wish)?.as_ref());
    let bundle = match make.kubernetes {
        true => Some(crate::kubernetes::ensure(ui, make.bundle.as_deref())?),
        false => None,
    };
    let kubectl = bundle.as_ref().map(kubernetes::kubectl).transpose()?;
    let workshop = Workshop::open(ui, &make, bundle.as_ref())?;
    let hearthctl = hearthctl::build(ui)?;
    let (mut founding, parameters) = state.prepare(&wish)?;
    if args.join_later >= founding.nodes {
        bail!(
            "--join-later {}: this cluster has {} nodes, and one of them founds it",
            args.join_later,
            founding.nodes
        );
    }
    founding.make = Some(make);
    founding.built = Some(workshop.built().clone());
    state.save(&founding)?;
    explain(ui, new, &founding);
    let run = Run {
        ui,
        args,
        state: &state,
        accel,
        hearthctl,
        interrupts: Interrupts::take(),
        parameters,
        memory_mib: workshop.memory_mib(),
        kubectl,
    };
    tokio::runtime::Runtime::new()?.block_on(run.boot(workshop, founding))
}

impl Args {
    fn wish(&self) -> Result<Wish> {
        let read = |path: &PathBuf| {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
        };
        Ok(Wish {
            fresh: self.fresh,
            storage: self.storage,
            parameters: self.parameters.as_ref().map(read).transpose()?,
            disk_bytes: self.disk,
            nodes: self.nodes,
            kubernetes: self.kubernetes,
        })
    }

    /// What the machines are made of, after what the last run's were: a cluster that has Kubernetes keeps it.
    fn make(&self, last: Option<&Make>) -> Make {
        let last = last.filter(|make| make.kubernetes);
        let kubernetes = self.kubernetes || last.is_some();
        let usual = if kubernetes { 2048 } else { 512 };
        Make {
            cpus: self.cpus,
            memory_mib: self.memory.unwrap_or(usual),
            direct: self.direct,
            debug: self.debug,
            accel: self.accel.to_string(),
            kubernetes,
            bundle: self
                .bundle
                .clone()
                .or_else(|| last.and_then(|make| make.bundle.clone())),
        }
    }
}

/// What the user should know of the cluster before it boots, in one line.
fn explain(ui: &Ui, new: bool, founding: &Founding) {
    let what = match new {
        true => "a new cluster",
        false => "the last run's cluster",
    };
    let nodes = match founding.nodes {
        1 => String::new(),
        nodes => format!(" of {nodes} nodes"),
    };
    let storage = match founding.storage {
        Some(Storage::Insecure) => "storage insecure (encrypted ones cannot cold-start yet)",
        Some(Storage::Encrypted) => {
            "storage encrypted (it cannot cold-start yet: lost once all of it is down)"
        }
        None => "parameters of your own",
    };
    ui.say(format_args!("{what}{nodes}; {storage}"));
}

/// One run, once everything is built.
struct Run<'a> {
    ui: &'a Ui,
    args: &'a Args,
    state: &'a State,
    accel: Chosen,
    hearthctl: PathBuf,
    interrupts: Interrupts,
    /// Of the first node.
    parameters: Vec<u8>,
    /// Of each machine.
    memory_mib: u32,
    /// Where there is Kubernetes to be asked.
    kubectl: Option<PathBuf>,
}

impl Run<'_> {
    async fn boot(&self, workshop: Workshop, mut founding: Founding) -> Result<()> {
        let lifetime = match self.args.detach {
            true => Lifetime::Detachable,
            false => Lifetime::Tied,
        };
        let fleet = Fleet::open(self.ui, self.state, &founding, workshop, lifetime);
        let mut fleet = fleet.await?;
        let home = tokio::select! {
            biased;
            () = self.interrupts.come(1) => Err(anyhow!(Interrupted)),
            home = self.complete(&mut fleet, &mut founding) => home,
        };
        fleet.finish();
        if let Err(error) = home {
            if is_interrupt(&error) {
                fleet.power_off(&self.interrupts).await?;
            }
            // Otherwise they are killed when their handles go.
            return Err(error);
        }
        self.tell(&fleet, &founding)?;
        if self.args.detach {
            return fleet.detach();
        }
        let ended = tokio::select! {
            biased;
            () = self.interrupts.come(1) => None,
            ended = self.stay(&mut fleet, &mut founding) => Some(ended),
        };
        match ended {
            None => fleet.power_off(&self.interrupts).await,
            Some(ended) => ended,
        }
    }

    /// Until the cluster is what the user asked for, with Kubernetes or without.
    async fn complete(&self, fleet: &mut Fleet, founding: &mut Founding) -> Result<()> {
        self.form(fleet, founding).await?;
        match &self.kubectl {
            Some(kubectl) => self.kubernetes(fleet, founding, kubectl).await,
            None => Ok(()),
        }
    }

    /// Which machine starts, and how.
    fn announce(&self, name: &str) {
        let firmware = match self.args.direct {
            true => "direct boot",
            false => "UEFI",
        };
        self.ui.say(format_args!(
            "{name} starts: {} CPUs, {} MiB, {firmware}, {}",
            self.args.cpus, self.memory_mib, self.accel
        ));
    }

    /// Where everything is, and what to type next.
    fn tell(&self, fleet: &Fleet, founding: &Founding) -> Result<()> {
        use std::io::Write;
        let mut out = std::io::stdout().lock();
        let started = fleet.nodes.iter().enumerate().filter(|(_, node)| node.on);
        for (index, node) in started {
            let (name, vm) = (&node.name, fleet.vm(index)?);
            let home = node.display.as_ref();
            let home = home.and_then(|display| display.timeline().get(Phase::Home));
            match home {
                Some(home) => {
                    let after = home.at.as_secs_f64();
                    writeln!(out, "\n{name} is HOME, {after:.1} s after power-on\n")?;
                }
                None => writeln!(out, "\n{name} waits for your approval\n")?,
            }
            for (port, what) in [
                (names::PORT_CURATOR, "curator"),
                (names::PORT_NODE_MANAGEMENT, "node"),
                (names::PORT_DEBUG, "debug"),
            ] {
                if let Some(address) = vm.forwarded(port) {
                    writeln!(out, "  {what:<9} {address}")?;
                }
            }
            let console = vm.run_dir().serial_log();
            writeln!(out, "  {:<9} {}", "console", shown(&console))?;
        }
        if founding.nodes > 1 {
            writeln!(out)?;
        }
        writeln!(out, "  {:<9} {}\n", "all files", shown(self.state.path()))?;
        if let Some(kubectl) = &self.kubectl {
            let kubectl = kubernetes::line(self.state, kubectl);
            writeln!(out, "  {kubectl} get pods --all-namespaces")?;
            writeln!(
                out,
                "  {kubectl} run probe --image=hearth.local/probe:1 --image-pull-policy=Never\n"
            )?;
        }
        for (command, what) in self.next_commands(founding) {
            writeln!(out, "  {command:<38} {what}")?;
        }
        Ok(())
    }

    fn next_commands(&self, founding: &Founding) -> Vec<(&'static str, &'static str)> {
        let mut commands = Vec::new();
        match founding.storage {
            Some(_) => commands.push(("cargo xtask ctl -- node list", "list the cluster's nodes")),
            None => commands.push((
                "cargo xtask ctl -- cluster take-ownership --help",
                "with the owner key of your parameters",
            )),
        }
        if founding.nodes > 1 {
            commands.push((
                "cargo xtask power cut node-2",
                "pull a plug; power start node-2",
            ));
            commands.push((
                "cargo xtask link cut node-2",
                "pull a cable; link restore node-2",
            ));
        }
        commands.push(match (self.args.detach, founding.nodes) {
            (true, 1) => ("cargo xtask stop", "power it off"),
            (true, _) => ("cargo xtask stop", "power them off"),
            (false, 1) => ("Ctrl-C", "power it off"),
            (false, _) => ("Ctrl-C", "power them off"),
        });
        commands
    }

    /// In the foreground, until the machines have ended.
    async fn stay(&self, fleet: &mut Fleet, founding: &mut Founding) -> Result<()> {
        if fleet.nodes.len() > 1 {
            return self.watch(fleet, founding).await;
        }
        loop {
            let (index, news) = fleet.next().await?;
            let name = &fleet.nodes[index].name;
            match news {
                News::Line(Some(trouble)) => self.ui.say(format_args!("{name}: {trouble}")),
                News::Line(None) => {}
                News::Ended(exit) if fleet.went_down(index, &exit) => {
                    self.ui.say(format_args!("{name} is down"));
                    return Ok(());
                }
                News::Ended(exit) if exit.cause == Cause::PowerCut => return Ok(()),
                News::Ended(exit) => {
                    bail!("{name} ended: {exit}\n\n{}", fleet.vm(index)?.tail())
                }
            }
        }
    }

    /// As long as its parts together may take.
    fn bound(&self, founding: &Founding) -> Duration {
        Duration::from_secs(self.args.timeout) * founding.nodes.into()
    }
}

/// Why a node is not home, with its last words.
fn failure(fleet: &Fleet, index: usize, why: impl std::fmt::Display) -> anyhow::Error {
    let name = &fleet.nodes[index].name;
    let words = match fleet.vm(index) {
        Ok(vm) => format!("{}\n\nits files: {}", vm.tail(), shown(vm.run_dir().path())),
        Err(error) => error.to_string(),
    };
    anyhow!(
        "{name} did not come home: {why}\n\n{words}\n`cargo xtask run` tries again from where it was, --fresh starts over"
    )
}

/// A number of bytes: `8G`, `512M`, `4294967296`.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || "wanted a number of bytes, or one with K, M, G or T".to_owned();
    let (number, shift) = match text.char_indices().next_back() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => {
            let shift = match unit.to_ascii_uppercase() {
                'K' => 10,
                'M' => 20,
                'G' => 30,
                'T' => 40,
                _ => return Err(wrong()),
            };
            (&text[..at], shift)
        }
        _ => (text, 0),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number
        .checked_mul(1 << shift)
        .filter(|bytes| *bytes > 0 && bytes % 512 == 0)
        .ok_or_else(|| "wanted whole sectors of 512 bytes, at least one".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("4G"), Ok(4 << 30));
        assert_eq!(size("700m"), Ok(700 << 20));
        assert_eq!(size("1024"), Ok(1024));
        for wrong in ["", "G", "4X", "4GB", "-1G", "0", "513", "99999999T"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
