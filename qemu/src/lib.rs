//! Boots machines under QEMU, as a normal user, with or without KVM.
//!
//! `cargo xtask run`, the benchmarks and the end-to-end tests are thin users
//! of this library: it knows QEMU, processes and consoles, and nothing of what
//! a node is but the lines that one prints for programs
//! ([`hearth_api::console`]).
//!
//! ```no_run
//! # async fn boot() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use hearth_api::console::Milestone;
//! use hearth_qemu::{accel, command::{Boot, Machine}, disk::{Disk, Format}, firmware::Firmware};
//! use hearth_qemu::{run_dir::RunDir, vm::{Lifetime, Vm}};
//!
//! let mut machine = Machine::new("node-0", accel::choose(accel::Choice::Auto)?.accel);
//! machine.boot = Boot::Uefi(Firmware::locate()?);
//! machine.disks = vec![Disk::new("disk.qcow2", Format::Qcow2)];
//! let run_dir = RunDir::create("target/node-0")?;
//! let vm = Vm::start(&machine, &run_dir, Lifetime::Tied).await?;
//! let home = vm.reached(Milestone::Home, Duration::from_secs(120)).await?;
//! println!("HOME after {:.1} s", home.at.as_secs_f64());
//! vm.power_cut().await?; // and Vm::start again boots it from the same disk
//! # Ok(())
//! # }
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`command`] | what a machine is made of, and QEMU's command line for it |
//! | [`accel`] | KVM where it truly works, else TCG |
//! | [`tsc`] | what an emulated machine's kernel is told of time |
//! | [`firmware`], [`disk`], [`network`], [`fw_cfg`] | the parts of a machine |
//! | [`switch`] (the crate `hearth-switch`) | the network that joins machines: switch, DHCP, gateway, faults |
//! | [`run_dir`] | a machine's folder: logs, sockets, variables |
//! | [`vm`] | a running machine: waits, power, how it ended |
//! | [`console`], [`qmp`] | what it says, what QEMU says |
//! | [`phases`] | the timeline of a boot |
//! | [`cluster`] | machines that are kept: launched again, left running, found |
//! | `hearth-process`, a crate below | processes that do not outlive their handle, told apart for ever |
//! | [`artifacts`] | what the end-to-end tests boot |
//!
//! # Invariants
//! - No QEMU outlives its handle, nor the process that made it, however that
//!   one ends, unless it was explicitly detached.
//! - Every wait has a bound, and an error of a wait shows the machine's last
//!   words.
//! - Memory is bounded whatever a guest says and however slowly it is read.
//! - Secrets (a node's parameters) go through files of mode 0600, never
//!   through command lines or logs.
//! - What is built is never written to: machines write to overlays.

pub mod accel;
pub mod artifacts;
pub mod cluster;
pub mod command;
mod command_line;
pub mod console;
mod control;
pub mod disk;
pub mod firmware;
pub mod fw_cfg;
mod journal;
mod kvm;
pub mod network;
pub mod phases;
pub mod qmp;
pub mod run_dir;
pub mod tsc;
pub mod vm;

pub use hearth_switch as switch;
