//! The commands below `hearthctl parameters`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use hearth_api::identity::EnrolmentId;

use super::settings::{Assignment, AssignmentParser};
use super::{Output, RoleName, label};

#[derive(Debug, Subcommand)]
pub(crate) enum Parameters {
    /// Make the parameters of the first machine of a new cluster
    ///
    /// The parameters come from flags, or from a file with --from; a flag sets
    /// its field, whatever the file says. They are checked as the machine will
    /// check them, and written only if it would accept them.
    ///
    /// They contain the first-contact secret: keep them as you keep that.
    Bootstrap(Box<Bootstrap>),
    /// Make the parameters of further machines of a cluster
    ///
    /// The register ticket, the addresses of the curators and the CA certificate
    /// are those of the cluster of the current context. With --from, those that
    /// the file has are not asked of the cluster. The parameters are for any
    /// number of machines, unless they have the address of one.
    Register(Box<Register>),
    /// Show parameters as text
    Show {
        /// File with the parameters; "-" for standard input
        file: PathBuf,
        /// Output format
        #[arg(short = 'o', long = "output", value_enum, default_value_t = ShownFormat::Yaml, value_name = "FORMAT")]
        form: ShownFormat,
        /// Include the first-contact secret, the register ticket and the
        /// passwords for registries
        #[arg(long)]
        show_secrets: bool,
    },
    /// Check parameters as a machine does
    ///
    /// Prints what a machine would do with them, or why it would refuse them.
    Check {
        /// File with the parameters; "-" for standard input
        file: PathBuf,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Bootstrap {
    #[command(flatten)]
    pub source: Source,
    /// Directory that `hearthctl owner init` has filled: use the owner key, the
    /// first-contact secret and the recovery key in it, unless another flag
    /// names one of them
    #[arg(long, value_name = "DIRECTORY")]
    pub owner: Option<PathBuf>,
    /// Owner key file (PKCS #8, PEM); only the public key goes into the
    /// parameters
    #[arg(long, value_name = "FILE")]
    pub owner_key: Option<PathBuf>,
    /// Public key of the owner (64 hexadecimal digits), where the owner key is
    /// not on this machine
    #[arg(long, value_name = "KEY", value_parser = bytes::<32>, conflicts_with = "owner_key")]
    pub owner_public_key: Option<[u8; 32]>,
    /// First-contact secret file (64 hexadecimal digits)
    #[arg(long, value_name = "FILE")]
    pub first_contact_secret: Option<PathBuf>,
    /// Recovery key file (64 hexadecimal digits); only the recovery recipient,
    /// its public key, goes into the parameters
    #[arg(long, value_name = "FILE")]
    pub recovery_key: Option<PathBuf>,
    /// Recovery recipient (64 hexadecimal digits), where the recovery key is not
    /// on this machine
    #[arg(long, value_name = "KEY", value_parser = bytes::<32>, conflicts_with = "recovery_key")]
    pub recovery_recipient: Option<[u8; 32]>,
    /// Accept that the data are lost with the last running node, or with the
    /// TPMs of the nodes: for cold-start policy NONE, and for an encrypted
    /// cluster without a recovery key
    #[arg(long)]
    pub accept_loss: bool,
    /// Set a cluster setting, such as tpm_mode=REQUIRED, as `hearthctl cluster
    /// set` does; can be repeated. Separate the values of a list by commas
    #[arg(
        long = "set",
        value_name = "SETTING=VALUE",
        value_parser = AssignmentParser::of_new_cluster(),
        hide_possible_values = true
    )]
    pub settings: Vec<Assignment>,
    /// Role of the first node; can be repeated. It has to be a consensus member
    /// [default: consensus-member, and both Kubernetes roles if its image can
    /// run them]
    #[arg(long = "role", value_name = "ROLE", value_enum)]
    pub roles: Vec<RoleName>,
    /// File with Kubernetes objects of the new cluster, in JSON, one after the
    /// other; can be repeated. `kubectl label --local -f FILE -o json
    /// hearth.dev/none-` makes JSON of YAML
    #[arg(long = "manifest", value_name = "FILE")]
    pub manifests: Vec<PathBuf>,
    #[command(flatten)]
    pub machine: Machine,
    #[command(flatten)]
    pub made: Made,
}

#[derive(Debug, Args)]
pub(crate) struct Register {
    #[command(flatten)]
    pub source: Source,
    #[command(flatten)]
    pub machine: Machine,
    #[command(flatten)]
    pub made: Made,
}

