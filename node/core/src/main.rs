//! `/init`: PID 1, and the node core, which PID 1 starts from the same binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::process::id() == 1 {
        hearth_core::pid1::run()
    }
    #[cfg(feature = "debug-service")]
    if let Some(code) = hearth_core::debug::run_injected_fault() {
        return code;
    }
    hearth_core::boot::run()
}
