//! Waits until the kernel announces a change of its devices.
//!
//! A disk on USB and an SD card appear seconds after PID 1 has started. Watching is level-triggered:
//! [`Uevents`] only reports *that* devices changed, and its user looks again, so that a lost or
//! merged announcement cannot lead to a wrong view. The kernel announces a disk, and each of its
//! partitions, after their device nodes exist.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

/// The multicast group in which the kernel itself announces.
const KERNEL: u32 = 1;

/// An announcement is at most this long.
const LONGEST: usize = 8 * 1024;

/// The kernel's announcements.
#[derive(Debug)]
pub struct Uevents {
    socket: OwnedFd,
}

impl Uevents {
    /// Starts to listen. What changes from now on ends the next wait.
    pub fn open() -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkKObjectUEvent,
        )?;
        // Port 0: the kernel chooses one.
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL))?;
        Ok(Self { socket })
    }

    /// Waits for the next change, at most until `deadline`; returns whether there was one. All
    /// changes since the last call count as one.
    ///
    /// Blocks its thread.
    pub fn changed(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            // Rounded up: a wait of zero milliseconds would be repeated until the deadline.
            let left = deadline.saturating_duration_since(Instant::now());
            let milliseconds = left.as_micros().div_ceil(1000);
            let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
            let mut ready = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            match poll(&mut ready, timeout) {
                Ok(0) if deadline <= Instant::now() => return Ok(false),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return self.drain().map(|()| true),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn drain(&self) -> io::Result<()> {
        let mut buffer = [0; LONGEST];
        loop {
            match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                // ENOBUFS: some were lost, which is a change as well.
                Ok(_) | Err(Errno::EINTR | Errno::ENOBUFS) => {}
                Err(Errno::EAGAIN) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_quiet_machine_changes_nothing_until_the_deadline() {
        let events = Uevents::open().unwrap();
        let deadline = Instant::now() + Duration::from_millis(20);
        // On a machine where devices come and go, there may be one.
        if !events.changed(deadline).unwrap() {
            assert!(Instant::now() >= deadline);
        }
    }

    /// A new interface is announced in its own network namespace.
    #[test]
    fn a_new_device_ends_the_wait() {
        crate::testing::in_own_network(async {
            let events = Uevents::open().unwrap();
            if !crate::testing::add_veth("one", "other").await {
                return;
            }
            let deadline = Instant::now() + Duration::from_secs(30);
            assert!(events.changed(deadline).unwrap());
        });
    }
}
