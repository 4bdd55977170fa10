//! `cargo xtask run`: boots nodes, from source to a healthy cluster.
//!
//! `hearth_lab` does the work: it keeps the cluster from one run to the next, forms it and watches it; [`display`] and
//! [`table`] show its events. This module decides on the order, and on what happens to the machines at every exit: in
//! the foreground the first interrupt powers them off and the second kills them; on any failure they are killed with
//! their handles; only a complete cluster is ever left running (`--detach`).
//!
//! The state is in `hearth/run/` in the target folder, or in the folder that the environment names ([`FOLDER`]): tests
//! of this command do not touch the developer's own cluster.

mod display;
mod table;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use hearth_api::names;
use hearth_lab::fleet::{Machines, PoweredOff};
use hearth_lab::kubernetes::kubeconfig;
use hearth_lab::machines::Blueprint;
use hearth_lab::manifests;
use hearth_lab::record::{self, Artifacts, ClusterRecord, Conflict, MachineConfig, RunOptions};
use hearth_lab::session::Session;
use hearth_lab::state::State;
use hearth_qemu::accel::{self, Chosen};
use hearth_qemu::command::Rtc;
use hearth_qemu::hardware::{Card, DiskBus};
use hearth_qemu::phases::Phase;
use hearth_qemu::vm::Lifetime;
use hearth_tpm::images::TrustedImage;

use crate::bundle::{self, Bundle};
use crate::command::{Interrupted, Interrupts, find_program, is_interrupt};
use crate::image::{self, Flavour};
use crate::setup::{self, Needs};
use crate::target::{self, shown};
use crate::ui::Ui;
use crate::{hearthctl, program};
use display::Display;

/// The environment variable with the state folder, if it is not in the target folder.
const FOLDER: &str = "HEARTH_RUN_FOLDER";

/// How the data partition is protected.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// dm-crypt: a node that reboots gets its key from the others; a cluster that is completely powered off is unlocked by
    /// its owner, which the next run does
    Encrypted,
    /// dm-crypt: each node's TPM opens its own data partition; needs --tpm
    Tpm,
    /// Unencrypted
    Insecure,
}

impl From<Storage> for record::Storage {
    fn from(storage: Storage) -> record::Storage {
        match storage {
            Storage::Insecure => record::Storage::Insecure,
            Storage::Encrypted => record::Storage::Encrypted,
            Storage::Tpm => record::Storage::Tpm,
        }
    }
}

