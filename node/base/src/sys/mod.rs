//! What a node does with the machine below it: files, disks, network, clock.
//!
//! Nothing here knows of clusters, roles or parameters. Each module wraps one
//! mechanism of the kernel, gives it typed errors that name the step that
//! failed, and leaves the decision what to do about it to its caller.
//!
//! `unsafe` stands in the private module `raw` and nowhere else.

pub mod block;
pub mod child;
pub mod dm;
pub mod files;
pub mod fw_cfg;
pub mod gpt;
pub mod mkfs;
pub mod mounts;
mod raw;
pub mod slots;
