//! The commands below `hearthctl cluster`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use hearth_api::settings::Setting;

use super::settings::{self, Assignment, AssignmentParser};
use super::{Output, duration_or_zero};

#[derive(Debug, Subcommand)]
pub(crate) enum Cluster {
    /// Log in as owner and save a context
    ///
    /// Exchanges the owner key for a certificate. The cluster authenticates its
    /// CA with the first-contact secret, which protects against a
    /// man-in-the-middle. Can be repeated at any time.
    TakeOwnership {
        /// Private key file (PKCS #8, PEM); its public key is in the bootstrap
        /// parameters
        #[arg(long, value_name = "FILE")]
        owner_key: PathBuf,
        /// First-contact secret file (64 hexadecimal digits), as in the
        /// bootstrap parameters
        #[arg(long, value_name = "FILE")]
        first_contact_secret: PathBuf,
        /// Context name [default: the first 8 digits of the cluster ID]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// Unlock the nodes of a cluster that is not running
    ///
    /// Encrypted nodes get their keys from their cluster. When it lost power as
    /// a whole, its nodes wait for the owner (cold-start policy OWNER). This
    /// command finds them at the endpoints, port 7840, and by the addresses
    /// that they know of each other, and gives keys to as many consensus
    /// members as a quorum needs. The other nodes then get theirs from the
    /// cluster.
    ///
    /// Both keys stay on this machine. Nothing is sent to a node whose own key
    /// the recovery key does not open.
    Unlock {
        /// Private key file of the owner (PKCS #8, PEM)
        #[arg(long, value_name = "FILE")]
        owner_key: PathBuf,
        /// Recovery key file (64 hexadecimal digits)
        #[arg(long, value_name = "FILE")]
        recovery_key: PathBuf,
        /// Unlock all nodes that are found, not only those that a quorum needs
        #[arg(long)]
        all: bool,
        /// How long to wait until the cluster answers; 0 to return at once.
        /// Without a context nobody can be asked
        #[arg(long, default_value = "5m", value_parser = duration_or_zero, value_name = "TIME")]
        wait: Duration,
        #[command(flatten)]
        output: Output,
    },
    /// Show the cluster's ID, configuration and control plane
    Info {
        #[command(flatten)]
        output: Output,
    },
    /// Print the register ticket
    ///
    /// The ticket goes into the register parameters of new machines. It allows
    /// a machine to ask for registration only: an operator has to approve each
    /// machine before it becomes a node.
    Ticket {
        /// Replace the ticket: the old one is rejected from now on. Nodes and
        /// machines that have registered already are not affected
        #[arg(long)]
        rotate: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Show cluster settings
    Get {
        /// Settings to show [default: all]
        #[arg(value_name = "SETTING", value_parser = settings::setting())]
        settings: Vec<&'static Setting>,
        #[command(flatten)]
        output: Output,
    },
    /// Change cluster settings
    ///
    /// All changes are made at once, or none. Some settings are fixed when the
    /// cluster is created.
    Set {
        /// Settings and their new values, such as
        /// kubernetes.synchronized_labels=rack,zone. Separate the values of a
        /// list by commas; an empty value resets a setting to its default
        #[arg(
            required = true,
            value_name = "SETTING=VALUE",
            value_parser = AssignmentParser::of_cluster(),
            hide_possible_values = true
        )]
        assignments: Vec<Assignment>,
        /// Fail if the settings have changed since this version, which `cluster
        /// get` prints
        #[arg(long = "version", value_name = "N")]
        at_version: Option<u64>,
        #[command(flatten)]
        output: Output,
    },
    /// Edit cluster settings in an editor
    ///
    /// Opens the settings in $VISUAL, $EDITOR or vi, and changes those that
    /// have another value afterwards. If a value is invalid, the editor is
    /// opened again. If the settings have been changed by someone else
    /// meanwhile, nothing is changed and the edited file is kept.
    Edit {
        #[command(flatten)]
        output: Output,
    },
    /// Show or change the cluster configuration
    #[command(subcommand, hide = true)]
    Configure(Configure),
}

/// The former names of `cluster get` and `cluster set`.
#[derive(Debug, Subcommand)]
pub(crate) enum Configure {
    /// Show cluster settings
    Get {
        #[command(flatten)]
        output: Output,
    },
    /// Change a setting
    Set {
        /// Setting name
        #[arg(value_enum)]
        setting: FormerSetting,
        /// New values, replacing all old ones; none clears the setting
        #[arg(value_name = "VALUE")]
        values: Vec<String>,
        #[command(flatten)]
        output: Output,
    },
}

/// The former name of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormerSetting {
    SynchronizedLabels,
}