/// Build everything and boot a cluster of one or more nodes
///
/// The cluster is kept: the next run boots it again, and a greater `--nodes` adds nodes. Ctrl-C powers the nodes off.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Start over; deletes the existing cluster
    #[arg(long)]
    fresh: bool,
    /// Number of nodes; the first founds the cluster, the others register with it and are approved by the key on their
    /// own console, and the first three are consensus members [default: as many as there are, or 1]
    #[arg(long, value_name = "N", conflicts_with = "parameters", value_parser = clap::value_parser!(u16).range(1..=32))]
    nodes: Option<u16>,
    /// Start the last K nodes, but leave their approval to you
    #[arg(long, value_name = "K", requires = "nodes", default_value_t = 0)]
    join_later: u16,
    /// Storage protection of a new cluster [default: encrypted, with --tpm tpm]
    #[arg(long, value_enum, conflicts_with = "parameters")]
    storage: Option<Storage>,
    /// Leave it to you to unlock an encrypted cluster that was powered off, and print how
    #[arg(long, conflicts_with_all = ["fresh", "parameters"])]
    no_unlock: bool,
    /// Include Kubernetes: every node is a worker, the first one or three are controllers; waits until all of them are
    /// Ready
    #[arg(long, conflicts_with = "parameters")]
    kubernetes: bool,
    /// Give a new cluster IPv6 besides IPv4: its pods and services get ranges of both, and its nodes static addresses of the
    /// emulated network's subnets
    #[arg(long, conflicts_with = "parameters")]
    dual_stack: bool,
    /// Use this Kubernetes bundle: a folder like the one that `cargo xtask bundle` prints
    #[arg(long, value_name = "DIR", requires = "kubernetes")]
    bundle: Option<PathBuf>,
    /// Kubernetes objects that a new cluster gets, in YAML or JSON; may be given several times
    #[arg(long = "manifest", value_name = "FILE", requires = "kubernetes")]
    manifests: Vec<PathBuf>,
    /// Let QEMU load the kernel directly, without firmware; faster
    #[arg(long)]
    direct: bool,
    /// Memory of each node in MiB [default: 512, with Kubernetes 2048]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..))]
    memory: Option<u32>,
    /// CPUs of each node
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// Accelerator; auto uses KVM if it really works
    #[arg(long, default_value_t = accel::Choice::Auto, value_parser = accelerators())]
    accel: accel::Choice,
    /// How the disk of each node is attached
    #[arg(long, value_name = "BUS", default_value_t = DiskBus::Virtio, value_parser = disk_buses())]
    disk_bus: DiskBus,
    /// Kind of each node's network card
    #[arg(long, value_name = "CARD", default_value_t = Card::Virtio, value_parser = cards())]
    card: Card,
    /// Date and time of each node's hardware clock when it is powered on, in UTC, such as 2038-01-19T03:14:00 [default: the
    /// host's]
    #[arg(long, value_name = "DATE")]
    clock: Option<Rtc>,
    /// Give each node a TPM 2.0 (swtpm), into which the firmware measures what it boots; a cluster keeps it
    #[arg(long)]
    tpm: bool,
    /// Without a way out: the nodes reach each other, but no other networks. By default this host translates their TCP,
    /// UDP, DNS and pings to sockets of its own, so they reach everything that you reach from here except its loopback, and
    /// use the proxy that HTTPS_PROXY, HTTP_PROXY or ALL_PROXY names
    #[arg(long)]
    offline: bool,
    /// Leave the nodes running in the background once they are HOME
    #[arg(long)]
    detach: bool,
    /// Use these node parameters (a serialised NodeParameters)
    #[arg(long, value_name = "FILE")]
    parameters: Option<PathBuf>,
    /// Include the debug service, which gives unauthenticated access to a node's internals
    #[arg(long)]
    debug: bool,
    /// Size of each disk of a new cluster, such as 8G [default: 4G]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    disk: Option<u64>,
    /// Timeout for each node to become HOME and answer
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
}

/// Parses `--accel`.
pub(crate) fn accelerators() -> impl TypedValueParser<Value = accel::Choice> {
    PossibleValuesParser::new(["auto", "kvm", "tcg"]).try_map(|word| word.parse::<accel::Choice>())
}

fn disk_buses() -> impl TypedValueParser<Value = DiskBus> {
    PossibleValuesParser::new(DiskBus::ALL.map(DiskBus::word))
        .try_map(|word| word.parse::<DiskBus>())
}

fn cards() -> impl TypedValueParser<Value = Card> {
    PossibleValuesParser::new(Card::ALL.map(Card::word)).try_map(|word| word.parse::<Card>())
}

/// The state folder; created if absent.
pub(crate) fn folder() -> Result<PathBuf> {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return target::folder("run");
    };
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(std::path::absolute(folder)?)
}

