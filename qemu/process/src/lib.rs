//! Running programs that may outlive this process: a machine's QEMU, a network's switch.
//!
//! | module | what |
//! |---|---|
//! | [`spawn`] | starts a process that does not outlive this one, unless it is detachable |
//! | [`process`] | a process, identified even if its process ID is reused |
//! | [`folder`] | the working folder of such a process, accessible for its owner only |
//! | [`readiness`] | waiting for a descriptor |
//!
//! Nothing here depends on which program it is. The two kinds of `unsafe` code, the hook between fork and exec and the
//! registration of a descriptor, are in small modules of their own.

pub mod folder;
pub mod process;
pub mod readiness;
pub mod spawn;
