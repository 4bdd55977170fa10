//! The command line: commands, flags and the parsers of their values. The doc comments here are the
//! help texts.

mod cluster;
mod image;
mod node_network;
mod parameters;
mod settings;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use hearth_api::client::Endpoint;
use hearth_api::names::PORT_NODE_MANAGEMENT;

pub(crate) use cluster::{Cluster, Configure, FormerSetting};
pub(crate) use image::{Image, SetParameters, Sure, Write};
pub(crate) use node_network::NodeNetwork;
pub(crate) use parameters::{
    Bootstrap, Install, Machine, Made, MadeFormat, NetworkFlags, Parameters, Register, ShownFormat,
    Source,
};
pub(crate) use settings::Assignment;

/// The port of a URL that names none.
const HTTPS: u16 = 443;

/// Inspect and manage Hearth clusters.
#[derive(Debug, Parser)]
#[command(name = "hearthctl", version, propagate_version = false)]
pub(crate) struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags that every command takes.
#[derive(Debug, ClapArgs)]
pub(crate) struct Global {
    /// Path of the contexts file [default: hearth/config.json in
    /// $XDG_CONFIG_HOME or ~/.config]
    #[arg(long, global = true, env = "HEARTH_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Name of the context to use instead of the current one
    #[arg(long, global = true, env = "HEARTH_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,

    /// Node to connect to instead of the endpoints of the context; can be
    /// repeated
    #[arg(long = "endpoint", global = true, value_name = "HOST[:PORT]")]
    pub endpoints: Vec<Endpoint>,

