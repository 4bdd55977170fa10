//! `cargo xtask completion`: shell completion.
//!
//! Cargo's own completion does not know the arguments of an alias, and cannot be extended. So the script defines a
//! short command, `xtask`, for `cargo xtask`, and completes that.

use std::io::Write;

use anyhow::Result;
use clap::Command;
use clap_complete::{Shell, generate};

/// Print a script that defines the command `xtask`, with completion, for your shell
///
/// For bash: eval "$(cargo xtask completion bash)"
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Shell to generate the script for
    #[arg(value_enum)]
    shell: Known,
}

/// The shells that this is tested with.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Bash,
    Zsh,
    Fish,
}

/// Name of the short command.
const NAME: &str = "xtask";

/// Runs the task for this command line.
pub(crate) fn run(args: &Args, command: Command) -> Result<()> {
    let script = script(args.shell, command);
    std::io::stdout().write_all(&script)?;
    Ok(())
}

fn script(shell: Known, command: Command) -> Vec<u8> {
    let (shell, function) = match shell {
        // Functions, not aliases: zsh would complete the command that an alias expands to.
        Known::Bash => (Shell::Bash, "xtask() { cargo xtask \"$@\"; }\n"),
        Known::Zsh => (Shell::Zsh, "xtask() { cargo xtask \"$@\"; }\n"),
        Known::Fish => (Shell::Fish, "function xtask; cargo xtask $argv; end\n"),
    };
    let mut completion = Vec::new();
    let mut command = command.name(NAME).bin_name(NAME);
    generate(shell, &mut command, NAME, &mut completion);
    match shell {
        // zsh reads the first line of a file in its fpath, so it must remain the first.
        Shell::Zsh => {
            let end = completion.iter().position(|byte| *byte == b'\n');
            let at = end.map_or(0, |end| end + 1);
            completion.splice(at..at, function.bytes());
            completion
        }
        _ => [function.as_bytes(), &completion].concat(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::command::Cmd;
    use crate::ui::Ui;

    #[test]
    fn bash_completes_tasks() {
        let script = String::from_utf8(script(Known::Bash, crate::Cli::command())).unwrap();
        let try_it = format!(
            "{script}\nCOMP_WORDS=(xtask ru) COMP_CWORD=1; _xtask xtask ru xtask; echo \"${{COMPREPLY[@]}}\""
        );
        let completed = Cmd::new("bash")
            .args(["--norc", "-c", &try_it])
            .output(&Ui::new(false))
            .unwrap();
        assert_eq!(completed.trim(), "run");
    }

    #[test]
    fn all_define_the_short_command() {
        for (shell, first) in [
            (Known::Bash, "xtask() {"),
            (Known::Zsh, "#compdef xtask\nxtask() {"),
            (Known::Fish, "function xtask;"),
        ] {
            let script = String::from_utf8(script(shell, crate::Cli::command())).unwrap();
            assert!(script.starts_with(first), "{shell:?}: {}", &script[..80]);
        }
    }
}
