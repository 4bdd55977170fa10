//! The wire protocol between Hearth nodes, and between nodes and operators.
//!
//! Contains the protobuf messages and services, the identities of callers, the certificates and TLS
//! settings that prove them, the table of who may call what, the server's accept loop and
//! authorization, and the client of the curators. Both ends of every connection use this crate, so
//! what one side requires is what the other side sends.
//!
//! It knows nothing of how a node is built: no paths, no etcd, no supervisor.
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests use the real clock and plain files"
    )
)]

pub mod certificates;
pub mod client;
#[cfg(test)]
mod compatibility;
pub mod console;
pub mod disk_conditions;
pub mod escrow;
pub mod extension;
pub mod first_contact;
pub mod hosts;
pub mod identity;
pub mod labels;
mod lifetime;
pub mod manifests;
pub mod names;
pub mod node_settings;
pub mod owner;
pub mod ownership;
pub mod permissions;
pub mod proofs;
pub mod provider;
pub mod pushback;
pub mod ranges;
pub mod recovery;
mod redacted;
pub mod registries;
pub mod schema;
pub mod secrets_keys;
pub mod server;
pub mod settings;
pub mod shares;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod time_server;
pub mod tls;
pub mod transport;

/// The code generated from the proto files. The nesting follows the package names, by which the
/// generated modules refer to each other.
#[allow(missing_docs, unreachable_pub, clippy::all)] // Generated; documented in the proto files.
mod generated {
    pub(crate) mod hearth {
        pub mod v1 {
            tonic::include_proto!("hearth.v1");
        }
        pub(crate) mod private {
            pub mod v1 {
                tonic::include_proto!("hearth.private.v1");
            }
        }
    }
}

pub use generated::hearth::private::v1 as private;
pub use generated::hearth::v1;

impl v1::TpmUsage {
    /// Its name as in messages: without the prefix that all names have.
    pub fn word(self) -> &'static str {
        let name = self.as_str_name();
        name.strip_prefix("TPM_USAGE_").unwrap_or(name)
    }
}

/// The compiled proto files (a `google.protobuf.FileDescriptorSet` with its imports and our method
/// options), for reflection and for tests.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// An error with all its causes in one line: for logs and messages to users.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        // Some libraries repeat their cause in their own message.
        if !text.ends_with(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
        source = error.source();
    }
    text
}
