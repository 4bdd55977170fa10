//! What it takes to run a program that is not ours to wait for: a machine's QEMU, a network's switch.
//!
//! | module | what |
//! |---|---|
//! | [`spawn`] | starts a process that does not outlive this one, unless it may |
//! | [`process`] | a process told apart from every other that may come to bear its number |
//! | [`folder`] | the folder that such a process works in, for its owner alone |
//! | [`readiness`] | waiting for a descriptor |
//!
//! Nothing here knows which program it is. Both kinds of `unsafe` that this takes, the hook between fork and exec and the
//! registration of a descriptor, stand in small modules of their own.

pub mod folder;
pub mod process;
pub mod readiness;
pub mod spawn;