/// Where parameters begin.
#[derive(Debug, Args)]
pub(crate) struct Source {
    /// File with parameters in YAML or JSON, as `hearthctl parameters show
    /// --show-secrets` prints them; "-" for standard input
    #[arg(long, short = 'f', value_name = "FILE")]
    pub from: Option<PathBuf>,
}

/// What is the same for all machines.
#[derive(Debug, Args)]
pub(crate) struct Machine {
    /// Label of the node, such as zone=a; can be repeated. Other labels of the
    /// file stay
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub labels: Vec<(String, String)>,
    #[command(flatten)]
    pub network: NetworkFlags,
    /// NTP server, instead of those of the cluster and of DHCP: an IP address,
    /// with a port if it is not 123; can be repeated
    #[arg(long = "time-server", value_name = "ADDRESS[:PORT]")]
    pub time_servers: Vec<String>,
    /// Enrolment ID (32 hexadecimal digits) whose keys and data the machine
    /// destroys, once; with any other enrolment nothing happens
    #[arg(long, value_name = "ID", value_parser = enrolment_id)]
    pub wipe: Option<EnrolmentId>,
    #[command(flatten)]
    pub install: Install,
}

/// The network of a machine with one interface.
#[derive(Debug, Args)]
pub(crate) struct NetworkFlags {
    /// Static address of the machine with its prefix length, such as
    /// 192.0.2.10/24; can be repeated [default: DHCP]
    #[arg(long = "address", value_name = "ADDRESS/LENGTH")]
    pub addresses: Vec<String>,
    /// Gateway of the default route of its address family; can be repeated
    #[arg(long = "gateway", value_name = "ADDRESS")]
    pub gateways: Vec<String>,
    /// Further route, such as 198.51.100.0/24=192.0.2.2; without a gateway it is
    /// on-link; can be repeated
    #[arg(long = "route", value_name = "DESTINATION[=GATEWAY]")]
    pub routes: Vec<String>,
    /// Address of a name server; can be repeated
    #[arg(long = "nameserver", value_name = "ADDRESS")]
    pub nameservers: Vec<String>,
    /// MAC address of the network interface, where the machine has several
    #[arg(long, value_name = "MAC")]
    pub mac: Option<String>,
    /// VLAN ID of the network interface (802.1Q); 0 for none
    #[arg(long, value_name = "ID")]
    pub vlan: Option<u32>,
}

/// The disk on which an installation medium puts the node.
#[derive(Debug, Args)]
pub(crate) struct Install {
    /// Let an installation medium install on the only empty disk, instead of
    /// asking on the console; the flags below are conditions for the disk
    #[arg(long)]
    pub install: bool,
    /// Serial number of the disk of an installation
    #[arg(long, value_name = "NUMBER")]
    pub install_serial: Option<String>,
    /// World Wide Name or EUI-64 of the disk of an installation
    #[arg(long, value_name = "WWN")]
    pub install_wwn: Option<String>,
    /// Kernel's name of the disk of an installation, such as nvme0n1
    #[arg(long, value_name = "NAME")]
    pub install_device: Option<String>,
    /// Smallest size in bytes of the disk of an installation
    #[arg(long, value_name = "BYTES")]
    pub install_min_size: Option<u64>,
    /// Largest size in bytes of the disk of an installation
    #[arg(long, value_name = "BYTES")]
    pub install_max_size: Option<u64>,
    /// Serial number or WWN of a disk that is not empty: an installation medium
    /// overwrites it, and everything on it is lost
    #[arg(long, value_name = "NAME")]
    pub install_overwrite: Option<String>,
}

/// What becomes of the parameters that were made.
#[derive(Debug, Args)]
pub(crate) struct Made {
    /// Write to this file (mode 0600) instead of standard output, which is "-".
    /// An existing regular file is replaced
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Output format; machines read the binary one from files, the text of
    /// base64 from a cloud, and that of smbios from their firmware
    #[arg(short = 'o', long = "output", value_enum, default_value_t = MadeFormat::Binary, value_name = "FORMAT")]
    pub form: MadeFormat,
}

/// The format of parameters that are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MadeFormat {
    Binary,
    Base64,
    Smbios,
    Yaml,
    Json,
}

/// The format of parameters that are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShownFormat {
    Yaml,
    Json,
}

/// Parses bytes in hexadecimal digits.
fn bytes<const N: usize>(text: &str) -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    hex::decode_to_slice(text, &mut bytes)
        .map_err(|_| format!("expected {} hexadecimal digits", 2 * N))?;
    Ok(bytes)
}

fn enrolment_id(text: &str) -> Result<EnrolmentId, String> {
    bytes(text).map(EnrolmentId::from_bytes)
}
