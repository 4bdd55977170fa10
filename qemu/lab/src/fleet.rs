//! The machines of a run: started one by one, heard at once, ended together.
//!
//! Each console is followed by a task of its own, and all of them speak through one bounded channel, so that whoever
//! looks after the machines waits in one place. What a machine has said is kept in its [`Node`]; nothing is decided here.

use std::fs;
use std::net::{SocketAddr, SocketAddrV4};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_api::names;
use hearth_qemu::cluster::{Cluster, Image};
use hearth_qemu::console::{Line, Lines};
use hearth_qemu::vm::{Cause, Exit, Lifetime, Shutdown, Vm};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::boot::{Boot, Sign, Trouble};
use crate::error::shown;
use crate::events::{Event, Observer};
use crate::machines::{self, Blueprint};
use crate::record::ClusterRecord;
use crate::{LabError, Result};

/// How long a node may take to go down: it stops etcd, syncs and unmounts, on a host that may be busy.
pub const POWER_OFF_BOUND: Duration = Duration::from_secs(60);
/// After QEMU's end: how long the rest of what it said may take to be read.
const LAST_WORDS: Duration = Duration::from_secs(20);

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
    pub boot: Option<Boot>,
    /// Whether it is switched on.
    pub on: bool,
}

impl Node {
    /// Whether it has said that it is home.
    pub fn is_home(&self) -> bool {
        self.boot.as_ref().is_some_and(Boot::is_home)
    }

    /// The public key that it shows while it waits for approval.
    pub fn key(&self) -> Option<&[u8]> {
        self.boot.as_ref().and_then(Boot::key)
    }

    /// Whether it is on its way to where somebody has to do something for it: this is when it takes all of a processor.
    pub fn is_booting(&self) -> bool {
        // One that was removed from its cluster shows no key, but waits all the same.
        let waits = self.boot.as_ref().is_some_and(|b| b.waiting().is_some());
        self.on && !self.is_home() && self.key().is_none() && !waits
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

/// How machines were powered off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoweredOff {
    /// In order.
    InOrder,
    /// Nobody wanted to wait for that.
    Pulled,
}

enum Said {
    Line(usize, Line),
    End(usize),
}

/// The machines.
pub struct Fleet {
    observer: Arc<dyn Observer>,
    cluster: Cluster,
    blueprint: Blueprint,
    /// In the order of their numbers.
    pub nodes: Vec<Node>,
    said: (mpsc::Sender<Said>, mpsc::Receiver<Said>),
    followers: JoinSet<()>,
}

impl Fleet {
    /// None runs yet, but their network does.
    ///
    /// # Errors
    /// If a machine runs, or the network does not start.
    pub async fn open(
        state: &Path,
        record: &ClusterRecord,
        blueprint: Blueprint,
        lifetime: Lifetime,
        observer: Arc<dyn Observer>,
    ) -> Result<Fleet> {
        let network = blueprint.network(record);
        let cluster = Cluster::open(state, Some(&network), lifetime).await?;
        let node = |number| Node {
            number,
            name: machines::name(number),
            boot: None,
            on: false,
        };
        Ok(Fleet {
            observer,
            cluster,
            blueprint,
            nodes: (1..=record.nodes).map(node).collect(),
            said: mpsc::channel(BACKLOG),
            followers: JoinSet::new(),
        })
    }

    /// Switches one on.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn start(
        &mut self,
        index: usize,
        record: &ClusterRecord,
        parameters: Option<Vec<u8>>,
    ) -> Result<()> {
        let node = &self.nodes[index];
        let machine = &node.name;
        self.observer.event(&Event::Starts { machine });
        let member = self.blueprint.member(record, node.number, parameters)?;
        let place = self.cluster.add(&member).await?;
        if self.cluster.images()[place] == Image::Older && !self.blueprint.config().direct {
            self.observer.event(&Event::OlderImage { machine });
        }
        let lines = self.cluster.machines()[place].console().lines();
        let said = self.said.0.clone();
        self.followers.spawn(follow(index, lines, said));
        let boot = Boot::new();
        let phase = boot.timeline().current();
        self.observer.event(&Event::On { machine, phase });
        let node = &mut self.nodes[index];
        node.boot = Some(boot);
        node.on = true;
        Ok(())
    }

