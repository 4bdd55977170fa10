//! The reference of the command line, generated from its definition in [`crate::args`]: man pages
//! for packages, and the page `docs/hearthctl-reference.md`, which a test compares.

use std::fmt::Write as _;
use std::path::Path;

use clap::{Arg, Command, CommandFactory as _};

use crate::args::Args;
use crate::failure::{Failure, Kind};

/// Writes a man page for each command to `folder`, which is created.
pub(crate) fn write_man_pages(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Args::command(), folder))
        .map_err(|error| {
            let what = format!("write man pages to {}", folder.display());
            Failure::new(Kind::Local, what).because(error)
        })
}

/// The reference page, in Markdown.
pub(crate) fn markdown() -> String {
    let mut root = Args::command();
    root.build();
    let mut page = String::from(
        "# hearthctl reference\n\nGenerated from the command line's definition; \
         [hearthctl.md](hearthctl.md) is the introduction.\n",
    );
    page.push_str("\n## Global options\n\n");
    options(
        &mut page,
        root.get_arguments().filter(|arg| arg.is_global_set()),
    );
    for command in visible(&root) {
        section(&mut page, command);
    }
    page
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command
        .get_subcommands()
        .filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

/// A command and those below it. One that only groups others has no section of its own.
fn section(page: &mut String, command: &Command) {
    if command.has_subcommands() {
        visible(command).for_each(|command| section(page, command));
        return;
    }
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    // Writing to a string does not fail.
    let _ = write!(page, "\n## {name}\n\n{about}\n\n```\n{usage}\n```\n");
    let own = command
        .get_arguments()
        .filter(|arg| !arg.is_global_set() && !arg.is_hide_set());
    let own: Vec<&Arg> = own
        .filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version"))
        .collect();
    if !own.is_empty() {
        page.push('\n');
        options(page, own.into_iter());
    }
}

fn options<'a>(page: &mut String, args: impl Iterator<Item = &'a Arg>) {
    page.push_str("| argument | |\n|---|---|\n");
    for arg in args {
        let short = arg.get_short().map(|short| format!("-{short}, "));
        let name = format!("{}{arg}", short.unwrap_or_default());
        let help = arg.get_long_help().or(arg.get_help());
        let mut help = help.map(ToString::to_string).unwrap_or_default();
        let values = arg.get_possible_values();
        let values: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
        if arg.get_action().takes_values()
            && !values.is_empty()
            && !arg.is_hide_possible_values_set()
        {
            let _ = write!(help, " [possible values: {}]", values.join(", "));
        }
        if let [default] = arg.get_default_values()
            && arg.get_action().takes_values()
        {
            let _ = write!(help, " [default: {}]", default.to_string_lossy());
        }
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let cell = |text: &str| text.replace('|', "\\|");
        let _ = writeln!(page, "| `{}` | {} |", cell(&name), cell(&help));
    }
}
