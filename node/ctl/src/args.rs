//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use hearth_api::client::Endpoint;
use hearth_api::names::PORT_NODE_MANAGEMENT;

/// Of URLs without one.
const HTTPS: u16 = 443;

/// Looks at and runs clusters of Hearth machines.
#[derive(Debug, Parser)]
#[command(name = "hearthctl", version, propagate_version = false)]
pub(crate) struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, ClapArgs)]
pub(crate) struct Global {
    /// File with the contexts [default: hearth/config.json in
    /// $XDG_CONFIG_HOME or ~/.config]
    #[arg(long, global = true, env = "HEARTH_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Use this context instead of the current one
    #[arg(long, global = true, env = "HEARTH_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,

    /// Talk to this node instead of those in the context; can be repeated
    #[arg(long = "endpoint", global = true, value_name = "HOST[:PORT]")]
    pub endpoints: Vec<Endpoint>,

    /// How long the cluster may take to answer, such as 500ms, 10s, 2m
    #[arg(long, global = true, default_value = "10s", value_parser = duration, value_name = "TIME")]
    pub timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The cluster as a whole
    #[command(subcommand)]
    Cluster(Cluster),
    /// Its nodes
    #[command(subcommand)]
    Node(Node),
    /// The consensus behind the control plane
    #[command(subcommand)]
    Etcd(Etcd),
    /// Kubernetes on the cluster
    #[command(subcommand)]
    Kubernetes(Kubernetes),
    /// The files with which a cluster is founded and owned
    #[command(subcommand)]
    Owner(Owner),
    /// The clusters that this tool knows
    #[command(subcommand)]
    Context(Context),
    /// Print the version of this tool
    Version,
    /// Print a script that completes this tool's arguments
    Completion {
        /// For which shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Cluster {
    /// Exchange the owner key for a certificate, and remember the cluster
    ///
    /// The cluster proves its CA with the first-contact secret, so that
    /// nobody in between can pose as it. Can be repeated at any time.
    TakeOwnership {
        /// Private key whose public half is in the bootstrap parameters
        /// (PKCS #8, PEM)
        #[arg(long, value_name = "FILE")]
        owner_key: PathBuf,
        /// The first-contact secret in the bootstrap parameters (64
        /// hexadecimal digits)
        #[arg(long, value_name = "FILE")]
        first_contact_secret: PathBuf,
        /// Name of the context [default: the first 8 digits of the cluster ID]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// Show the cluster's ID, configuration and control plane
    Info {
        #[command(flatten)]
        output: Output,
    },
    /// Print the ticket with which machines ask to be registered
    ///
    /// It belongs into the register parameters of machines that are to become
    /// nodes. Whoever has it can ask, and no more: each machine is approved.
    Ticket {
        /// Make a new one: with the old one nobody can register any more.
        /// Nodes, and machines that have registered, keep their place
        #[arg(long)]
        rotate: bool,
        #[command(flatten)]
        output: Output,
    },
    /// What can be changed of a living cluster
    #[command(subcommand)]
    Configure(Configure),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Configure {
    /// Show the configuration
    Get {
        #[command(flatten)]
        output: Output,
    },
    /// Change a setting; the others are decided when a cluster is founded
    Set {
        /// Which
        #[arg(value_enum)]
        setting: Setting,
        /// To what, all at once: none empties it
        #[arg(value_name = "VALUE")]
        values: Vec<String>,
        #[command(flatten)]
        output: Output,
    },
}

/// What of a living cluster can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Setting {
    /// Which labels of nodes Kubernetes' nodes bear, too: keys, or beginnings
    /// of keys followed by "*"
    SynchronizedLabels,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Kubernetes {
    /// Print a file by which kubectl speaks with the cluster
    ///
    /// It holds no secret: kubectl calls this program for a certificate, as
    /// the user of the present context, whenever it needs one.
    Kubeconfig {
        /// Write it to this file instead, for your eyes only. What was there
        /// is replaced
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Where an API server is reached from here, such as
        /// https://127.0.0.1:6443 [default: one that answers, by the routes
        /// of the context]
        #[arg(long, value_name = "URL", value_parser = server_url)]
        server: Option<String>,
        /// The name by which the API server proves itself [default:
        /// "kubernetes", which all have, at whatever address]
        #[arg(long, value_name = "NAME")]
        tls_server_name: Option<String>,
        /// Put a certificate and its private key into the file. They are good
        /// for an hour
        #[arg(long)]
        embed: bool,
    },
    /// Print a certificate for kubectl, which calls this itself
    Credential,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Node {
    /// List the nodes
    List {
        #[command(flatten)]
        output: Output,
        /// Go on showing what changes, until interrupted
        #[arg(long)]
        watch: bool,
    },
    /// Show all that the cluster knows of one node
    Describe {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        output: Output,
    },
    /// Let a machine that has registered become a node
    ///
    /// Compare the public key with the one on the machine's console first: the
    /// register ticket alone does not say which machine came with it.
    Approve {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        output: Output,
    },
    /// What a node is there for
    #[command(subcommand)]
    Role(Role),
    /// Names and values that a node is found by
    #[command(subcommand)]
    Label(Label),
    /// Take a node out of service, for good
    ///
    /// It leaves consensus, wipes its keys and loses its access. Then it can be
    /// deleted. It never comes back under this ID.
    Decommission {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        sure: Sure,
        #[command(flatten)]
        wait: Wait,
        #[command(flatten)]
        output: Output,
    },
    /// Forget a node
    ///
    /// All but a tombstone, so that the machine is told to wipe its keys if it
    /// ever comes back. A node that is UP is decommissioned first, unless it
    /// is lost.
    Delete {
        #[command(flatten)]
        which: Which,
        /// Though it is UP and keeps its keys until it asks for its cluster
        /// again: for machines that are lost
        #[arg(long)]
        bypass_not_decommissioned: bool,
        /// Though it has roles
        #[arg(long)]
        bypass_has_roles: bool,
        #[command(flatten)]
        sure: Sure,
    },
    /// Show what a node has said
    ///
    /// The node itself is asked, not the control plane.
    Logs {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        at: At,
        /// Go on showing what is said, until interrupted
        #[arg(long, short)]
        follow: bool,
        /// Only of the part with this dotted name, and of what is below it
        #[arg(long, value_name = "NAME", default_value = "")]
        dn: String,
        /// How many of the last entries, 0 for all there are
        #[arg(long, value_name = "NUMBER", default_value_t = 100)]
        backlog: u32,
        /// Only what is as bad as this, or worse
        #[arg(long, value_enum, value_name = "SEVERITY")]
        severity: Option<Severity>,
        #[command(flatten)]
        output: Output,
    },
    /// Start a node's machine again
    Reboot {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        at: At,
        #[command(flatten)]
        sure: Sure,
    },
    /// Switch a node's machine off
    #[command(name = "poweroff")]
    PowerOff {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        at: At,
        #[command(flatten)]
        sure: Sure,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Role {
    /// Give a node roles
    ///
    /// A new consensus member takes part in every write of the cluster once it
    /// has what the others have: three members survive the loss of one, five
    /// of two.
    Add {
        #[command(flatten)]
        which: Which,
        /// Which roles
        #[arg(required = true, value_enum)]
        roles: Vec<RoleName>,
        #[command(flatten)]
        wait: Wait,
        #[command(flatten)]
        output: Output,
    },
    /// Take roles from a node
    ///
    /// Whatever the role kept on that node is wiped.
    Remove {
        #[command(flatten)]
        which: Which,
        /// Which roles
        #[arg(required = true, value_enum)]
        roles: Vec<RoleName>,
        #[command(flatten)]
        sure: Sure,
        #[command(flatten)]
        wait: Wait,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Label {
    /// Set labels, those that are there already, too
    Set {
        #[command(flatten)]
        which: Which,
        /// Such as zone=a
        #[arg(required = true, value_name = "KEY=VALUE", value_parser = label)]
        labels: Vec<(String, String)>,
        #[command(flatten)]
        output: Output,
    },
    /// Remove labels
    Remove {
        #[command(flatten)]
        which: Which,
        /// Of which keys
        #[arg(required = true, value_name = "KEY")]
        keys: Vec<String>,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Etcd {
    /// Show the members of consensus, and who is about to come or go
    Members {
        #[command(flatten)]
        output: Output,
    },
}

/// Which node is meant.
#[derive(Debug, ClapArgs)]
pub(crate) struct Which {
    /// By its ID or the beginning of it, by its public key, or by the value of
    /// its label "hostname"
    #[arg(value_name = "NODE")]
    pub node: String,
}

/// Where a node is reached, for what it answers itself.
#[derive(Debug, ClapArgs)]
pub(crate) struct At {
    /// Where the node's management is reached from here [default: its address
    /// as the cluster knows it, port 7836]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = node_endpoint)]
    pub node_endpoint: Option<Endpoint>,
}

/// For what cannot be undone.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub(crate) struct Sure {
    /// Do it without asking back; needed at a terminal
    #[arg(long)]
    pub yes: bool,
}

/// For what the cluster goes on with after it has answered.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub(crate) struct Wait {
    /// Wait until it is complete: consensus has followed, a role of Kubernetes
    /// works or has ended. An interrupt ends the waiting only
    #[arg(long)]
    pub wait: bool,
}

/// A role, as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleName {
    ConsensusMember,
    KubernetesController,
    KubernetesWorker,
}

/// How bad a log entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Severity {
    Debug,
    Info,
    Warning,
    Error,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Owner {
    /// Make an owner key and a first-contact secret
    ///
    /// Writes owner-key.pem and first-contact-secret, and prints the key's
    /// public half. Nothing is overwritten.
    Init {
        /// Existing folder for both files
        folder: PathBuf,
    },
    /// Print the public half of an owner key
    PublicKey {
        /// The private key (PKCS #8, PEM)
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Context {
    /// List the contexts
    List,
    /// Make a context the current one
    Use {
        /// Which
        name: String,
    },
    /// Show a context
    Show {
        /// Which [default: the current one]
        name: Option<String>,
    },
    /// Reach an address of a node by another one
    ///
    /// For clusters whose own addresses are not reachable from here, such as
    /// emulated ones: what goes to ADDRESS goes to VIA instead.
    Route {
        /// As the cluster knows it, such as 10.77.0.11:7836
        #[arg(value_name = "ADDRESS")]
        address: Endpoint,
        /// As it is reached from here; none: forget the route
        #[arg(value_name = "VIA")]
        via: Option<Endpoint>,
    },
}

/// In which form results are printed.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub(crate) struct Output {
    /// For people or for programs
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Form::Table, value_name = "FORM")]
    pub form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    Table,
    Json,
}

/// A number and its unit.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "wanted a positive number and a unit: 500ms, 10s, 2m".to_owned();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    let duration = match &text[digits.len()..] {
        "ms" => Some(Duration::from_millis(number)),
        "s" | "" => Some(Duration::from_secs(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs),
        _ => None,
    };
    duration
        .filter(|duration| !duration.is_zero() && *duration <= Duration::from_secs(86_400))
        .ok_or_else(wrong)
}

/// KEY=VALUE; the cluster says which of them it takes.
fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("wanted KEY=VALUE".to_owned()),
    }
}

/// https://HOST[:PORT]; what follows is left to API servers.
fn server_url(text: &str) -> Result<String, String> {
    let wrong = || "wanted https://HOST[:PORT]".to_owned();
    let rest = text.strip_prefix("https://").ok_or_else(wrong)?;
    Endpoint::parse(rest.trim_end_matches('/'), HTTPS).map_err(|_| wrong())?;
    Ok(text.to_owned())
}

/// An endpoint whose default port is that of node management.
fn node_endpoint(text: &str) -> Result<Endpoint, String> {
    Endpoint::parse(text, PORT_NODE_MANAGEMENT).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn servers_are_reached_by_https() {
        for right in [
            "https://127.0.0.1:6443",
            "https://[::1]:6443/",
            "https://a.example",
        ] {
            assert_eq!(server_url(right), Ok(right.to_owned()));
        }
        for wrong in [
            "",
            "127.0.0.1:6443",
            "http://a:1",
            "https://",
            "https://a b",
            "https://a:0",
        ] {
            assert!(server_url(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for wrong in [
            "",
            "s",
            "-1s",
            "1h",
            "0s",
            "1.5s",
            "99999999999999999999s",
            "18446744073709551615m",
        ] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