    /// What the machines say next, and which. Pending while all of them are silent, or off.
    ///
    /// # Errors
    /// If a machine that has ended does not say how.
    pub async fn next(&mut self) -> Result<(usize, News)> {
        match self.said.1.recv().await {
            Some(Said::Line(index, line)) => Ok((index, News::Line(self.observe(index, &line)))),
            Some(Said::End(index)) => {
                self.nodes[index].on = false;
                let exit = self.vm(index)?.exited(LAST_WORDS).await?;
                Ok((index, News::Ended(exit)))
            }
            // Never: this holds a sender.
            None => std::future::pending().await,
        }
    }

    /// Takes a line of a console, and tells what is new in it.
    fn observe(&mut self, index: usize, line: &Line) -> Option<Trouble> {
        let node = &mut self.nodes[index];
        let (machine, boot) = (&node.name, node.boot.as_mut()?);
        let mut found = None;
        for sign in boot.observe(line) {
            match sign {
                Sign::Passed(passed) => self.observer.event(&Event::Passed {
                    machine,
                    passed: &passed,
                    next: boot.timeline().current(),
                }),
                Sign::Waiting(why) => self.observer.event(&Event::Waiting { machine, why: &why }),
                Sign::ExtensionRefused(extension, why) => {
                    self.observer.event(&Event::ExtensionRefused {
                        machine,
                        extension: &extension,
                        why: &why,
                    });
                }
                Sign::Trouble(trouble) => found = Some(trouble),
            }
        }
        found
    }

    /// A machine waits for something that only its owner knows of.
    pub fn wait_for(&mut self, index: usize, why: &str) {
        let node = &mut self.nodes[index];
        if node.boot.as_mut().is_some_and(|boot| boot.wait_for(why)) {
            let machine = &node.name;
            self.observer.event(&Event::Waiting { machine, why });
        }
    }