/// Runs the task.
pub(crate) fn run(ui: &Ui, args: &Args) -> Result<()> {
    if !args.direct && !args.disk_bus.boots_by_firmware() {
        bail!(
            "--disk-bus {0}: the firmware has no driver for it, and cannot boot from it; add --direct",
            args.disk_bus
        );
    }
    let state = State::open(folder()?)?;
    let begin = state.begin(args.options()?)?;
    if !args.manifests.is_empty() && !begin.is_new() {
        bail!("--manifest: expected a new cluster, got the last run's; start over with --fresh");
    }
    let config = args.config(begin.config());
    if config.tpm && config.direct {
        bail!(
            "--direct: expected a boot through firmware for machines with a TPM, because nothing measures a kernel \
             that QEMU loads itself; omit --direct{}",
            match args.tpm {
                true => " or --tpm",
                false => ", or start over with `cargo xtask run --fresh`: the last run had --tpm",
            }
        );
    }
    if args.storage == Some(Storage::Tpm) && !config.tpm {
        bail!("--storage tpm: expected --tpm with it, got machines without a TPM");
    }
    let tpm = match config.tpm {
        true => Needs::TPM,
        false => Needs::NONE,
    };
    let needs = Needs::NODE | Needs::KERNEL | Needs::IMAGE | Needs::RUN | tpm;
    setup::ensure(ui, needs)?;
    let accel = accel::choose(args.accel)?;
    let new = begin.is_new();
    let bundle = match config.kubernetes {
        true => Some(bundle::ensure(ui, config.bundle.as_deref())?),
        false => None,
    };
    let kubectl = bundle.as_ref().map(kubectl).transpose()?;
    let runtime = tokio::runtime::Runtime::new()?;
    let manifests = match &kubectl {
        Some(kubectl) => runtime
            .block_on(manifests::read(kubectl, &args.manifests))
            .context("--manifest")?,
        None => Vec::new(),
    };
    let (artifacts, measured) = build(ui, &config, bundle.as_ref())?;
    let image = config.tpm.then_some(measured);
    let blueprint = Blueprint::new(config.clone(), artifacts.clone())?;
    let hearthctl = hearthctl::build(ui)?;
    let (mut record, parameters) = state.settle(begin, manifests)?;
    if args.join_later >= record.nodes {
        let (later, nodes) = (args.join_later, record.nodes);
        return Err(Conflict::JoinLater { later, nodes }.into());
    }
    let made_of = args.made_of(&config, &accel);
    record.config = Some(config);
    record.artifacts = Some(artifacts);
    state.save(&record)?;
    explain(ui, new, &record);
    let display = Display::new(ui, made_of, record.nodes > 1);
    let run = Run {
        args,
        interrupts: Interrupts::take(),
        kubectl,
        session: Session {
            state: &state,
            parameters,
            hearthctl: Session::tool_in(&state, hearthctl),
            join_later: args.join_later,
            image,
            no_unlock: args.no_unlock,
            timeout: Duration::from_secs(args.timeout),
            observer: Arc::new(display),
        },
    };
    runtime.block_on(run.boot(blueprint, record))
}

/// Builds what these machines boot, and the program of their network. Also returns what a boot through firmware measures.
fn build(
    ui: &Ui,
    config: &MachineConfig,
    bundle: Option<&Bundle>,
) -> Result<(Artifacts, TrustedImage)> {
    let flavour = match config.debug {
        true => Flavour::Debug,
        false => Flavour::Release,
    };
    let extensions = bundle.map(image::of_bundle).transpose()?;
    let built = image::ensure_extended(ui, flavour, extensions.as_slice())?;
    let path = &built.measurements;
    let measured =
        std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let measured = TrustedImage::parse(&measured)?;
    let artifacts = Artifacts {
        image: built.image,
        kernel: built.kernel,
        initramfs: built.initramfs,
        cmdline: built.cmdline,
        switch: program::switch(ui)?,
    };
    Ok((artifacts, measured))
}

/// kubectl for this machine: the bundle's, or the one in PATH.
pub(crate) fn kubectl(bundle: &Bundle) -> Result<PathBuf> {
    let own = || find_program("kubectl");
    bundle
        .kubectl
        .clone()
        .or_else(own)
        .context("your own bundle has no kubectl: install kubectl of the same version in PATH")
}

