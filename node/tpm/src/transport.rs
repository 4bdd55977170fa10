//! How commands reach a TPM: the kernel's resource manager, or the socket of an emulator.
//!
//! A transport carries whole commands and whole responses and knows nothing of their content. It is a trait so that tests
//! can stand between: record, change and cut.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::wire::MAX_SIZE;

/// The size of a response's header: tag, size, code.
const HEADER: usize = 10;

/// How long an emulator may take for one command.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A way to a TPM. Only one caller uses it at a time.
pub trait Transport: Send {
    /// Sends one command and returns its response, at most 4096 bytes of each.
    ///
    /// After an error, it is not known whether the command was executed. The next call must not return the response of
    /// an earlier one.
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>>;
}

/// `/dev/tpmrm0`: the kernel's resource manager gives each open file its own objects and sessions, and flushes them when
/// it is closed.
///
/// Use it on a thread in which signals are blocked: the kernel may give up a command when one arrives.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    /// None after an error: a response may be outstanding.
    file: Option<File>,
}

impl Device {
    /// The device of the machine's first TPM.
    pub const PATH: &str = "/dev/tpmrm0";

    /// Opens the device.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut device = Self {
            path: path.to_owned(),
            file: None,
        };
        device.file = Some(device.reopen()?);
        Ok(device)
    }

    fn reopen(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(&self.path)
    }
}

impl Transport for Device {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        let mut file = match self.file.take() {
            Some(file) => file,
            None => self.reopen()?,
        };
        // The driver takes a command with one write, and gives its response to one read.
        let written = file.write(command)?;
        if written != command.len() {
            let message = format!("expected to write {} bytes, got {written}", command.len());
            return Err(io::Error::new(io::ErrorKind::WriteZero, message));
        }
        let mut response = vec![0; MAX_SIZE];
        let size = file.read(&mut response)?;
        response.truncate(size);
        self.file = Some(file);
        Ok(response)
    }
}

/// The socket of the emulator swtpm (`swtpm socket --tpm2 --server type=unixio,path=…`). It has no resource manager: what
/// a client leaves loaded stays loaded.
#[derive(Debug)]
pub struct SwtpmSocket {
    path: PathBuf,
    /// None after an error: a response may be outstanding.
    stream: Option<UnixStream>,
}

impl SwtpmSocket {
    /// Connects to the socket. The emulator has one client at a time.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let mut socket = Self {
            path: path.to_owned(),
            stream: None,
        };
        socket.stream = Some(socket.reconnect()?);
        Ok(socket)
    }

    fn reconnect(&self) -> io::Result<UnixStream> {
        let stream = UnixStream::connect(&self.path)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(stream)
    }
}

impl Transport for SwtpmSocket {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => self.reconnect()?,
        };
        stream.write_all(command)?;
        let mut response = vec![0; HEADER];
        stream.read_exact(&mut response)?;
        let size = u32::from_be_bytes([response[2], response[3], response[4], response[5]]);
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if !(HEADER..=MAX_SIZE).contains(&size) {
            let message =
                format!("size of the response: expected {HEADER} to {MAX_SIZE}, got {size}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        response.resize(size, 0);
        stream.read_exact(&mut response[HEADER..])?;
        self.stream = Some(stream);
        Ok(response)
    }
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        (**self).transmit(command)
    }
}
