//! Test support: a terminal without a machine, and networks without neighbours.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tokio::time::timeout;

use crate::netlink::{Link, Netlink};

/// A pseudoterminal, as somebody who sits at a console has one. Hung up when dropped.
#[derive(Debug)]
pub struct Terminal {
    master: File,
    device: PathBuf,
    shown: Vec<u8>,
}

impl Terminal {
    /// A new one.
    pub fn new() -> io::Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let device = ptsname(&master, Vec::new())?;
        rustix::fs::fcntl_setfl(&master, OFlags::NONBLOCK)?;
        Ok(Self {
            device: PathBuf::from(device.into_string().map_err(io::Error::other)?),
            master: File::from(master),
            shown: Vec::new(),
        })
    }

    /// The device that a node opens.
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// Types a line.
    pub fn enter(&mut self, line: &str) -> io::Result<()> {
        self.master.write_all(format!("{line}\r").as_bytes())
    }

    /// All that was shown so far, what was typed included.
    pub fn shown(&mut self) -> io::Result<&str> {
        let mut buffer = [0; 4096];
        loop {
            match self.master.read(&mut buffer) {
                Ok(read) => self.shown.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // EIO: the device is not open.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => break,
                Err(error) => return Err(error),
            }
        }
        std::str::from_utf8(&self.shown).map_err(io::Error::other)
    }
}

/// For what takes seconds on a quiet machine.
const BOUND: Duration = Duration::from_secs(300);

/// Runs a test in a network namespace of its own, in which it may change everything. If creating a
/// namespace is not permitted, the test is skipped with a message. It fails when it does not end.
pub fn in_own_network(test: impl Future<Output = ()> + Send) {
    std::thread::scope(|scope| {
        let run = || {
            if nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).is_err() {
                eprintln!("skipped: creating network namespaces is not permitted");
                return;
            }
            // One thread, because a namespace belongs to the thread that created it.
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            let ended = runtime.block_on(async { timeout(BOUND, test).await });
            ended.expect("the test ends");
        };
        scope.spawn(run).join().expect("the test's thread");
    });
}

/// Two ends of a cable, `here` and `there`, both set up; prints a message and returns `None` if the kernel does not support them.
pub async fn cable(netlink: &Netlink) -> Option<[Link; 2]> {
    if !add_veth("here", "there").await {
        return None;
    }
    let mut ends = Vec::new();
    for name in ["here", "there"] {
        let link = netlink.link_named(name).await.expect("the link");
        netlink
            .set_up(link.index)
            .await
            .expect("the link is set up");
        ends.push(link);
    }
    ends.try_into().ok()
}

/// Creates a pair of connected Ethernet devices for a test; prints a message and returns false if
/// the kernel does not support them.
#[expect(clippy::disallowed_methods, reason = "the task is aborted here")]
pub async fn add_veth(one: &str, other: &str) -> bool {
    let (connection, handle, _) = rtnetlink::new_connection().expect("netlink");
    let connection = tokio::spawn(connection);
    let veth = rtnetlink::LinkVeth::new(one, other).build();
    let made = handle.link().add(veth).execute().await;
    connection.abort();
    if let Err(error) = &made {
        eprintln!("skipped: cannot create virtual Ethernet devices ({error})");
    }
    made.is_ok()
}