    /// Timeout of each request, such as 500ms, 10s, 2m
    #[arg(long, global = true, default_value = "10s", value_parser = duration, value_name = "TIME")]
    pub timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Manage the cluster
    #[command(subcommand)]
    Cluster(Cluster),
    /// Manage nodes
    #[command(subcommand)]
    Node(Node),
    /// Write images to disks, and say which images nodes may boot
    #[command(subcommand)]
    Image(Image),
    /// Show etcd status
    #[command(subcommand)]
    Etcd(Etcd),
    /// Get access to Kubernetes
    #[command(subcommand)]
    Kubernetes(Kubernetes),
    /// Create the keys and the secret of an owner
    #[command(subcommand)]
    Owner(Owner),
    /// Make, show and check the parameters of machines
    #[command(subcommand)]
    Parameters(Parameters),
    /// Manage contexts
    #[command(subcommand)]
    Context(Context),
    /// Print the version of hearthctl
    Version,
    /// Generate a shell completion script
    Completion {
        /// Shell to generate the script for
        shell: clap_complete::Shell,
    },
    /// Write man pages
    Man {
        /// Folder to write the pages to; created if it does not exist
        folder: PathBuf,
    },
    /// Print the reference page
    #[command(hide = true)]
    Reference,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Kubernetes {
    /// Show the state of Kubernetes on all nodes
    ///
    /// Shows what each node with a Kubernetes role reports of it: what it waits
    /// for, with the reason that the program itself gives. Exits with code 7
    /// unless all nodes are healthy and all conditions are met.
    Status {
        #[command(flatten)]
        output: Output,
    },
    /// Generate a kubeconfig
    ///
    /// The kubeconfig contains no secret: kubectl calls hearthctl as a
    /// credential plugin, which gets a certificate for the user of the current
    /// context.
    Kubeconfig {
        /// Write to this file (mode 0600) instead of standard output, which is
        /// "-". An existing regular file is replaced
        #[arg(long, value_name = "FILE")]
        output_file: Option<PathBuf>,
        /// Output format
        #[arg(short = 'o', long, value_enum, default_value_t = KubeconfigFormat::Json, value_name = "FORMAT")]
        output: KubeconfigFormat,
        /// URL of the API server, such as https://127.0.0.1:6443 [default: the
        /// first API server that accepts a connection, through the routes of
        /// the context]
        #[arg(long, value_name = "URL", value_parser = server_url)]
        server: Option<String>,
        /// Server name to verify in the certificate of the API server
        /// [default: "kubernetes", which is valid for all API servers of the
        /// cluster]
        #[arg(long, value_name = "NAME")]
        tls_server_name: Option<String>,
        /// Embed a client certificate and its private key, valid for one hour
        #[arg(long)]
        embed: bool,
    },
    /// Print a client certificate (called by kubectl as a credential plugin)
    Credential,
    /// Replace the key that encrypts Secrets
    ///
    /// The Kubernetes controllers generate a new key, encrypt with it from then
    /// on, and rewrite all Secrets. Do this when a controller or its disk is
    /// out of your hands: it could open the former key. Waits until all Secrets
    /// are rewritten, for which every controller has to be running.
    RotateSecretsKey {
        /// How long to wait until all Secrets are rewritten; 0 to return at once
        #[arg(long, default_value = "10m", value_parser = duration_or_zero, value_name = "TIME")]
        wait: Duration,
        #[command(flatten)]
        output: Output,
    },
    /// Give Kubernetes controllers access to the keys of Secrets
    ///
    /// New controllers get access from a controller that has it. This command
    /// is for a cluster in which none is left. It opens the keys with the
    /// recovery key on this machine, and encrypts them to the controllers that
    /// have no access.
    RecoverSecretsKey {
        /// Recovery key file (64 hexadecimal digits)
        #[arg(long, value_name = "FILE")]
        recovery_key: PathBuf,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Node {
    /// List nodes
    List {
        #[command(flatten)]
        output: Output,
        /// Watch for changes until interrupted
        #[arg(long)]
        watch: bool,
    },
    /// Show details of a node
    Describe {
        #[command(flatten)]
        which: NodeArg,
        #[command(flatten)]
        output: Output,
    },
    /// Approve a registered machine as a node
    ///
    /// First compare the public key with the one on the machine's console: the
    /// register ticket does not identify the machine.
    Approve {
        #[command(flatten)]
        which: NodeArg,
        #[command(flatten)]
        output: Output,
    },
    /// Manage node roles
    #[command(subcommand)]
    Role(Role),
    /// Manage node labels
    #[command(subcommand)]
    Label(Label),
    /// Manage node settings
    #[command(subcommand)]
    Setting(Setting),
    /// Decommission a node permanently
    ///
    /// The node leaves consensus, wipes its keys and loses its access to the
    /// cluster. Then it can be deleted. It cannot rejoin under the same ID.
    Decommission {
        #[command(flatten)]
        which: NodeArg,
        #[command(flatten)]
        sure: Confirm,
        #[command(flatten)]
        wait: Wait,
        #[command(flatten)]
        output: Output,
    },
    /// Delete a node
    ///
    /// Only a tombstone remains, with which a machine that reconnects is
    /// ordered to wipe its keys. A node that is UP has to be decommissioned
    /// first, unless its machine is lost.
    Delete {
        #[command(flatten)]
        which: NodeArg,
        /// Delete even if the node is UP (for lost machines). It keeps its keys
        /// until it reconnects to its cluster
        #[arg(long)]
        bypass_not_decommissioned: bool,
        /// Delete even if the node has roles
        #[arg(long)]
        bypass_has_roles: bool,
        #[command(flatten)]
        sure: Confirm,
    },
    /// Return the machine of a node to blank
    ///
    /// Deletes the node, which must not have roles. When its machine next
    /// contacts the cluster, at once if it runs, it destroys its keys and its
    /// data and restarts like a new machine, with the same parameters.
    Reset {
        #[command(flatten)]
        which: NodeArg,
        #[command(flatten)]
        sure: Confirm,
    },
    /// Show node logs
    ///
    /// The logs are read from the node itself, not from the control plane.
    Logs {
        #[command(flatten)]
        which: NodeArg,
        #[command(flatten)]
        at: NodeEndpointArg,
        /// Stream new entries until interrupted
        #[arg(long, short)]
        follow: bool,
        /// Dotted name of a component, such as root.roles; shows its entries
        /// and those of its subcomponents
        #[arg(long, alias = "dn", value_name = "NAME", default_value = "")]
        component: String,
        /// Number of recent entries; 0 for all
        #[arg(long, alias = "backlog", value_name = "N", default_value_t = 100)]
        tail: u32,
        /// Minimum severity
        #[arg(long, value_enum, value_name = "SEVERITY")]
        severity: Option<Severity>,
        #[command(flatten)]
        output: Output,
    },
    /// Show the packet filter of a node
    ///
    /// The rules are read from the node's kernel, in the syntax of nft(8), with
    /// the number of packets that each rule has refused.
    Firewall {
        #[command(flatten)]
        which: NodeArg,
        #[command(flatten)]
        at: NodeEndpointArg,
        /// Include the tables of other programs, such as kube-proxy
        #[arg(long)]
        all_tables: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Show or change the network of a node
    ///
    /// Without flags, prints the network configuration of the node and its
    /// network devices.
    ///
    /// A new configuration is tried first: the node uses it, hearthctl connects
    /// to the node again and confirms it, and only then the node saves it. If
    /// neither hearthctl nor the cluster reaches the node in time, the node goes
    /// back to the former configuration by itself. So does an interrupt, or a
    /// reboot of the node.
    ///
    /// The configuration that is set here replaces network_config of the
    /// machine's parameters, until somebody changes that.
    Network(Box<NodeNetwork>),
    /// Reboot a node
    Reboot {
        #[command(flatten)]
        which: NodeArg,
        #[command(flatten)]
        at: NodeEndpointArg,
        #[command(flatten)]
        sure: Confirm,
    },
    /// Shut down a node
    #[command(name = "poweroff")]
    PowerOff {
        #[command(flatten)]
        which: NodeArg,
        #[command(flatten)]
        at: NodeEndpointArg,
        #[command(flatten)]
        sure: Confirm,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Role {
    /// Add roles to a node
    ///
    /// A new consensus member becomes a voter once its data is in sync. Three
    /// voters tolerate the failure of one, five the failure of two.
    Add {
        #[command(flatten)]
        which: NodeArg,
        /// Roles to add
        #[arg(required = true, value_enum)]
        roles: Vec<RoleName>,
        #[command(flatten)]
        wait: Wait,
        #[command(flatten)]
        output: Output,
    },
    /// Remove roles from a node
    ///
    /// The data of the role on the node is wiped.
    Remove {
        #[command(flatten)]
        which: NodeArg,
        /// Roles to remove
        #[arg(required = true, value_enum)]
        roles: Vec<RoleName>,
        #[command(flatten)]
        sure: Confirm,
        #[command(flatten)]
        wait: Wait,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Label {
    /// Set labels; existing ones are overwritten
    Set {
        #[command(flatten)]
        which: NodeArg,
        /// Labels to set, such as zone=a
        #[arg(required = true, value_name = "KEY=VALUE", value_parser = label)]
        labels: Vec<(String, String)>,
        #[command(flatten)]
        output: Output,
    },
    /// Remove labels
    Remove {
        #[command(flatten)]
        which: NodeArg,
        /// Keys of the labels to remove
        #[arg(required = true, value_name = "KEY")]
        keys: Vec<String>,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Setting {
    /// Set settings; existing ones are overwritten
    ///
    /// sysctl.NAME=VALUE sets a kernel setting, such as
    /// sysctl.vm.max_map_count=262144; which ones can be set is a list in
    /// docs/hearthctl.md.
    ///
    /// taint.KEY=VALUE:EFFECT taints the Kubernetes node, such as
    /// taint.dedicated=db:NoSchedule.
    ///
    /// reserved.memory=512Mi and reserved.cpu=500m keep this much from pods, in
    /// addition to what a node keeps for itself. The kubelet restarts; pods go
    /// on.
    ///
    /// disk.NAME=CONDITIONS makes a further disk a volume, mounted at
    /// /data/disks/NAME and encrypted as the data partition is. The conditions are
    /// serial:TEXT, wwn:DIGITS and size:FROM..TO, separated by commas, such as
    /// disk.scratch=size:900G..2T. The disk has to be empty, or to be named by
    /// overwrite:SERIAL_OR_WWN: then everything on it is lost.
    ///
    /// The node follows when it hears of the change, and at later boots. What its
    /// kernel refuses is shown by the condition Settings of the node.
    Set {
        #[command(flatten)]
        which: NodeArg,
        /// Settings to set
        #[arg(required = true, value_name = "NAME=VALUE", value_parser = setting)]
        settings: Vec<(String, String)>,
        #[command(flatten)]
        output: Output,
    },
    /// Remove settings
    ///
    /// A kernel setting gets back the value that it had.
    Remove {
        #[command(flatten)]
        which: NodeArg,
        /// Names of the settings to remove
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Etcd {
    /// List etcd members and pending membership changes
    Members {
        #[command(flatten)]
        output: Output,
    },
}

/// Selects a node.
#[derive(Debug, ClapArgs)]
pub(crate) struct NodeArg {
    /// Node ID or a prefix of it, public key, or value of the label "hostname"
    #[arg(value_name = "NODE")]
    pub node: String,
}

/// Address of the node, for commands that call the node itself.
#[derive(Debug, ClapArgs)]
pub(crate) struct NodeEndpointArg {
    /// Address of the node's management service [default: the address that the
    /// cluster knows, port 7836]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = node_endpoint)]
    pub node_endpoint: Option<Endpoint>,
}

/// Confirmation, for commands that are disruptive or cannot be undone.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub(crate) struct Confirm {
    /// Confirm the command; required at a terminal if the node is UP
    #[arg(long)]
    pub yes: bool,
}

/// For changes that the cluster completes after it has answered.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub(crate) struct Wait {
    /// Wait until the change is complete: the etcd membership has changed, a
    /// Kubernetes role is ready or has stopped. An interrupt ends the wait
    /// only, not the change
    #[arg(long)]
    pub wait: bool,
}

/// A role, by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleName {
    ConsensusMember,
    KubernetesController,
    KubernetesWorker,
}

/// Severity of a log entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Severity {
    Debug,
    Info,
    Warning,
    Error,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Owner {
    /// Create an owner key, a first-contact secret and a recovery key
    ///
    /// Writes owner-key.pem, first-contact-secret and recovery-key. Prints what
    /// the bootstrap parameters need of the keys: on the first line the public
    /// key of the owner, on the second one the recovery recipient, which is the
    /// public key of the recovery key. Existing files are not overwritten.
    Init {
        /// Directory for the files, which is created if it does not exist
        folder: PathBuf,
        /// Create only the recovery key, beside the files of an earlier version,
        /// and print only the recovery recipient
        #[arg(long)]
        recovery_key_only: bool,
    },
    /// Replace the owner key and the recovery key of a cluster
    ///
    /// Creates owner-key.pem and recovery-key, has the former owner key sign
    /// that they replace its own and the former recovery key, and logs in with
    /// the new owner key. Certificates of the former owner are rejected from
    /// then on. Each running node records the new owner, and wraps its keys to
    /// the new recovery key. A node that is off does so when it is back: until
    /// then it opens with the former keys only, so keep them.
    ///
    /// Can be repeated with the same directory after an interruption.
    Replace {
        /// Directory for the new keys, which is created if it does not exist; not
        /// that of the present ones
        folder: PathBuf,
        /// Private key file of the present owner (PKCS #8, PEM)
        #[arg(long, value_name = "FILE")]
        owner_key: PathBuf,
        /// First-contact secret file (64 hexadecimal digits), which stays the
        /// same
        #[arg(long, value_name = "FILE")]
        first_contact_secret: PathBuf,
        /// How long to wait until all nodes have recorded the new keys; 0 to
        /// return at once
        #[arg(long, default_value = "5m", value_parser = duration_or_zero, value_name = "TIME")]
        wait: Duration,
        #[command(flatten)]
        output: Output,
    },
    /// Write a key and a certificate for other gRPC clients
    ///
    /// Writes key.pem (ECDSA P-256), certificate.pem and ca.pem, with which a
    /// client made from the .proto files acts as the owner. Each call creates a
    /// new key. The certificate is valid as long as that of the context: see the
    /// setting certificate_lifetime_seconds.
    Certificate {
        /// Directory for the files
        directory: PathBuf,
    },
    /// Answer the challenge that a node shows on its console
    ///
    /// A node that waits to be unlocked, or whose TPM does not open its sealed
    /// configuration, shows a challenge to whoever presses Enter on its console.
    /// The answer opens this node, until it restarts; it is entered on the same
    /// console. Only the recovery key is needed, and no network: make sure that
    /// the console is that of your machine.
    Answer {
        /// Recovery key file (64 hexadecimal digits)
        #[arg(long, value_name = "FILE")]
        recovery_key: PathBuf,
        /// File with the challenge, from "hearth-challenge:" to ";", or a log of
        /// the console that has it [default: standard input]
        challenge: Option<PathBuf>,
    },
    /// Print the public key of an owner key or of a recovery key
    PublicKey {
        /// Owner key file (PKCS #8, PEM), or recovery key file (64 hexadecimal
        /// digits)
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Context {
    /// List contexts
    List {
        #[command(flatten)]
        output: Output,
    },
    /// Set the current context
    Use {
        /// Context name
        name: String,
    },
    /// Show a context
    Show {
        /// Context name [default: the current one]
        name: Option<String>,
    },
    /// Set or remove an address mapping
    ///
    /// For clusters whose own addresses are not reachable from this machine,
    /// such as emulated ones: connections to ADDRESS go to VIA instead.
    Route {
        /// Address that the cluster knows, such as 10.77.0.11:7836
        #[arg(value_name = "ADDRESS")]
        address: Endpoint,
        /// Address that is reachable from this machine; without it, the mapping
        /// is removed
        #[arg(value_name = "VIA")]
        via: Option<Endpoint>,
    },
}

/// How results are printed.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub(crate) struct Output {
    /// Output format
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    pub form: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Json,
}

/// The format of a kubeconfig.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KubeconfigFormat {
    /// JSON, which is YAML, too
    Json,
}

/// Parses a number and its unit; seconds if it has none. At most a day.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "expected a positive number and a unit: 500ms, 10s, 2m".to_owned();
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

/// The same, or 0.
fn duration_or_zero(text: &str) -> Result<Duration, String> {
    match text {
        "0" => Ok(Duration::ZERO),
        text => duration(text),
    }
}

/// Parses NAME=VALUE. Which names and values are valid is checked later, by the rules of the API.
fn setting(text: &str) -> Result<(String, String), String> {
    pair(text, "NAME=VALUE")
}

/// Parses KEY=VALUE, in the same way.
fn label(text: &str) -> Result<(String, String), String> {
    pair(text, "KEY=VALUE")
}

fn pair(text: &str, form: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("expected {form}")),
    }
}

/// Checks that a URL begins with `https://HOST[:PORT]`. A path is passed on as it is.
fn server_url(text: &str) -> Result<String, String> {
    let wrong = || "expected https://HOST[:PORT]".to_owned();
    let rest = text.strip_prefix("https://").ok_or_else(wrong)?;
    Endpoint::parse(rest.trim_end_matches('/'), HTTPS).map_err(|_| wrong())?;
    Ok(text.to_owned())
}

/// Parses an endpoint; the default port is that of node management.
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
    fn only_a_wait_may_have_no_duration() {
        assert_eq!(duration_or_zero("0"), Ok(Duration::ZERO));
        assert_eq!(duration_or_zero("2m"), Ok(Duration::from_secs(120)));
        assert!(duration_or_zero("0s").is_err());
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
