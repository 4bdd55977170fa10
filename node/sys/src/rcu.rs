//! Grace periods of the kernel's RCU (read-copy-update).
//!
//! Many changes wait in the kernel until each CPU has shown that it no longer reads the old state: of control groups, of
//! device-mapper volumes, of packet sockets, of mounts. Usually the kernel lets some timer ticks pass meanwhile. While it
//! boots it interrupts the CPUs instead (expedited grace periods) and waits hardly at all, and it stops that when it
//! starts PID 1. For a node the boot goes on until it is HOME: nothing else is to be disturbed before, and these waits are
//! a part of its time.

use std::{fs, io};

/// Whether the kernel expedites all grace periods from now on. Needs sysfs.
///
/// # Errors
/// If the kernel was built for one CPU, which never waits.
#[expect(clippy::disallowed_methods, reason = "a control file of the kernel")]
pub fn expedite(on: bool) -> io::Result<()> {
    fs::write("/sys/kernel/rcu_expedited", if on { "1" } else { "0" })
}
