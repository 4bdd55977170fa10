//! `cargo xtask run`: one node, from source to HOME.
//!
//! Everything that is kept from one run to the next is in [`state`]; what is shown meanwhile in [`display`]; what an owner
//! does with the node that came up in [`owner`]. Here stands the order of it all, and what becomes of the machine on every
//! way out: in the foreground it is powered off by the first interrupt and killed by the second; on any failure it is
//! killed with its handle; only a node that is HOME is ever left running (`--detach`).

mod display;
mod owner;
pub mod state;

use std::path::PathBuf;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use hearth_api::names;
use hearth_qemu::accel::{self, Chosen};
use hearth_qemu::cluster::{Cluster, ClusterSpec, Image, Member};
use hearth_qemu::command::{Boot, Machine};
use hearth_qemu::console::Lines;
use hearth_qemu::disk::Cache;
use hearth_qemu::firmware::Firmware;
use hearth_qemu::fw_cfg::Item;
use hearth_qemu::network::{Forward, Link, Mac, Nic, UserNetwork};
use hearth_qemu::phases::Phase;
use hearth_qemu::vm::{Cause, Lifetime, Shutdown, Vm};

use crate::command::{Interrupted, Interrupts};
use crate::hearthctl;
use crate::image::{self, Artifacts, Flavour};
use crate::setup::{self, Needs};
use crate::stop;
use crate::target::shown;
use crate::ui::Ui;
use display::Display;
use owner::{Owner, Progress};
use state::{Founding, State, Storage, Wish};

/// Build everything, boot one node and watch it come home
///
/// The node and its cluster are kept: the next run boots them again. Ctrl-C powers the node off.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Start over: the cluster that is there is lost
    #[arg(long)]
    fresh: bool,
    /// How a new cluster protects its data [default: insecure]
    #[arg(long, value_enum, conflicts_with = "parameters")]
    storage: Option<Storage>,
    /// Let QEMU load the kernel itself, without firmware; faster
    #[arg(long)]
    direct: bool,
    /// The node's memory
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..))]
    memory: u32,
    /// The node's CPUs
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// What to run on; auto takes KVM where it truly works
    #[arg(long, default_value_t = accel::Choice::Auto, value_parser = accelerators())]
    accel: accel::Choice,
    /// Leave the node running in the background once it is HOME
    #[arg(long)]
    detach: bool,
    /// Parameters of your own for the node (serialised NodeParameters)
    #[arg(long, value_name = "FILE")]
    parameters: Option<PathBuf>,
    /// With the debug service, which lets anyone who reaches the node look into it
    #[arg(long)]
    debug: bool,
    /// Size of a new cluster's disk, such as 8G [default: 4G]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    disk: Option<u64>,
    /// How long the node may take to be HOME and answer
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
}

/// Parses `--accel`.
pub fn accelerators() -> impl TypedValueParser<Value = accel::Choice> {
    PossibleValuesParser::new(["auto", "kvm", "tcg"]).try_map(|word| word.parse::<accel::Choice>())
}

/// The one machine.
const NAME: &str = "node-1";

/// After QEMU's end: how long the rest of what it said may take to be read.
const LAST_WORDS: Duration = Duration::from_secs(20);

/// Runs the task.
pub fn run(ui: &Ui, args: &Args) -> Result<()> {
    let wish = args.wish()?;
    let state = State::open()?;
    let new = state.check(&wish)?;
    setup::ensure(ui, Needs::NODE | Needs::KERNEL | Needs::IMAGE | Needs::RUN)?;
    let accel = accel::choose(args.accel)?;
    let artifacts = image::ensure(ui, args.flavour())?;
    let hearthctl = hearthctl::build(ui)?;
    let (founding, parameters) = state.prepare(&wish)?;
    explain(ui, new, &founding);

    let spec = ClusterSpec {
        state: state.path().to_owned(),
        network: None,
        members: vec![member(args, &founding, &accel, &artifacts, parameters)?],
        lifetime: match args.detach {
            true => Lifetime::Detachable,
            false => Lifetime::Tied,
        },
    };
    let run = Run {
        ui,
        args,
        state: &state,
        accel,
        hearthctl,
        interrupts: Interrupts::take(),
    };
    tokio::runtime::Runtime::new()?.block_on(run.boot(&spec, founding))
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
        })
    }

    fn flavour(&self) -> Flavour {
        match self.debug {
            true => Flavour::Debug,
            false => Flavour::Release,
        }
    }
}

/// What the user should know of the cluster before it boots, in one line.
fn explain(ui: &Ui, new: bool, founding: &Founding) {
    let what = match new {
        true => "a new cluster",
        false => "the last run's cluster",
    };
    let storage = match founding.storage {
        Some(Storage::Insecure) => "storage insecure (encrypted ones cannot cold-start yet)",
        Some(Storage::Encrypted) => {
            "storage encrypted (it cannot cold-start yet: lost once it is down)"
        }
        None => "parameters of your own",
    };
    ui.say(format_args!("{what}; {storage}"));
}

