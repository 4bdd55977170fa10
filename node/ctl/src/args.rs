//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use hearth_api::client::Endpoint;

/// Looks at and runs clusters of Hearth machines.
#[derive(Debug, Parser)]
#[command(name = "hearthctl", version, propagate_version = false)]
pub struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, ClapArgs)]
pub struct Global {
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
pub enum Command {
    /// The cluster as a whole
    #[command(subcommand)]
    Cluster(Cluster),
    /// Its nodes
    #[command(subcommand)]
    Node(Node),
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
pub enum Cluster {
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
}

#[derive(Debug, Subcommand)]
pub enum Node {
    /// List the nodes
    List {
        #[command(flatten)]
        output: Output,
        /// Go on showing what changes, until interrupted
        #[arg(long)]
        watch: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum Owner {
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
pub enum Context {
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
}

/// In which form results are printed.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub struct Output {
    /// For people or for programs
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Form::Table, value_name = "FORM")]
    pub form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
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
