//! How fast this host's time-stamp counter runs, for the guests to which TCG
//! shows it.
//!
//! TCG has no counter of its own: a guest reads the host's, less an offset. It
//! is exact and the same for all virtual CPUs, and reading it costs next to
//! nothing. But a guest does not know its rate: Linux measures it against
//! emulated timers, which gives nonsense on a busy host. So images are told to
//! keep time by the HPET, and then every look at a clock is an access to a
//! device under QEMU's one lock, for which programs have to enter the kernel as
//! well. On a machine with Kubernetes that was an eighth of all that its
//! processors did. Whoever boots a kernel directly can tell it the rate instead.
//!
//! Where the host's own counter is not constant nothing is said, and the guest
//! goes by its HPET.

// Reading the counter, which the standard library offers no safe way for.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use crate::accel::CPUINFO;

/// It counts at one rate, whatever the processor does.
const CONSTANT: [&str; 2] = ["constant_tsc", "nonstop_tsc"];
/// A reading is exact to less than a microsecond, so the rate is to less than
/// one in ten thousand, which is what a guest's clock may be off by in any case.
const MEASURED: Duration = Duration::from_millis(20);
/// The closest of so many readings is taken: one may be interrupted.
const READINGS: usize = 16;

/// A counter's rate, in kHz.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(u32);

impl Rate {
    /// A rate that is known, in kHz.
    pub const fn of_khz(khz: u32) -> Self {
        Self(khz)
    }

    /// This host's. Measured once, which takes a moment; none where it is not
    /// constant, or not known to be.
    pub fn of_host() -> Option<Self> {
        static RATE: OnceLock<Option<Rate>> = OnceLock::new();
        *RATE.get_or_init(|| {
            let cpuinfo = fs::read_to_string(CPUINFO).ok()?;
            is_constant(&cpuinfo).then(measure).flatten()
        })
    }
}

/// What a guest's kernel is told: the rate, that it can rely on it, and that it
/// goes by it. The last word about a clock source counts, so this stands
/// behind what the image says.
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
    // SAFETY: every x86-64 processor has the instruction, and Linux lets
    // programs use it unless they have asked to be kept from it.
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

    /// Where it can be measured at all, twice gives the same.
    #[test]
    fn a_rate_is_measured_again_as_it_was() {
        if let (Some(Rate(one)), Some(Rate(other))) = (measure(), measure()) {
            let apart = f64::from(one.abs_diff(other)) / f64::from(one);
            assert!(apart < 0.01, "{one} and {other} kHz");
        }
    }
}
