//! The machines of a run: started one by one, heard at once, ended together.
//!
//! Each console is followed by a task of its own, and all of them speak through one bounded channel, so that whoever
//! looks after the machines waits in one place. What a machine has said is kept in its [`Node`]; nothing is decided here.

use std::fs;
use std::net::{SocketAddr, SocketAddrV4};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hearth_api::console::Report;
use hearth_api::names;
use hearth_qemu::cluster::{Cluster, Image};
use hearth_qemu::console::{Line, Lines};
use hearth_qemu::phases::Phase;
use hearth_qemu::vm::{Cause, Exit, Lifetime, Shutdown, Vm};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::display::{Display, Trouble};
use super::machines::{self, Workshop};
use super::state::{Founding, State};
use crate::command::{Interrupted, Interrupts};
use crate::formation::shown_key;
use crate::stop;
use crate::ui::Ui;

/// After QEMU's end: how long the rest of what it said may take to be read.
pub const LAST_WORDS: Duration = Duration::from_secs(20);

/// Lines that are waiting to be looked at, of all machines.
const BACKLOG: usize = 256;

/// By this file in a machine's folder another process asks for its start.
const REQUEST: &str = "start.request";

/// A machine of the run.
pub struct Node {
    /// Its number, from 1.
    pub number: u16,
    /// Its name.
    pub name: String,
    /// What it has shown since its last start; none before the first.
    pub display: Option<Display>,
    /// The public key that it shows while it waits for approval.
    pub key: Option<Vec<u8>>,
    /// Whether it is switched on.
    pub on: bool,
}

impl Node {
    /// Whether it has said that it is home.
    pub fn is_home(&self) -> bool {
        let display = self.display.as_ref();
        display.is_some_and(|display| display.timeline().get(Phase::Home).is_some())
    }

    /// Whether it is on its way to where somebody has to do something for it: this is when it takes all of a processor.
    pub fn is_booting(&self) -> bool {
        let display = self.display.as_ref();
        // One that was removed from its cluster shows no key, but waits all the same.
        let waits = display.is_some_and(|display| display.waiting().is_some());
        self.on && !self.is_home() && self.key.is_none() && !waits
    }
}

/// What was heard.
#[derive(Debug)]
pub enum News {
    /// A line was; it may be the end of the boot.
    Line(Option<Trouble>),
    /// The machine has ended.
    Ended(Exit),
}

enum Said {
    Line(usize, Line),
    End(usize),
}

/// The machines.
pub struct Fleet {
    ui: Ui,
    cluster: Cluster,
    workshop: Workshop,
    /// In the order of their numbers.
    pub nodes: Vec<Node>,
    said: (mpsc::Sender<Said>, mpsc::Receiver<Said>),
    followers: JoinSet<()>,
}

impl Fleet {
    /// None runs yet, but their network does.
    pub async fn open(
        ui: &Ui,
        state: &State,
        founding: &Founding,
        workshop: Workshop,
        lifetime: Lifetime,
    ) -> Result<Fleet> {
        let network = workshop.network(founding);
        let cluster = Cluster::open(state.path(), Some(&network), lifetime).await?;
        let node = |number| Node {
            number,
            name: machines::name(number),
            display: None,
            key: None,
            on: false,
        };
        Ok(Fleet {
            ui: ui.clone(),
            cluster,
            workshop,
            nodes: (1..=founding.nodes).map(node).collect(),
            said: mpsc::channel(BACKLOG),
            followers: JoinSet::new(),
        })
    }

    /// Switches one on.
    pub async fn start(
        &mut self,
        index: usize,
        founding: &Founding,
        parameters: Option<Vec<u8>>,
    ) -> Result<()> {
        let number = self.nodes[index].number;
        let member = self.workshop.member(founding, number, parameters)?;
        let direct = !matches!(member.machine.boot, hearth_qemu::command::Boot::Uefi(_));
        let label = (self.nodes.len() > 1).then_some(member.machine.name.as_str());
        let place = self.cluster.add(&member).await?;
        let name = &self.nodes[index].name;
        if self.cluster.images()[place] == Image::Older && !direct {
            self.ui.say(format_args!(
                "  {name}'s disk holds an older image, and boots that; --fresh takes the new one"
            ));
        }
        let lines = self.cluster.machines()[place].console().lines();
        let said = self.said.0.clone();
        self.followers.spawn(follow(index, lines, said));
        self.nodes[index].display = Some(Display::new(&self.ui, label));
        self.nodes[index].key = None;
        self.nodes[index].on = true;
        Ok(())
    }

    /// What the machines say next, and which. Pending while all of them are silent, or off.
    pub async fn next(&mut self) -> Result<(usize, News)> {
        let said = self.said.1.recv().await;
        // Never closed: this holds a sender.
        match said.context("no console is followed any more")? {
            Said::Line(index, line) => {
                let node = &mut self.nodes[index];
                let trouble = node.display.as_mut().and_then(|d| d.observe(&line));
                if let Some(Report::Waiting(why)) = Report::parse(&line.text)
                    && let Some(key) = shown_key(&why)
                {
                    node.key = Some(key);
                }
                Ok((index, News::Line(trouble)))
            }
            Said::End(index) => {
                self.nodes[index].on = false;
                let exit = self.vm(index)?.exited(LAST_WORDS).await?;
                Ok((index, News::Ended(exit)))
            }
        }
    }

    /// The machine with this index, once it was started.
    pub fn vm(&self, index: usize) -> Result<&Vm> {
        let name = &self.nodes[index].name;
        let vm = self.cluster.machine(name);
        vm.with_context(|| format!("{name} was never started"))
    }