impl Args {
    fn options(&self) -> Result<RunOptions> {
        let read = |path: &PathBuf| {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let own_parameters = self.parameters.is_some();
        let usual = (self.tpm && !own_parameters).then_some(Storage::Tpm);
        let storage = self.storage.or(usual);
        Ok(RunOptions {
            fresh: self.fresh,
            storage: storage.map(record::Storage::from),
            parameters: self.parameters.as_ref().map(read).transpose()?,
            disk_bytes: self.disk,
            nodes: self.nodes,
            kubernetes: self.kubernetes,
            dual_stack: self.dual_stack,
        })
    }

    /// The configuration of the machines, based on the last run's: a cluster that has Kubernetes keeps it, and so does
    /// one with TPMs, which may have sealed what its nodes need. Whether they are offline is decided anew by each run, as
    /// their network is.
    fn config(&self, last: Option<&MachineConfig>) -> MachineConfig {
        let tpm = self.tpm || last.is_some_and(|config| config.tpm);
        let last = last.filter(|config| config.kubernetes);
        let kubernetes = self.kubernetes || last.is_some();
        let usual = if kubernetes { 2048 } else { 512 };
        MachineConfig {
            cpus: self.cpus,
            memory_mib: self.memory.unwrap_or(usual),
            direct: self.direct,
            debug: self.debug,
            accel: self.accel.to_string(),
            disk_bus: self.disk_bus,
            card: self.card,
            clock: self.clock.clone().unwrap_or_default(),
            tpm,
            offline: self.offline,
            kubernetes,
            bundle: self
                .bundle
                .clone()
                .or_else(|| last.and_then(|config| config.bundle.clone())),
        }
    }

    /// The configuration as text.
    fn made_of(&self, config: &MachineConfig, accel: &Chosen) -> String {
        let firmware = match (self.direct, config.tpm) {
            (true, _) => "direct boot",
            (false, false) => "UEFI",
            (false, true) => "UEFI, TPM",
        };
        let (cpus, memory_mib) = (self.cpus, config.memory_mib);
        let hardware = match (self.disk_bus, self.card) {
            (DiskBus::Virtio, Card::Virtio) => String::new(),
            (bus, card) => format!("disk on {bus}, card {card}, "),
        };
        format!("{cpus} CPUs, {memory_mib} MiB, {hardware}{firmware}, {accel}")
    }
}

/// Describes the cluster in one line before it boots.
fn explain(ui: &Ui, new: bool, record: &ClusterRecord) {
    let what = match new {
        true => "a new cluster",
        false => "the last run's cluster",
    };
    let nodes = match record.nodes {
        1 => String::new(),
        nodes => format!(" of {nodes} nodes"),
    };
    let storage = match record.storage {
        Some(record::Storage::Insecure) => "storage insecure",
        Some(record::Storage::Encrypted) => "storage encrypted, unlocked by its owner",
        Some(record::Storage::Tpm) => "storage encrypted, opened by each node's TPM",
        None => "parameters of your own",
    };
    let offline = match &record.config {
        Some(config) if config.offline => "; offline",
        _ => "",
    };
    let families = match record.dual_stack {
        true => "; IPv4 and IPv6",
        false => "",
    };
    ui.say(format_args!("{what}{nodes}; {storage}{families}{offline}"));
}

/// One run, after everything was built.
struct Run<'a> {
    args: &'a Args,
    interrupts: Interrupts,
    /// Path of kubectl, if the cluster has Kubernetes.
    kubectl: Option<PathBuf>,
    session: Session<'a>,
}

