//! Reads the kernel log record by record.
//!
//! Each read of `/dev/kmsg` returns one record. Records that were overwritten before they were read
//! are always reported.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;

use super::raw::Watched;

/// The kernel's log device.
pub const DEVICE: &str = "/dev/kmsg";

/// The kernel truncates records at 8 KiB.
const MAX_RECORD: usize = 8 * 1024;

/// Why the kernel log cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("kernel log {device}: cannot {step}")]
pub struct KmsgError {
    device: String,
    step: &'static str,
    source: io::Error,
}

/// A record of the kernel log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// From 0 (the system is unusable) to 7 (debugging), as in syslog(3).
    pub level: u8,
    /// The time since the machine started.
    pub at: Duration,
    /// The text, without control characters.
    pub text: String,
}

/// What a read returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A record.
    Record(Record),
    /// Some records were overwritten before they were read.
    Missed,
}

/// A reader of the kernel log.
#[derive(Debug)]
pub struct Kmsg {
    device: String,
    file: Watched,
}

impl Kmsg {
    /// Opens the log; reading starts with the oldest record.
    ///
    /// Must be called within a tokio runtime.
    pub fn open(device: &Path) -> Result<Self, KmsgError> {
        let name = device.display().to_string();
        let failed = |step| {
            let device = name.clone();
            move |source| KmsgError {
                device,
                step,
                source,
            }
        };
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(device)
            .map_err(failed("open it"))?;
        let file = Watched::new(file).map_err(failed("watch it"))?;
        Ok(Self { device: name, file })
    }

    /// Waits for the next item. Cancel safe.
    pub async fn next(&mut self) -> Result<Item, KmsgError> {
        let failed = |source| KmsgError {
            device: self.device.clone(),
            step: "read it",
            source,
        };
        let mut buffer = [0; MAX_RECORD];
        loop {
            match self.file.read(&mut buffer).await {
                Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(length) => {
                    if let Some(record) = parse(&buffer[..length]) {
                        return Ok(Item::Record(record));
                    }
                }
                // The next read continues with the oldest available record.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {
                    return Ok(Item::Missed);
                }
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

/// `level and facility,number,microseconds,flags[,…];text`, followed by lines of further fields
/// that begin with a space.
fn parse(record: &[u8]) -> Option<Record> {
    let record = String::from_utf8_lossy(record);
    let (header, text) = record.split_once(';')?;
    let mut fields = header.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let at: u64 = fields.nth(1)?.parse().ok()?;
    let text = text.lines().next().unwrap_or_default();
    Some(Record {
        level: (priority & 7) as u8,
        at: Duration::from_micros(at),
        text: text.replace(char::is_control, " "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read() {
        let record = parse(b"6,339,5140900,-;NET: Registered \x1b[1m family\n SUBSYSTEM=x\n");
        let record = record.unwrap();
        assert_eq!(record.level, 6);
        assert_eq!(record.at, Duration::from_micros(5_140_900));
        assert_eq!(record.text, "NET: Registered  [1m family");
        // A record from user space: facility 1.
        assert_eq!(parse(b"12,5,7,-,caller=T1;hello\n").unwrap().level, 4);
        for bad in [
            &b""[..],
            b"6,1;x",
            b"x,1,2,-;text",
            b"6,1,2,-",
            b"6,1,x,-;t",
            b"\xff;",
        ] {
            assert_eq!(parse(bad), None);
        }
    }

    #[tokio::test]
    async fn this_machines_log_is_read_if_it_may_be() {
        match Kmsg::open(Path::new(DEVICE)) {
            Ok(mut kmsg) => {
                let item = tokio::time::timeout(Duration::from_secs(5), kmsg.next()).await;
                // An empty log is not an error, an unreadable one is.
                if let Ok(item) = item {
                    item.unwrap();
                }
            }
            Err(error) => eprintln!("skipped: {error}: {}", error.source),
        }
    }
}
