//! Machines that are kept: started, left running, attached to, started again.
//!
//! A cluster is a folder with a folder for each machine ([`crate::run_dir`]), which has, besides the logs:
//!
//! | file | what |
//! |---|---|
//! | `machine.json` | the process and ports of the last start |
//! | `base.img` | the base image of the disk |
//! | `disk.qcow2` | everything written since |
//!
//! and one folder for their network, `net`, if they have one ([`NetworkSpec`]): a process of its own that is started
//! before the first machine, ends after the last, and is left running and attached to together with them.
//!
//! [`Cluster::launch`] makes what is missing and keeps what exists, so the next launch boots the same machines again,
//! on the same ports. The image is kept by a hard link (or a copy): rebuilding an image under the same name does not
//! affect the disks that are based on the old one. If a disk is based on another image than the given one, that is
//! reported ([`Image::Older`]) and never changed silently: starting over is the user's decision ([`Cluster::remove`]).
//!
//! Machines can be added one after the other ([`Cluster::open`], [`Cluster::add`]), because the parameters of a later
//! one may be known only when an earlier one runs. A machine that has ended is started again in the same way, also in a
//! cluster that was left running ([`Cluster::resume`]).
//!
//! Invariants: there is one launcher at a time (a lock in the folder), a running machine is never started a second
//! time, and a process is only taken for one of the cluster's machines by its complete
//! [`Identity`](hearth_process::process::Identity), never by its process ID.

mod attached;
mod image;
mod network;
mod record;
mod running;

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_process::process::Process;
use hearth_switch::{Network, NetworkError};
use tokio::task::JoinSet;

pub use attached::{AttachError, Attached, attach};
pub use image::Image;
use network::Wired;
pub use network::{NetworkSpec, Place, end as end_network, network};
use record::Record;
pub use running::{Running, cut, cut_one, known, running};

use crate::command::Machine;
use crate::disk::{Cache, Disk, DiskError, Format, make_overlay};
use crate::network::{Link, PortForward, is_free};
use crate::run_dir::{RunDir, RunDirError};
use crate::vm::{Exit, Lifetime, NotDetachable, Shutdown, StartError, Vm};

/// A machine of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its configuration. The launch adds its first disk, and its first network card if it has a slot in the cluster's
    /// network; a forward to host port 0 gets its previous port, if that is free.
    pub machine: Machine,
    /// The raw image that its disk is first made from.
    pub image: PathBuf,
    /// Size of the disk in bytes; the size of the image, if none.
    pub disk_bytes: Option<u64>,
    /// The cache mode of its disk.
    pub cache: Cache,
}

/// The specification of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterSpec {
    /// The cluster's folder.
    pub state: PathBuf,
    /// The network of the machines; each has its own, if none.
    pub network: Option<NetworkSpec>,
    /// Its machines.
    pub members: Vec<Member>,
    /// Whether the machines can be left running.
    pub lifetime: Lifetime,
}

/// A running cluster. Dropping it kills its machines.
#[derive(Debug)]
pub struct Cluster {
    // Before the lock: no other launcher may start while machines are still running.
    machines: Vec<Vm>,
    images: Vec<Image>,
    // After the machines: it must end last.
    wired: Option<Wired>,
    state: PathBuf,
    lifetime: Lifetime,
    _lock: Lock,
}

