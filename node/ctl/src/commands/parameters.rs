//! `hearthctl parameters`: what a machine is given before its first boot.
//!
//! [`hearth_parameters`] decides what is right, the same code by which a machine decides: what is
//! made is encoded, decoded by it, and only then written. So a message that a machine of this release
//! would refuse is never written.

mod make;

pub(super) use make::{network, read_text};

use std::io::{self, IsTerminal as _};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hearth_api::names;
use hearth_api::v1::NodeParameters;
use hearth_parameters::MAX_SIZE;
use prost::Message as _;

use super::{print, print_json, write};
use crate::args::{Format, Global, Made, MadeFormat, Parameters, ShownFormat};
use crate::failure::{Failure, Kind};
use crate::parameters::{self, Notation};
use crate::{files, output};

pub(super) async fn run(global: &Global, command: Parameters) -> Result<(), Failure> {
    match command {
        Parameters::Bootstrap(wanted) => finish(&make::bootstrap(&wanted)?, &wanted.made),
        Parameters::Register(wanted) => {
            finish(&make::register(global, &wanted).await?, &wanted.made)
        }
        Parameters::Show {
            file,
            form,
            show_secrets,
        } => show(&file, form, show_secrets),
        Parameters::Check { file, output } => check(&file, output.form),
    }
}

fn show(file: &Path, form: ShownFormat, show_secrets: bool) -> Result<(), Failure> {
    let bytes = files::read(file, MAX_SIZE)?;
    // What the decoder of messages skips would not be shown, so all fields have to be known. Values
    // that a machine would refuse are shown: to correct them.
    hearth_parameters::check_fields(&bytes).map_err(refused(file))?;
    let message = NodeParameters::decode(&bytes[..]);
    let message = message.map_err(|error| failed("show", file).because(error))?;
    let notation = match form {
        ShownFormat::Yaml => Notation::Yaml,
        ShownFormat::Json => Notation::Json,
    };
    print(&match show_secrets {
        true => parameters::write(&message, notation),
        false => parameters::redacted(&message, notation),
    })
}

fn check(file: &Path, form: Format) -> Result<(), Failure> {
    let bytes = files::read(file, MAX_SIZE)?;
    let parsed = hearth_parameters::parse(&bytes).map_err(refused(file))?;
    let checked = output::CheckedParameters::from(&parsed);
    match form {
        Format::Table => print(&checked.text()),
        Format::Json => print_json(&checked),
    }
}

/// A machine would refuse what is in this file.
pub(super) fn refused(file: &Path) -> impl FnOnce(hearth_parameters::Problem) -> Failure {
    let what = format!("use the parameters from {}", files::read_from(file));
    move |problem| Failure::invalid(what, problem)
}

fn failed(verb: &str, file: &Path) -> Failure {
    Failure::new(Kind::Local, format!("{verb} {}", files::read_from(file)))
}

/// Checks the message and writes it.
fn finish(message: &NodeParameters, made: &Made) -> Result<(), Failure> {
    let bytes = message.encode_to_vec();
    hearth_parameters::parse(&bytes)
        .map_err(|problem| Failure::invalid("make the parameters", problem))?;
    let content = match made.form {
        MadeFormat::Binary => bytes,
        MadeFormat::Base64 => format!("{}\n", STANDARD.encode(bytes)).into_bytes(),
        MadeFormat::Smbios => {
            let text = STANDARD.encode(bytes);
            format!("{}={text}\n", names::smbios::PARAMETERS).into_bytes()
        }
        MadeFormat::Yaml => parameters::write(message, Notation::Yaml).into_bytes(),
        MadeFormat::Json => parameters::write(message, Notation::Json).into_bytes(),
    };
    match files::output_file(made.output_file.as_deref()) {
        Some(path) => {
            files::write_output(path, &content)?;
            if made.form == MadeFormat::Binary {
                // Standard output may be where it was written to.
                eprintln!(
                    "hearthctl: put {} on the ESP of the machine as {}: hearthctl image write",
                    path.display(),
                    names::disk::ESP_PARAMETERS
                );
            }
            Ok(())
        }
        None if made.form == MadeFormat::Binary && io::stdout().is_terminal() => {
            Err(Failure::new(Kind::Local, "print the parameters")
                .because("they are binary, and standard output is a terminal")
                .advise("write them to a file with --output-file, or print text with -o yaml"))
        }
        None => write(&content),
    }
}
