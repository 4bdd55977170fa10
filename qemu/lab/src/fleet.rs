//! The machines of a run: started one by one, read concurrently, ended together.
//!
//! A task per machine follows its console; all tasks send to one bounded channel, so that the caller waits in one
//! place. The state of a machine is kept in its [`Node`]; no decisions are made here.

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

use crate::boot::{Boot, BootFailure, Sign};
use crate::error::shown;
use crate::events::{Event, Observer};
use crate::machines::{self, Blueprint};
use crate::record::ClusterRecord;
use crate::{LabError, Result};

/// Bound for a node's shutdown: it stops etcd, syncs and unmounts, on a host that may be busy.
pub const POWER_OFF_BOUND: Duration = Duration::from_secs(60);
/// Bound for reading the rest of the console after QEMU has ended.
const LAST_WORDS: Duration = Duration::from_secs(20);

/// Capacity of the channel of lines, shared by all machines.
const BACKLOG: usize = 256;

/// Name of the file in a machine's folder by which another process requests its start.
const REQUEST: &str = "start.request";

/// A machine of the run.
pub struct Node {
    /// Its number, from 1.
    pub number: u16,
    /// Its name.
    pub name: String,
    /// The boot since its last start; none before the first.
    pub boot: Option<Boot>,
    /// Whether it is powered on.
    pub on: bool,
}

impl Node {
    /// Whether it has reported that it is HOME.
    pub fn is_home(&self) -> bool {
        self.boot.as_ref().is_some_and(Boot::is_home)
    }

    /// The public key on its console while it waits for approval.
    pub fn key(&self) -> Option<&[u8]> {
        self.boot.as_ref().and_then(Boot::key)
    }

    /// Whether it is booting, until it needs an action from outside: during this time it uses a whole processor.
    pub fn is_booting(&self) -> bool {
        // A node that was removed from its cluster shows no key, but waits as well.
        let waits = self.boot.as_ref().is_some_and(|b| b.waiting().is_some());
        self.on && !self.is_home() && self.key().is_none() && !waits
    }
}

/// What was received.
#[derive(Debug)]
pub enum News {
    /// A line; with the problem, if it ended the boot.
    Line(Option<BootFailure>),
    /// The machine has ended.
    Ended(Exit),
}

/// How machines were powered off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoweredOff {
    /// Cleanly.
    InOrder,
    /// By cutting the power, at the user's request.
    Pulled,
}

enum Said {
    Line(usize, Line),
    End(usize),
}

/// The machines of a run.
pub struct Machines {
    observer: Arc<dyn Observer>,
    cluster: Cluster,
    blueprint: Blueprint,
    /// In the order of their numbers.
    pub nodes: Vec<Node>,
    said: (mpsc::Sender<Said>, mpsc::Receiver<Said>),
    followers: JoinSet<()>,
}

impl Machines {
    /// Opens the cluster: no machine runs yet, but the network does.
    ///
    /// # Errors
    /// If a machine is running, or the network does not start.
    pub async fn open(
        state: &Path,
        record: &ClusterRecord,
        blueprint: Blueprint,
        lifetime: Lifetime,
        observer: Arc<dyn Observer>,
    ) -> Result<Machines> {
        let network = blueprint.network(record);
        let cluster = Cluster::open(state, Some(&network), lifetime).await?;
        let node = |number| Node {
            number,
            name: machines::name(number),
            boot: None,
            on: false,
        };
        Ok(Machines {
            observer,
            cluster,
            blueprint,
            nodes: (1..=record.nodes).map(node).collect(),
            said: mpsc::channel(BACKLOG),
            followers: JoinSet::new(),
        })
    }

    /// Powers a machine on.
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

    /// The next event of a machine, with the machine's index. Pending while all of them are silent or off.
    ///
    /// # Errors
    /// If the way in which a machine ended is unknown.
    pub async fn next(&mut self) -> Result<(usize, News)> {
        match self.said.1.recv().await {
            Some(Said::Line(index, line)) => Ok((index, News::Line(self.observe(index, &line)))),
            Some(Said::End(index)) => {
                self.nodes[index].on = false;
                let exit = self.vm(index)?.exited(LAST_WORDS).await?;
                Ok((index, News::Ended(exit)))
            }
            // Unreachable: `self` holds a sender.
            None => std::future::pending().await,
        }
    }

