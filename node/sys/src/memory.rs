//! The memory of the machine, and who loses it first.

use std::{fs, io};

/// All memory that the kernel manages, in bytes.
pub fn total() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// When the machine runs out of memory, the kernel ends other processes before this one and before
/// those that it starts from now on: -1000 (never) to 1000 (first), see `oom_score_adj` in proc(5).
#[expect(clippy::disallowed_methods, reason = "a control file of the kernel")]
pub fn set_oom_score(score: i16) -> io::Result<()> {
    fs::write("/proc/self/oom_score_adj", score.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_the_kernel_says() {
        let text = fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find(|line| line.starts_with("MemTotal:"));
        let kilobytes: u64 = line
            .unwrap()
            .split_whitespace()
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        assert_eq!(total(), kilobytes * 1024);
    }
}
