//! The end-to-end tests: each module is a suite.
//!
//! All suites are one program: linked once, and its tests are spread over all places for machines, so that no place is
//! empty while the last test of a suite ends.

mod boot;
mod bootstrap_cuts;
mod certificates;
mod clients;
mod clock;
mod commands;
mod conformance;
mod copies;
mod disk_faults;
mod disks;
mod disown_cuts;
mod extensions;
mod greed;
mod ha;
mod hardware;
mod history;
mod installer;
mod interfaces;
mod kubernetes;
mod machine;
mod measured;
mod membership;
mod membership_cuts;
mod memory;
mod netsplit;
mod network;
mod newcomer;
mod node_network;
mod parameters;
mod pid1;
mod power_cut;
mod power_cut_sweep;
mod register_cuts;
mod registration;
mod screen;
mod secrets;
mod setup;
mod sources;
mod storage;