    /// The machines and their network.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Where all curators are found, or will be.
    pub fn curators(&self) -> Vec<SocketAddr> {
        let forwarded = |node: &Node| self.cluster.forwarded(&node.name, names::PORT_CURATOR);
        self.nodes.iter().filter_map(forwarded).collect()
    }

    /// Where each node's own port is in the machines' network, and where it is found from here.
    pub fn routes(&self) -> Vec<(SocketAddrV4, SocketAddr)> {
        let route = |node: &Node| {
            let address = self.cluster.address(&node.name)?;
            let port = names::PORT_NODE_MANAGEMENT;
            let host = self.cluster.forwarded(&node.name, port)?;
            Some((SocketAddrV4::new(address, port), host))
        };
        self.nodes.iter().filter_map(route).collect()
    }

    /// The live lines go.
    pub fn finish(&mut self) {
        for display in self
            .nodes
            .iter_mut()
            .filter_map(|node| node.display.as_mut())
        {
            display.finish();
        }
    }

    /// The machines that another process has asked for since the last look.
    pub fn requested(&self, state: &State) -> Vec<usize> {
        let asked = |(index, node): (usize, &Node)| {
            let request = state.path().join(&node.name).join(REQUEST);
            (fs::remove_file(request).is_ok() && !node.on).then_some(index)
        };
        self.nodes.iter().enumerate().filter_map(asked).collect()
    }

    /// Lets them go on alone.
    pub fn detach(mut self) -> Result<()> {
        self.finish();
        Ok(self.cluster.detach()?)
    }

    /// Ends the machines in order; the next interrupt ends them at once.
    pub async fn power_off(&mut self, interrupts: &Interrupts) -> Result<()> {
        self.finish();
        let mut asked = Vec::new();
        for index in 0..self.nodes.len() {
            if self.nodes[index].on && !self.cut_unstarted(index).await? {
                asked.push(index);
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = asked.iter().map(|i| self.nodes[*i].name.as_str()).collect();
        self.ui.say(format_args!(
            "powering off {}; another Ctrl-C pulls {}",
            names.join(", "),
            if asked.len() == 1 {
                "its plug"
            } else {
                "their plugs"
            }
        ));
        let started = Instant::now();
        tokio::select! {
            ended = self.shut_down(&asked, started) => ended,
            () = interrupts.come(2) => {
                for index in asked {
                    self.vm(index)?.power_cut().await?;
                    self.ui.say(format_args!("{} is off: a power cut", self.nodes[index].name));
                }
                bail!(Interrupted)
            }
        }
    }

    /// Pulls the plug of one in which nothing of ours runs yet that could be asked.
    async fn cut_unstarted(&mut self, index: usize) -> Result<bool> {
        let node = &self.nodes[index];
        let begun = node.display.as_ref().is_some_and(|display| {
            let timeline = display.timeline();
            timeline.reboots() > 0 || timeline.get(Phase::Kernel).is_some()
        });
        if begun {
            return Ok(false);
        }
        self.vm(index)?.power_cut().await?;
        let name = &self.nodes[index].name;
        self.ui
            .say(format_args!("{name} is off; its kernel had not started"));
        self.nodes[index].on = false;
        Ok(true)
    }

    async fn shut_down(&mut self, asked: &[usize], started: Instant) -> Result<()> {
        let mut ends = JoinSet::new();
        for &index in asked {
            let shutdown = self.vm(index)?.shutdown(stop::BOUND);
            ends.spawn(async move { (index, shutdown.await) });
        }
        let mut unclean = Vec::new();
        while let Some(end) = ends.join_next().await {
            let (index, end) = end?;
            let (shutdown, exit) = end?;
            // All that it has said is read before it is judged.
            while self.nodes[index].on {
                self.next().await?;
            }
            match self.judge(index, shutdown, &exit)? {
                None => {
                    let took = started.elapsed().as_secs_f64();
                    let name = &self.nodes[index].name;
                    self.ui.say(format_args!("{name} is down: {took:.1} s"));
                }
                Some(complaint) => unclean.push(complaint),
            }
        }
        match unclean.is_empty() {
            true => Ok(()),
            false => bail!("{}", unclean.join("\n\n")),
        }
    }

    fn judge(&self, index: usize, shutdown: Shutdown, exit: &Exit) -> Result<Option<String>> {
        let (name, vm) = (&self.nodes[index].name, self.vm(index)?);
        let down = self.nodes[index].display.as_ref().and_then(Display::down);
        Ok(match shutdown {
            Shutdown::Clean if down == Some("power off") => None,
            Shutdown::Clean => Some(format!(
                "{name} ended without reporting that it goes down: {exit}\n\n{}",
                vm.tail()
            )),
            Shutdown::Quit | Shutdown::Killed => Some(format!(
                "{name} did not go down within {} s, so QEMU was ended\n\n{}",
                stop::BOUND.as_secs(),
                vm.tail()
            )),
        })
    }

    /// Whether a machine that has ended went down in order.
    pub fn went_down(&self, index: usize, exit: &Exit) -> bool {
        let down = self.nodes[index].display.as_ref().and_then(Display::down);
        exit.cause == Cause::GuestShutdown && down.is_some()
    }
}

async fn follow(index: usize, mut lines: Lines, said: mpsc::Sender<Said>) {
    while let Some(line) = lines.next().await {
        if said.send(Said::Line(index, line)).await.is_err() {
            return;
        }
    }
    // The receiver is gone when nobody wants to know.
    let _ = said.send(Said::End(index)).await;
}

/// Asks the run that has the machines to start one; see [`Fleet::requested`].
pub fn request_start(state: &std::path::Path, name: &str) -> Result<()> {
    let path = state.join(name).join(REQUEST);
    fs::write(&path, "").with_context(|| format!("cannot write {}", path.display()))
}