impl Run<'_> {
    async fn boot(&self, blueprint: Blueprint, mut record: ClusterRecord) -> Result<()> {
        let lifetime = match self.args.detach {
            true => Lifetime::Detachable,
            false => Lifetime::KillWithParent,
        };
        let (state, observer) = (self.session.state.path(), self.session.observer.clone());
        let fleet = Machines::open(state, &record, blueprint, lifetime, observer);
        let mut fleet = fleet.await?;
        let complete = tokio::select! {
            biased;
            () = self.interrupts.come(1) => Err(anyhow!(Interrupted)),
            complete = self.complete(&mut fleet, &mut record) => complete,
        };
        fleet.finish();
        if let Err(error) = complete {
            if is_interrupt(&error) {
                self.power_off(&mut fleet).await?;
            }
            // Otherwise they are killed when their handles are dropped.
            return Err(error);
        }
        self.tell(&fleet, &record)?;
        if self.args.detach {
            return Ok(fleet.detach()?);
        }
        let ended = tokio::select! {
            biased;
            () = self.interrupts.come(1) => None,
            ended = self.stay(&mut fleet, &mut record) => Some(ended),
        };
        match ended {
            None => self.power_off(&mut fleet).await,
            Some(ended) => ended,
        }
    }

    /// Runs until the cluster is as requested, with Kubernetes or without.
    async fn complete(&self, fleet: &mut Machines, record: &mut ClusterRecord) -> Result<()> {
        self.session.form(fleet, record).await?;
        if let Some(kubectl) = &self.kubectl {
            self.session.kubernetes(fleet, record, kubectl).await?;
        }
        Ok(())
    }

    /// Watches the cluster in the foreground until the machines have ended.
    async fn stay(&self, fleet: &mut Machines, record: &mut ClusterRecord) -> Result<()> {
        match fleet.nodes.len() {
            1 => self.session.watch_one(fleet).await?,
            _ => self.session.watch(fleet, record).await?,
        }
        Ok(())
    }

    /// Shuts the machines down cleanly; the next interrupt cuts their power.
    async fn power_off(&self, fleet: &mut Machines) -> Result<()> {
        match fleet.power_off(self.interrupts.come(2)).await? {
            PoweredOff::InOrder => Ok(()),
            PoweredOff::Pulled => bail!(Interrupted),
        }
    }

    /// Prints addresses and files, and the next commands to run.
    fn tell(&self, fleet: &Machines, record: &ClusterRecord) -> Result<()> {
        use std::io::Write;
        let mut out = std::io::stdout().lock();
        let started = fleet.nodes.iter().enumerate().filter(|(_, node)| node.on);
        for (index, node) in started {
            let (name, vm) = (&node.name, fleet.vm(index)?);
            let boot = node.boot.as_ref();
            match boot.and_then(|boot| boot.timeline().get(Phase::Home)) {
                Some(home) => {
                    let after = home.at.as_secs_f64();
                    writeln!(out, "\n{name} is HOME, {after:.1} s after power-on\n")?;
                }
                None => writeln!(out, "\n{name} is waiting for your approval\n")?,
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
        if record.nodes > 1 {
            writeln!(out)?;
        }
        let state = self.session.state.path();
        writeln!(out, "  {:<9} {}\n", "all files", shown(state))?;
        if let Some(kubectl) = &self.kubectl {
            let kubeconfig = kubeconfig(state);
            let kubectl = format!("{} --kubeconfig {}", shown(kubectl), shown(&kubeconfig));
            writeln!(out, "  {kubectl} get pods --all-namespaces")?;
            writeln!(
                out,
                "  {kubectl} run probe --image=hearth.local/probe:1 --image-pull-policy=Never\n"
            )?;
        }
        for (command, what) in self.next_commands(record) {
            writeln!(out, "  {command:<38} {what}")?;
        }
        Ok(())
    }

    fn next_commands(&self, record: &ClusterRecord) -> Vec<(&'static str, &'static str)> {
        let mut commands = Vec::new();
        match record.storage {
            Some(_) => commands.push(("cargo xtask ctl -- node list", "list the nodes")),
            None => commands.push((
                "cargo xtask ctl -- cluster take-ownership --help",
                "with the owner key of your parameters",
            )),
        }
        if record.nodes > 1 {
            commands.push((
                "cargo xtask power cut node-2",
                "cut the power; undo: power start node-2",
            ));
            commands.push((
                "cargo xtask link cut node-2",
                "cut the network link; undo: link restore node-2",
            ));
        }
        commands.push(match (self.args.detach, record.nodes) {
            (true, 1) => ("cargo xtask stop", "power it off"),
            (true, _) => ("cargo xtask stop", "power them off"),
            (false, 1) => ("Ctrl-C", "power it off"),
            (false, _) => ("Ctrl-C", "power them off"),
        });
        commands
    }
}

/// Parses a number of bytes: `8G`, `512M`, `4294967296`.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || "expected a number of bytes, optionally with K, M, G or T".to_owned();
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
        .ok_or_else(|| "expected whole sectors of 512 bytes, at least one".to_owned())
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
