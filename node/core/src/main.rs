//! `/init`: PID 1, and the node core, which PID 1 forks. The kubelet starts it under another name, for the credentials of
//! registries.

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::process::id() == 1 {
        hearth_core::pid1::run();
        return hearth_core::boot::run();
    }
    if let Some(code) = hearth_kubernetes::registries::provider::run_if_called() {
        return code;
    }
    #[cfg(feature = "debug-service")]
    if let Some(code) = hearth_core::debug::run_injected_fault() {
        return code;
    }
    hearth_core::boot::run()
}
