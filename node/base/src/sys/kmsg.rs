//! The kernel's log, brought into ours.
//!
//! `/dev/kmsg` gives one record for each read: `PRIORITY,SEQUENCE,MICROSECONDS,…;TEXT`,
//! then lines of properties that begin with a space. A reader that was too
//! slow gets `EPIPE` once and goes on with the oldest record that is left.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

use tokio::io::unix::AsyncFd;

use crate::logtree::{LogTree, Severity};
use crate::supervisor::{Context, Outcome};

const PATH: &str = "/dev/kmsg";
/// The kernel's own bound is 1 KiB of text and as much of properties.
const RECORD: usize = 8192;

/// Copies the kernel's records into the log tree, under this runnable's name.
pub async fn run(ctx: Context, log_tree: LogTree) -> Outcome {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(PATH)?;
    let file = AsyncFd::register(file)?;
    ctx.healthy();
    loop {
        tokio::select! {
            record = next(&file) => match record? {
                Some(record) => {
                    if let Some((severity, text)) = parse(&record) {
                        log_tree.append_raw(ctx.name(), severity, &text);
                    }
                }
                None => tracing::warn!("the kernel said more than could be read in time"),
            },
            () = ctx.cancelled() => return Ok(()),
        }
    }
}

/// The next record; `None` if some were overwritten.
async fn next(file: &AsyncFd<File>) -> io::Result<Option<Vec<u8>>> {
    let mut record = vec![0; RECORD];
    loop {
        let mut ready = file.readable().await?;
        let read = ready.try_io(|file| file.get_ref().read(&mut record));
        match read {
            Ok(Ok(length)) => {
                record.truncate(length);
                return Ok(Some(record));
            }
            Ok(Err(error)) if error.raw_os_error() == Some(libc::EPIPE) => return Ok(None),
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
}

/// Severity and text of a record; `None` for what user space wrote there.
fn parse(record: &[u8]) -> Option<(Severity, String)> {
    let record = String::from_utf8_lossy(record);
    let (head, rest) = record.split_once(';')?;
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    const FACILITY_KERNEL: u32 = 0;
    if priority >> 3 != FACILITY_KERNEL {
        return None;
    }
    let severity = match priority & 7 {
        0..=3 => Severity::Error,
        4 => Severity::Warning,
        5 | 6 => Severity::Info,
        _ => return None,
    };
    let text = rest.lines().take_while(|line| !line.starts_with(' '));
    Some((severity, text.collect::<Vec<_>>().join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_severity_and_text() {
        let record = b"4,1234,5678,-;clocksource: unstable\n SUBSYSTEM=x\n DEVICE=y\n";
        let (severity, text) = parse(record).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert_eq!(text, "clocksource: unstable");
    }

    #[test]
    fn what_is_not_the_kernels_is_left_out() {
        for record in [
            "12,1,2,-;from user space",
            "7,1,2,-;debug",
            "x,1;y",
            "",
            ";",
            "6",
        ] {
            assert_eq!(parse(record.as_bytes()), None, "{record:?}");
        }
    }
}
