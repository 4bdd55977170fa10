//! Boots machines under QEMU, as a normal user, with or without KVM.
//!
//! `cargo xtask run`, the benchmarks and the end-to-end tests are thin users of this library. It handles QEMU,
//! processes and consoles; of a node it only knows the console lines for programs ([`hearth_api::console`]).
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
//! let vm = Vm::start(&machine, &run_dir, Lifetime::KillWithParent).await?;
//! let home = vm.reached(Milestone::Home, Duration::from_secs(120)).await?;
//! println!("HOME after {:.1} s", home.at.as_secs_f64());
//! vm.power_cut().await?; // and Vm::start again boots it from the same disk
//! # Ok(())
//! # }
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`command`] | the configuration of a machine, and QEMU's command line for it |
//! | [`accel`] | KVM if it really works, else TCG |
//! | [`tsc`] | the time-stamp counter of emulated machines |
//! | [`program`] | QEMU itself: another one by a variable, its version |
//! | [`firmware`], [`disk`], [`network`], [`fw_cfg`], [`smbios`] | the parts of a machine |
//! | [`hardware`] | the kinds of disk controllers and network cards |
//! | [`tpm`] | the TPM, emulated by swtpm |
//! | [`switch`] (the crate `hearth-switch`) | the network that joins machines: switch, DHCP, gateway, faults |
//! | [`run_dir`] | a machine's folder: logs, sockets, variables |
//! | [`vm`] | a running machine: waits, power, how it ended |
//! | [`console`], [`qmp`] | the output of the machine, and QEMU's events |
//! | [`phases`] | the timeline of a boot |
//! | [`cluster`] | machines that are kept: launched again, left running, attached to |
//! | `hearth-process`, a crate below | processes that do not outlive their handle, identified permanently |
//! | [`artifacts`] | images and programs for the end-to-end tests |
//!
//! # Invariants
//! - No QEMU, and no swtpm beside it, outlives its handle, nor the process that made it, however that ends, unless it was explicitly detached.
//! - Every wait has a bound, and the error of a wait shows the machine's last console lines.
//! - Memory is bounded whatever a guest writes and however slowly it is read.
//! - Secrets (a node's parameters) are passed in files of mode 0600, never on command lines or in logs.
//! - Built images are never written to: machines write to overlays.

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
pub mod hardware;
mod journal;
pub mod keyboard;
mod kvm;
pub mod network;
pub mod phases;
pub mod program;
pub mod qmp;
pub mod run_dir;
pub mod smbios;
pub mod tpm;
pub mod tsc;
pub mod vm;

pub use hearth_switch as switch;
