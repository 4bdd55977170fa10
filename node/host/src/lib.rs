//! What one node keeps and knows of itself: where its files are, what it was told, its disk and its certificates.
//!
//! Everything here concerns this machine alone. Whatever asks somebody else, curators or etcd, is in a crate above.

pub mod boot_record;
pub mod bundle;
pub mod cluster_state;
pub mod console;
pub mod credentials;
pub mod directory;
pub mod esp;
pub mod extensions;
pub mod failpoint;
pub mod handover;
pub mod image;
pub mod layout;
pub mod logs;
pub mod networking;
pub mod parameters;
pub mod pki;
pub mod power;
pub mod record;
pub mod storage;