fn member(
    args: &Args,
    founding: &Founding,
    accel: &Chosen,
    artifacts: &Artifacts,
    parameters: Vec<u8>,
) -> Result<Member> {
    let boot = match args.direct {
        true => Boot::Direct {
            kernel: artifacts.kernel.clone(),
            initrd: Some(artifacts.initramfs.clone()),
            append: artifacts.cmdline.clone(),
        },
        false => Boot::Uefi(Firmware::locate()?),
    };
    let mut forwards = vec![Forward::any(names::PORT_CURATOR)];
    if args.debug {
        forwards.push(Forward::any(names::PORT_DEBUG));
    }
    let network = UserNetwork {
        restricted: false,
        forwards,
    };
    let machine = Machine {
        cpus: args.cpus,
        memory_mib: args.memory,
        boot,
        nics: vec![Nic {
            mac: Mac::of_machine(1),
            link: Link::User(network),
        }],
        fw_cfg: vec![Item::bytes(names::FW_CFG_PARAMETERS, parameters)?],
        ..Machine::new(NAME, accel.accel)
    };
    Ok(Member {
        machine,
        image: artifacts.image.clone(),
        disk_bytes: Some(founding.disk_bytes),
        cache: Cache::Writeback,
    })
}

/// One run, once everything is built.
struct Run<'a> {
    ui: &'a Ui,
    args: &'a Args,
    state: &'a State,
    accel: Chosen,
    hearthctl: PathBuf,
    interrupts: Interrupts,
}