    /// Processes a console line and reports what is new in it.
    fn observe(&mut self, index: usize, line: &Line) -> Option<BootFailure> {
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
                Sign::BootFailure(trouble) => found = Some(trouble),
            }
        }
        found
    }

    /// Sets what a machine waits for, as known from outside the machine.
    pub fn wait_for(&mut self, index: usize, why: &str) {
        let node = &mut self.nodes[index];
        if node.boot.as_mut().is_some_and(|boot| boot.wait_for(why)) {
            let machine = &node.name;
            self.observer.event(&Event::Waiting { machine, why });
        }
    }

    /// The machine with this index, which must have been started.
    ///
    /// # Errors
    /// If it was not started.
    pub fn vm(&self, index: usize) -> Result<&Vm> {
        let name = &self.nodes[index].name;
        let vm = self.cluster.machine(name);
        vm.ok_or_else(|| LabError::NeverStarted(name.clone()))
    }

    /// The machines and their network.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The addresses of all curators, present or future.
    pub fn curators(&self) -> Vec<SocketAddr> {
        let forwarded = |node: &Node| self.cluster.forwarded(&node.name, names::PORT_CURATOR);
        self.nodes.iter().filter_map(forwarded).collect()
    }

    /// The addresses of the nodes' ports in the machines' network, and those on the host.
    pub fn routes(&self) -> Vec<(SocketAddrV4, SocketAddr)> {
        self.routes_to(&[
            names::PORT_CURATOR,
            names::PORT_NODE_MANAGEMENT,
            names::PORT_UNLOCK,
        ])
    }

    /// The same for these ports, as far as they are forwarded.
    pub(crate) fn routes_to(&self, ports: &[u16]) -> Vec<(SocketAddrV4, SocketAddr)> {
        let route = |node: &Node, port| {
            let address = self.cluster.address(&node.name)?;
            let host = self.cluster.forwarded(&node.name, port)?;
            Some((SocketAddrV4::new(address, port), host))
        };
        let nodes = self.nodes.iter();
        let routes = nodes.flat_map(|node| ports.iter().filter_map(move |port| route(node, *port)));
        routes.collect()
    }

    /// The addresses of all unlock ports on the host.
    pub fn unlock_ports(&self) -> Vec<SocketAddr> {
        let forwarded = |node: &Node| self.cluster.forwarded(&node.name, names::PORT_UNLOCK);
        self.nodes.iter().filter_map(forwarded).collect()
    }

    /// Ends the display of all boots.
    pub fn finish(&self) {
        for node in self.nodes.iter().filter(|node| node.boot.is_some()) {
            let machine = &node.name;
            self.observer.event(&Event::Over { machine });
        }
    }

    /// The machines that other processes have requested since the last call.
    pub fn requested(&self, state: &Path) -> Vec<usize> {
        let asked = |(index, node): (usize, &Node)| {
            let request = state.join(&node.name).join(REQUEST);
            (fs::remove_file(request).is_ok() && !node.on).then_some(index)
        };
        self.nodes.iter().enumerate().filter_map(asked).collect()
    }

    /// Leaves the machines running without this process.
    ///
    /// # Errors
    /// If they were not started as detachable. They are then killed.
    pub fn detach(self) -> Result<()> {
        self.finish();
        Ok(self.cluster.detach()?)
    }

    /// Shuts the machines down cleanly, or cuts their power when `give_up` resolves.
    ///
    /// # Errors
    /// If a machine ends in another way.
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

    /// Cuts the power of a machine in which Hearth does not run yet.
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
            // All of its output is read before the exit is judged.
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
                "{name} ended without reporting a shutdown: {exit}\n\n{}",
                vm.tail()
            )),
            Shutdown::Quit | Shutdown::Killed => Some(format!(
                "{name} did not shut down within {} s; killed QEMU\n\n{}",
                POWER_OFF_BOUND.as_secs(),
                vm.tail()
            )),
        })
    }

    fn down(&self, index: usize) -> Option<&str> {
        self.nodes[index].boot.as_ref().and_then(Boot::down)
    }

    /// Whether a machine that has ended was shut down cleanly.
    pub fn went_down(&self, index: usize, exit: &Exit) -> bool {
        exit.cause == Cause::GuestShutdown && self.down(index).is_some()
    }

    /// The error of a node that is not HOME, with the last lines of its console.
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
    // The receiver is gone if the result is not needed any more.
    let _ = said.send(Said::End(index)).await;
}

/// Requests a machine's start from the run that has the machines; see [`Machines::requested`].
///
/// # Errors
/// If the machine has no folder.
pub fn request_start(state: &Path, name: &str) -> Result<()> {
    let path = state.join(name).join(REQUEST);
    fs::write(&path, "").map_err(LabError::file("write", &path))
}
