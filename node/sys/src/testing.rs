//! Test support: a terminal without a machine.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

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