impl Run<'_> {
    async fn boot(&self, spec: &ClusterSpec, mut founding: Founding) -> Result<()> {
        let firmware = match self.args.direct {
            true => "direct boot",
            false => "UEFI",
        };
        self.ui.say(format_args!(
            "{NAME} starts: {} CPUs, {} MiB, {firmware}, {}",
            self.args.cpus, self.args.memory, self.accel
        ));
        let cluster = Cluster::launch(spec).await?;
        if cluster.images() == [Image::Older] && !self.args.direct {
            self.ui
                .say("  its disk holds an older image, and boots that; --fresh takes the new one");
        }
        let vm = &cluster.machines()[0];
        let mut lines = vm.console().lines();
        let mut display = Display::new(self.ui);
        let home = tokio::select! {
            biased;
            () = self.interrupts.come(1) => Err(anyhow!(Interrupted)),
            home = self.come_home(vm, &mut lines, &mut display, &mut founding) => home,
        };
        display.finish();
        if let Err(error) = home {
            if error.is::<Interrupted>() {
                self.power_off(vm, &mut lines, &mut display).await?;
            }
            // Otherwise it is killed when its handle goes.
            return Err(error);
        }
        self.tell(vm, &display, &founding)?;
        if self.args.detach {
            return Ok(cluster.detach()?);
        }
        tokio::select! {
            biased;
            () = self.interrupts.come(1) => self.power_off(vm, &mut lines, &mut display).await,
            ended = self.stay(vm, &mut lines, &mut display) => ended,
        }
    }

    /// Until the node says that it is home, and then until it says so to its owner, too.
    async fn come_home(
        &self,
        vm: &Vm,
        lines: &mut Lines,
        display: &mut Display,
        founding: &mut Founding,
    ) -> Result<()> {
        let bound = Duration::from_secs(self.args.timeout);
        let deadline = tokio::time::sleep(bound);
        tokio::pin!(deadline);
        // Not asked before it is home; then until this is none again.
        let mut question: Option<Question> = None;
        loop {
            tokio::select! {
                line = lines.next() => {
                    let Some(line) = line else {
                        let exit = vm.exited(LAST_WORDS).await?;
                        return Err(failure(vm, exit));
                    };
                    if let Some(trouble) = display.observe(&line) {
                        return Err(failure(vm, trouble));
                    }
                    let home = display.timeline().get(Phase::Home).is_some();
                    if home && !founding.was_home {
                        founding.was_home = true;
                        self.state.save(founding)?;
                    }
                    if home && question.is_none() {
                        let Some(owner) = self.owner(vm, founding) else { return Ok(()) };
                        display.asking();
                        question = Some(ask(owner));
                    }
                }
                (owner, progress) = answer(&mut question) => match progress {
                    Ok(Progress::Well { took }) => {
                        self.ui.say(format_args!("  {:<10} {:>6.2} s  HOME, healthy", "answers", took.as_secs_f64()));
                        return Ok(());
                    }
                    Ok(Progress::Owned(address)) => {
                        founding.owned_at = Some(address);
                        self.state.save(founding)?;
                        question = Some(ask(owner));
                    }
                    Ok(Progress::NotYet(why)) => {
                        display.show_waiting(why);
                        question = Some(ask(owner));
                    }
                    Err(error) => return Err(failure(vm, format_args!("its owner cannot use it: {error:#}"))),
                },
                () = &mut deadline => {
                    let phase = display.timeline().current().map_or("answers", |phase| phase.word());
                    let waiting = match display.waiting() {
                        Some(why) => format!(", where it waits for {why}"),
                        None => String::new(),
                    };
                    return Err(failure(vm, format_args!("not within {} s; it has come to: {phase}{waiting}", bound.as_secs())));
                }
            }
        }
    }

    /// Who asks; none where the node's owner is somebody else.
    fn owner(&self, vm: &Vm, founding: &Founding) -> Option<Owner> {
        founding.storage?;
        Some(Owner {
            ui: self.ui.clone(),
            hearthctl: self.hearthctl.clone(),
            config: hearthctl::config(self.state.path()),
            key: self.state.owner_key(),
            secret: self.state.first_contact_secret(),
            curator: vm.forwarded(names::PORT_CURATOR)?,
            owned_at: founding.owned_at,
            asked: None,
        })
    }

    /// Where everything is, and what to type next.
    fn tell(&self, vm: &Vm, display: &Display, founding: &Founding) -> Result<()> {
        use std::io::Write;
        let mut out = std::io::stdout().lock();
        let home = display.timeline().get(Phase::Home);
        let after = home.map_or(0.0, |home| home.at.as_secs_f64());
        writeln!(out, "\n{NAME} is HOME, {after:.1} s after power-on\n")?;
        for (port, what) in [
            (names::PORT_CURATOR, "curator"),
            (names::PORT_DEBUG, "debug"),
        ] {
            if let Some(address) = vm.forwarded(port) {
                writeln!(out, "  {what:<9} {address}")?;
            }
        }
        writeln!(
            out,
            "  {:<9} {}",
            "console",
            shown(&vm.run_dir().serial_log())
        )?;
        writeln!(out, "  {:<9} {}\n", "all files", shown(self.state.path()))?;
        if founding.storage.is_some() {
            writeln!(
                out,
                "  cargo xtask ctl -- node list   list the cluster's nodes"
            )?;
        } else {
            writeln!(
                out,
                "  cargo xtask ctl -- cluster take-ownership --help   with the owner key of your parameters"
            )?;
        }
        match self.args.detach {
            true => writeln!(out, "  cargo xtask stop               power it off")?,
            false => writeln!(out, "  Ctrl-C                         power it off")?,
        }
        Ok(())
    }

    /// In the foreground, until the machine has ended.
    async fn stay(&self, vm: &Vm, lines: &mut Lines, display: &mut Display) -> Result<()> {
        while let Some(line) = lines.next().await {
            if let Some(trouble) = display.observe(&line) {
                self.ui.say(format_args!("{NAME}: {trouble}"));
            }
        }
        let exit = vm.exited(LAST_WORDS).await?;
        match (&exit.cause, display.down()) {
            (Cause::GuestShutdown, Some(_)) => {
                self.ui.say(format_args!("{NAME} is down"));
                Ok(())
            }
            _ => bail!("{NAME} ended: {exit}\n\n{}", vm.tail()),
        }
    }

    /// Ends the machine in order; the next interrupt ends it at once.
    async fn power_off(&self, vm: &Vm, lines: &mut Lines, display: &mut Display) -> Result<()> {
        let timeline = display.timeline();
        if timeline.reboots() == 0 && timeline.get(Phase::Kernel).is_none() {
            // Nothing of ours runs yet that could be asked.
            vm.power_cut().await?;
            self.ui
                .say(format_args!("{NAME} is off; its kernel had not started"));
            return Ok(());
        }
        self.ui.say(format_args!(
            "powering off {NAME}; another Ctrl-C pulls its plug"
        ));
        let started = Instant::now();
        let (shutdown, exit) = tokio::select! {
            ended = vm.shutdown(stop::BOUND) => ended?,
            () = self.interrupts.come(2) => {
                vm.power_cut().await?;
                self.ui.say(format_args!("{NAME} is off: a power cut"));
                bail!(Interrupted);
            }
        };
        while let Some(line) = lines.next().await {
            display.observe(&line);
        }
        match shutdown {
            Shutdown::Clean if display.down() == Some("power off") => {
                let took = started.elapsed().as_secs_f64();
                self.ui.say(format_args!("{NAME} is down: {took:.1} s"));
                Ok(())
            }
            Shutdown::Clean => bail!(
                "{NAME} ended without reporting that it goes down: {exit}\n\n{}",
                vm.tail()
            ),
            Shutdown::Quit | Shutdown::Killed => bail!(
                "{NAME} did not go down within {} s, so QEMU was ended\n\n{}",
                stop::BOUND.as_secs(),
                vm.tail()
            ),
        }
    }
}

/// The owner, at work.
type Question = Pin<Box<dyn Future<Output = (Owner, Result<Progress>)>>>;

fn ask(owner: Owner) -> Question {
    Box::pin(owner.next())
}

/// Pending for as long as there is no question; takes the one that is answered.
async fn answer(question: &mut Option<Question>) -> (Owner, Result<Progress>) {
    match question {
        Some(asked) => asked.as_mut().await,
        None => std::future::pending().await,
    }
}

/// Why the node is not home, with its last words.
fn failure(vm: &Vm, why: impl std::fmt::Display) -> anyhow::Error {
    anyhow!(
        "{NAME} did not come home: {why}\n\n{}\n\nits files: {}\n`cargo xtask run` tries again from where it was, --fresh starts over",
        vm.tail(),
        shown(vm.run_dir().path())
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
