//! The rate of this host's time-stamp counter, for guests that see it under TCG.
//!
//! TCG has no counter of its own: a guest reads the host's, less an offset. It is exact and the same for all virtual
//! CPUs, and reading it is almost free. But a guest does not know its rate: Linux measures it against emulated timers,
//! which gives wrong results on a busy host. So images use the HPET as clock source, and then every reading of a clock
//! is an access to a device under QEMU's global lock, for which programs also have to enter the kernel. On a machine
//! with Kubernetes that was an eighth of its processor time. A direct boot of a kernel can pass the rate instead.
//!
//! If the host's own counter is not constant, nothing is passed, and the guest uses its HPET.

// Reading the counter, for which the standard library has no safe function.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use crate::accel::CPUINFO;

/// The CPU flags of a counter with a constant rate.
const CONSTANT: [&str; 2] = ["constant_tsc", "nonstop_tsc"];
/// A reading is exact to less than a microsecond, so the rate is exact to less than one in ten thousand, which is
/// within the error of a guest's clock in any case.
const MEASURED: Duration = Duration::from_millis(20);
/// The closest of this many readings is used: one may be interrupted.
const READINGS: usize = 16;

/// A counter's rate, in kHz.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(u32);

impl Rate {
    /// A known rate, in kHz.
    pub const fn of_khz(khz: u32) -> Self {
        Self(khz)
    }

    /// The rate of this host. Measured once, which takes a moment; none if it is not constant, or not known to be.
    pub fn of_host() -> Option<Self> {
        static RATE: OnceLock<Option<Rate>> = OnceLock::new();
        *RATE.get_or_init(|| {
            let cpuinfo = fs::read_to_string(CPUINFO).ok()?;
            is_constant(&cpuinfo).then(measure).flatten()
        })
    }
}

/// The parameters of a guest's kernel: the rate, that it is reliable, and that it is the clock source. The last clock
/// source on the command line counts, so these follow the image's parameters.
impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(khz) = self;
        write!(f, "tsc_early_khz={khz} tsc=reliable clocksource=tsc")
    }
}

fn is_constant(cpuinfo: &str) -> bool {
    let flags = crate::accel::flags(cpuinfo).map(Iterator::collect);
    let processors: Vec<HashSet<&str>> = flags.collect();
    let all_have = |flag| processors.iter().all(|flags| flags.contains(flag));
    !processors.is_empty() && CONSTANT.into_iter().all(all_have)
}

fn measure() -> Option<Rate> {
    let (counted, began) = reading();
    sleep(MEASURED);
    let (counts, now) = reading();
    let ticks = u128::from(counts.checked_sub(counted)?);
    let nanoseconds = now.duration_since(began).as_nanos().max(1);
    let khz = ticks * 1_000_000 / nanoseconds;
    u32::try_from(khz).ok().filter(|khz| *khz > 0).map(Rate)
}

/// The counter and the clock at the same moment.
fn reading() -> (u64, Instant) {
    let one = || {
        let before = counter();
        let now = Instant::now();
        let after = counter();
        (after.wrapping_sub(before), before.midpoint(after), now)
    };
    let closest =
        (1..READINGS).map(|_| one()).fold(
            one(),
            |best, next| {
                if next.0 < best.0 { next } else { best }
            },
        );
    (closest.1, closest.2)
}

fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it unless they have disabled it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_constant_if_every_processor_says_so() {
        let of = |flags: &[&str]| {
            let processors = flags
                .iter()
                .map(|flags| format!("flags\t\t: fpu {flags}\n"));
            is_constant(&processors.collect::<String>())
        };
        assert!(of(&["constant_tsc nonstop_tsc"; 2]));
        assert!(!of(&["constant_tsc nonstop_tsc", "constant_tsc"]));
        assert!(!of(&["tsc nonstop_tsc"]));
        assert!(!of(&[]));
    }

    /// If it can be measured, two measurements agree.
    #[test]
    fn a_rate_is_measured_again_as_it_was() {
        if let (Some(Rate(one)), Some(Rate(other))) = (measure(), measure()) {
            let apart = f64::from(one.abs_diff(other)) / f64::from(one);
            assert!(apart < 0.01, "{one} and {other} kHz");
        }
    }
}