    /// The machine with this index, once it was started.
    ///
    /// # Errors
    /// If it was not.
    pub fn vm(&self, index: usize) -> Result<&Vm> {
        let name = &self.nodes[index].name;
        let vm = self.cluster.machine(name);
        vm.ok_or_else(|| LabError::NeverStarted(name.clone()))
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

    /// The boots are over, as far as anybody wants to see them.
    pub fn finish(&self) {
        for node in self.nodes.iter().filter(|node| node.boot.is_some()) {
            let machine = &node.name;
            self.observer.event(&Event::Over { machine });
        }
    }

    /// The machines that another process has asked for since the last look.
    pub fn requested(&self, state: &Path) -> Vec<usize> {
        let asked = |(index, node): (usize, &Node)| {
            let request = state.join(&node.name).join(REQUEST);
            (fs::remove_file(request).is_ok() && !node.on).then_some(index)
        };
        self.nodes.iter().enumerate().filter_map(asked).collect()
    }

    /// Lets them go on alone.
    ///
    /// # Errors
    /// If they were not started for that. They are then killed.
    pub fn detach(self) -> Result<()> {
        self.finish();
        Ok(self.cluster.detach()?)
    }

    /// Ends the machines in order, or, when `give_up` comes, at once.
    ///
    /// # Errors
    /// If one goes down in another way.
    pub async fn power_off(&mut self, give_up: impl Future<Output = ()>) -> Result<PoweredOff> {
        self.finish();
        let mut asked = Vec::new();
        for index in 0..self.nodes.len() {
            if self.nodes[index].on && !self.cut_unstarted(index).await? {
                asked.push(index);
            }
        }
        if asked.is_empty() {
            return Ok(PoweredOff::InOrder);
        }
        let machines: Vec<&str> = asked.iter().map(|i| self.nodes[*i].name.as_str()).collect();
        self.observer.event(&Event::PoweringOff {
            machines: &machines,
        });
        let started = Instant::now();
        tokio::select! {
            ended = self.shut_down(&asked, started) => ended.map(|()| PoweredOff::InOrder),
            () = give_up => {
                for index in asked {
                    self.cut(index).await?;
                    let machine = &self.nodes[index].name;
                    self.observer.event(&Event::Pulled { machine });
                }
                Ok(PoweredOff::Pulled)
            }
        }
    }

    async fn cut(&self, index: usize) -> Result<()> {
        let cut = self.vm(index)?.power_cut().await;
        cut.map(drop).map_err(LabError::process("kill QEMU"))
    }

    /// Pulls the plug of one in which nothing of ours runs yet that could be asked.
    async fn cut_unstarted(&mut self, index: usize) -> Result<bool> {
        if self.nodes[index].boot.as_ref().is_some_and(Boot::has_begun) {
            return Ok(false);
        }
        self.cut(index).await?;
        let node = &mut self.nodes[index];
        node.on = false;
        let machine = &node.name;
        self.observer.event(&Event::Unstarted { machine });
        Ok(true)
    }

    async fn shut_down(&mut self, asked: &[usize], started: Instant) -> Result<()> {
        let mut ends = JoinSet::new();
        for &index in asked {
            let shutdown = self.vm(index)?.shutdown(POWER_OFF_BOUND);
            ends.spawn(async move { (index, shutdown.await) });
        }
        let mut unclean = Vec::new();
        while let Some(end) = ends.join_next().await {
            let waiting = LabError::process("wait for QEMU");
            let (index, end) = match end {
                Ok(end) => end,
                Err(error) => return Err(waiting(error.into())),
            };
            let (shutdown, exit) = end.map_err(waiting)?;
            // All that it has said is read before it is judged.
            while self.nodes[index].on {
                self.next().await?;
            }
            match self.judge(index, shutdown, &exit)? {
                None => self.observer.event(&Event::Down {
                    machine: &self.nodes[index].name,
                    took: Some(started.elapsed()),
                }),
                Some(complaint) => unclean.push(complaint),
            }
        }
        match unclean.is_empty() {
            true => Ok(()),
            false => Err(LabError::Unclean(unclean)),
        }
    }

    fn judge(&self, index: usize, shutdown: Shutdown, exit: &Exit) -> Result<Option<String>> {
        let (name, vm) = (&self.nodes[index].name, self.vm(index)?);
        Ok(match shutdown {
            Shutdown::Clean if self.down(index) == Some("power off") => None,
            Shutdown::Clean => Some(format!(
                "{name} ended without reporting that it goes down: {exit}\n\n{}",
                vm.tail()
            )),
            Shutdown::Quit | Shutdown::Killed => Some(format!(
                "{name} did not go down within {} s, so QEMU was ended\n\n{}",
                POWER_OFF_BOUND.as_secs(),
                vm.tail()
            )),
        })
    }

    fn down(&self, index: usize) -> Option<&str> {
        self.nodes[index].boot.as_ref().and_then(Boot::down)
    }

    /// Whether a machine that has ended went down in order.
    pub fn went_down(&self, index: usize, exit: &Exit) -> bool {
        exit.cause == Cause::GuestShutdown && self.down(index).is_some()
    }

    /// Why a node is not home, with its last words.
    pub fn failure(&self, index: usize, why: impl std::fmt::Display) -> LabError {
        let words = match self.vm(index) {
            Ok(vm) => {
                let files = shown(vm.run_dir().path());
                format!("{}\n\nits files: {}", vm.tail(), files.display())
            }
            Err(error) => error.to_string(),
        };
        LabError::NotHome {
            machine: self.nodes[index].name.clone(),
            why: why.to_string(),
            words,
        }
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
///
/// # Errors
/// If the machine has no folder.
pub fn request_start(state: &Path, name: &str) -> Result<()> {
    let path = state.join(name).join(REQUEST);
    fs::write(&path, "").map_err(LabError::file("write", &path))
}