/// A cluster operation failed.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// Two machines have the same name, and so the same folder.
    #[error("duplicate machine name {0:?}")]
    TwoOfOneName(String),
    /// Another launcher is active, or has machines running in its foreground.
    #[error("cluster {0}: another process is using it; stop that first")]
    InUse(PathBuf),
    /// A machine is running.
    #[error("machine {machine:?} is already running as process {pid}; stop it first")]
    Running {
        /// Name of the machine.
        machine: String,
        /// Process ID of its QEMU.
        pid: i32,
    },
    /// A file operation failed.
    #[error("cannot {step} {path}: {source}")]
    File {
        /// The step that failed.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The underlying I/O error.
        source: io::Error,
    },
    /// A machine's record has another format.
    #[error("cannot parse {path} ({source}); remove the cluster to start over")]
    Record {
        /// Path of the record.
        path: PathBuf,
        /// The underlying error.
        source: serde_json::Error,
    },
    /// A machine's folder cannot be used.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// A machine's disk could not be created.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A machine did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A machine cannot be detached.
    #[error(transparent)]
    NotDetachable(#[from] NotDetachable),
    /// A network operation failed.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

impl ClusterError {
    fn file(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { step, path, source }
    }
}

impl Cluster {
    /// Launches the machines, one after the other.
    ///
    /// # Errors
    /// If a machine cannot be started; then none is left running.
    pub async fn launch(spec: &ClusterSpec) -> Result<Self, ClusterError> {
        let mut names = BTreeSet::new();
        for member in &spec.members {
            if !names.insert(&member.machine.name) {
                return Err(ClusterError::TwoOfOneName(member.machine.name.clone()));
            }
        }
        let mut cluster = Self::open(&spec.state, spec.network.as_ref(), spec.lifetime).await?;
        for member in &spec.members {
            cluster.add(member).await?;
        }
        Ok(cluster)
    }

    /// Opens a cluster of which no machine is running, and starts its network.
    ///
    /// # Errors
    /// If a machine is running, or another process is using the cluster.
    pub async fn open(
        state: &Path,
        network: Option<&NetworkSpec>,
        lifetime: Lifetime,
    ) -> Result<Self, ClusterError> {
        let mut cluster = Self::locked(state, lifetime)?;
        // Checked before any is started: if one of them is running, none is started.
        for (name, record) in records(state)? {
            refuse_running(&name, &record)?;
        }
        if let Some(spec) = network {
            cluster.wired = Some(Wired::start(state, spec, lifetime).await?);
        }
        Ok(cluster)
    }

    /// Opens a cluster that was left running, for starting one of its machines again. The other machines and the
    /// network keep running, and do not belong to this handle.
    ///
    /// # Errors
    /// If another process is using the cluster, or its network is not running.
    pub async fn resume(
        state: &Path,
        network: Option<&NetworkSpec>,
        lifetime: Lifetime,
    ) -> Result<Self, ClusterError> {
        let mut cluster = Self::locked(state, lifetime)?;
        if let Some(spec) = network {
            cluster.wired = Some(Wired::find(state, spec).await?);
        }
        Ok(cluster)
    }

    fn locked(state: &Path, lifetime: Lifetime) -> Result<Self, ClusterError> {
        fs::create_dir_all(state).map_err(ClusterError::file("make", state))?;
        Ok(Self {
            machines: Vec::new(),
            images: Vec::new(),
            wired: None,
            state: state.to_owned(),
            lifetime,
            _lock: lock(state)?,
        })
    }

    /// Starts one more machine, or restarts one that has ended. Returns its index in [`Self::machines`].
    ///
    /// # Errors
    /// If it is running, or cannot be started. The others keep running.
    pub async fn add(&mut self, member: &Member) -> Result<usize, ClusterError> {
        let name = &member.machine.name;
        let place = self.machines.iter().position(|vm| vm.name() == name);
        // Another process may have started it last.
        if let Some(record) = Record::load(&self.state.join(name))? {
            refuse_running(name, &record)?;
        }
        let plug = self.wired.as_ref().and_then(|wired| wired.plug(name));
        let (vm, image) = launch_member(&self.state, member, plug, self.lifetime).await?;
        Ok(match place {
            Some(place) => {
                self.machines[place] = vm;
                self.images[place] = image;
                place
            }
            None => {
                self.machines.push(vm);
                self.images.push(image);
                self.machines.len() - 1
            }
        })
    }

    /// The machines, in the order in which they were added.
    pub fn machines(&self) -> &[Vm] {
        &self.machines
    }

    /// The machine of this name, running or ended.
    pub fn machine(&self, name: &str) -> Option<&Vm> {
        self.machines.iter().find(|vm| vm.name() == name)
    }

    /// The network of the machines.
    pub fn network(&self) -> Option<&Network> {
        self.wired.as_ref().map(|wired| &wired.network)
    }

    /// The address that a machine has by its slot in the network, whether it is running or not.
    pub fn address(&self, machine: &str) -> Option<Ipv4Addr> {
        let plug = self.wired.as_ref()?.plug(machine)?;
        Some(plug.address)
    }

    /// The host address of this port of a machine with a slot in the network, whether it is running or not.
    pub fn forwarded(&self, machine: &str, guest: u16) -> Option<SocketAddr> {
        let plug = self.wired.as_ref()?.plug(machine)?;
        let forwards = &mut plug.forwards.iter();
        let forwarded = forwards.find(|forwarded| forwarded.guest == guest)?;
        Some(forwarded.host)
    }

    /// How each machine's disk relates to the given image, in the same order.
    pub fn images(&self) -> &[Image] {
        &self.images
    }

    /// Presses the power buttons of all machines at once and waits for at most `bound` until they are off; then ends
    /// the remaining ones forcibly.
    ///
    /// # Errors
    /// If a process cannot be waited for or killed.
    pub async fn shutdown(&self, bound: Duration) -> io::Result<Vec<(Shutdown, Exit)>> {
        let mut tasks = JoinSet::new();
        for (index, machine) in self.machines.iter().enumerate() {
            let shutdown = machine.shutdown(bound);
            tasks.spawn(async move { (index, shutdown.await) });
        }
        let mut ends = Vec::new();
        while let Some(end) = tasks.join_next().await {
            let (index, end) = end.map_err(io::Error::other)?;
            ends.push((index, end?));
        }
        ends.sort_unstable_by_key(|(index, _)| *index);
        Ok(ends.into_iter().map(|(_, end)| end).collect())
    }

    /// Leaves the machines and their network running without this process; [`attach`] and [`network()`] find them
    /// again.
    ///
    /// # Errors
    /// If they were not launched as detachable. They are then killed.
    pub fn detach(self) -> Result<(), ClusterError> {
        for machine in self.machines {
            machine.detach()?;
        }
        if let Some(wired) = self.wired {
            wired.network.detach()?;
        }
        Ok(())
    }

    /// Removes a cluster: the folders of its machines and its network with their content. A folder that does not exist,
    /// or has no machines, is not changed.
    ///
    /// # Errors
    /// If machines are running, or files cannot be removed.
    pub fn remove(state: &Path) -> Result<(), ClusterError> {
        if !state.exists() {
            return Ok(());
        }
        let _lock = lock(state)?;
        let records = records(state)?;
        for (name, record) in &records {
            refuse_running(name, record)?;
        }
        // Only folders with a record: other files of the user are not removed.
        for (name, _) in records {
            let path = state.join(name);
            fs::remove_dir_all(&path).map_err(ClusterError::file("remove", &path))?;
        }
        network::remove(state)
    }
}

/// Excludes other launchers while it exists.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    /// Closing the file would not be enough: a process that another thread is just starting also has it open, until it
    /// executes another program.
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

fn lock(state: &Path) -> Result<Lock, ClusterError> {
    let path = state.join("lock");
    let file = File::options()
        .create(true)
        .write(true)
        .truncate(false)
        .open(&path)
        .map_err(ClusterError::file("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(Lock(file)),
        Err(TryLockError::WouldBlock) => Err(ClusterError::InUse(state.to_owned())),
        Err(TryLockError::Error(source)) => Err(ClusterError::file("lock", &path)(source)),
    }
}

/// The machines that have a record, sorted by name.
fn records(state: &Path) -> Result<Vec<(String, Record)>, ClusterError> {
    let mut records = Vec::new();
    let entries = match fs::read_dir(state) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(records),
        entries => entries.map_err(ClusterError::file("read", state))?,
    };
    for entry in entries {
        let entry = entry.map_err(ClusterError::file("read", state))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if let Some(record) = Record::load(&entry.path())? {
            records.push((name, record));
        }
    }
    records.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    Ok(records)
}

fn refuse_running(name: &str, record: &Record) -> Result<(), ClusterError> {
    match find(record)? {
        Some(process) => Err(ClusterError::Running {
            machine: name.to_owned(),
            pid: process.pid(),
        }),
        None => Ok(()),
    }
}

/// The process of a record, if it is running.
fn find(record: &Record) -> Result<Option<Process>, ClusterError> {
    match &record.process {
        Some(identity) => {
            Process::find(identity).map_err(ClusterError::file("read", Path::new("/proc")))
        }
        None => Ok(None),
    }
}

async fn launch_member(
    state: &Path,
    member: &Member,
    plug: Option<&network::Plug>,
    lifetime: Lifetime,
) -> Result<(Vm, Image), ClusterError> {
    let name = &member.machine.name;
    // Checked before a folder is made of it.
    member.machine.check().map_err(StartError::from)?;
    let run_dir = RunDir::create(state.join(name))?;
    let mut record = Record::load(run_dir.path())?.unwrap_or_default();
    record.process = None;
    // First of all: the record marks the folder as one of the cluster's.
    record.save(run_dir.path())?;

    let (disk, image) = prepare_disk(&run_dir, member).await?;
    let mut machine = member.machine.clone();
    machine.disks.insert(0, disk);
    keep_ports(&mut machine, &record.forwards);
    if let Some(plug) = plug {
        machine.nics.insert(0, plug.nic());
    }
    let mut vm = Vm::start(&machine, &run_dir, lifetime).await?;
    if let Some(plug) = plug {
        vm.add_forwards(&plug.forwards);
    }
    let identity = vm
        .identity()
        .map_err(ClusterError::file("read", Path::new("/proc")))?;
    record.process = Some(identity);
    record.forwards = vm.forwards().to_vec();
    record.save(run_dir.path())?;
    Ok((vm, image))
}

/// Makes the machine's disk, unless it exists.
async fn prepare_disk(run_dir: &RunDir, member: &Member) -> Result<(Disk, Image), ClusterError> {
    let (base, path) = (run_dir.file("base.img"), run_dir.file("disk.qcow2"));
    let image = if path.exists() {
        image::compare(&base, &member.image)
            .map_err(ClusterError::file("compare", &member.image))?
    } else {
        image::keep(&member.image, &base).map_err(ClusterError::file("keep", &member.image))?;
        // By its bare name, so that the cluster's folder can be moved.
        make_overlay(Path::new("base.img"), &path, member.disk_bytes).await?;
        Image::New
    };
    let disk = Disk {
        cache: member.cache,
        ..Disk::new(path, Format::Qcow2)
    };
    Ok((disk, image))
}

/// Replaces host port 0 by the previous port, if that is free.
fn keep_ports(machine: &mut Machine, last: &[PortForward]) {
    let links = machine.nics.iter_mut().map(|nic| &mut nic.link);
    for link in links {
        let Link::User(user) = link else { continue };
        for forward in user.forwards.iter_mut().filter(|forward| forward.host == 0) {
            let port = last
                .iter()
                .find(|last| last.guest == forward.guest)
                .map(|last| last.host.port());
            if let Some(port) = port.filter(|port| is_free(*port)) {
                forward.host = port;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accel::Accel;
    use crate::network::{Forward, Mac, Nic, UserNetwork};

    fn member(name: &str) -> Member {
        Member {
            machine: Machine::new(name, Accel::Tcg),
            image: PathBuf::from("/nonexistent/image"),
            disk_bytes: None,
            cache: Cache::default(),
        }
    }

    #[test]
    fn ports_of_last_time_are_kept_where_they_are_free() {
        let holder = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let taken = holder.local_addr().expect("its address");
        let free = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
            listener.local_addr().expect("its address")
        };
        let mut machine = Machine::new("a", Accel::Tcg);
        machine.nics.push(Nic {
            mac: Mac::of_machine(0),
            link: Link::User(UserNetwork {
                restricted: false,
                forwards: vec![
                    Forward::any(1),
                    Forward::any(2),
                    Forward { guest: 3, host: 9 },
                    Forward::any(4),
                ],
            }),
        });
        let last =
            [(1, free), (2, taken), (3, free)].map(|(guest, host)| PortForward { guest, host });
        keep_ports(&mut machine, &last);
        let Link::User(user) = &machine.nics[0].link else {
            panic!("it was a user network");
        };
        let hosts: Vec<u16> = user.forwards.iter().map(|forward| forward.host).collect();
        assert_eq!(hosts, [free.port(), 0, 9, 0]);
    }

    #[tokio::test]
    async fn one_launcher_at_a_time_and_names_differ() {
        let folder = tempfile::tempdir().expect("a folder");
        let spec = ClusterSpec {
            state: folder.path().join("cluster"),
            network: None,
            members: vec![member("a"), member("a")],
            lifetime: Lifetime::KillWithParent,
        };
        let error = Cluster::launch(&spec).await.expect_err("two of one name");
        assert!(matches!(error, ClusterError::TwoOfOneName(name) if name == "a"));

        fs::create_dir(&spec.state).expect("a folder");
        let held = lock(&spec.state).expect("locked");
        let spec = ClusterSpec {
            members: vec![member("a")],
            ..spec
        };
        assert!(matches!(
            Cluster::launch(&spec).await,
            Err(ClusterError::InUse(_))
        ));
        assert!(matches!(
            Cluster::remove(&spec.state),
            Err(ClusterError::InUse(_))
        ));
        drop(held);
        let error = Cluster::launch(&spec).await.expect_err("there is no image");
        assert!(error.to_string().contains("/nonexistent/image"), "{error}");
    }

    #[tokio::test]
    async fn only_our_own_folders_are_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path().join("cluster");
        Cluster::remove(&state).expect("nothing to remove");
        let ours = RunDir::create(state.join("a")).expect("a folder");
        Record::default().save(ours.path()).expect("a record");
        fs::write(ours.serial_log(), "log").expect("a log");
        fs::create_dir(state.join("other")).expect("a folder");
        fs::write(state.join("other/file"), "precious").expect("a file");
        Cluster::remove(&state).expect("removed");
        assert!(!ours.path().exists());
        assert!(state.join("other/file").exists());
    }

    #[tokio::test]
    async fn a_record_that_is_not_understood_is_not_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let run_dir = RunDir::create(folder.path().join("a")).expect("a folder");
        fs::write(run_dir.file("machine.json"), "{").expect("a broken record");
        let spec = ClusterSpec {
            state: folder.path().to_owned(),
            network: None,
            members: vec![member("a")],
            lifetime: Lifetime::KillWithParent,
        };
        let error = Cluster::launch(&spec).await.expect_err("a broken record");
        assert!(matches!(error, ClusterError::Record { .. }), "{error}");
    }
}
