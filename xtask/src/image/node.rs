//! Compiles the programs of a node.

use std::path::{Path, PathBuf};

use anyhow::Result;
use hearth_build::cargo::Product;
pub(super) use hearth_build::cargo::Profile;
use hearth_build::files;
use hearth_image::output::write_if_changed;

use super::{Example, Flavour};
use crate::target::checkout;
use crate::ui::Ui;

/// Compiles the node and copies it to `destination`: cargo has one output path for the builds of all flavours.
pub(super) fn build(ui: &Ui, flavour: Flavour, destination: &Path) -> Result<PathBuf> {
    let mut arguments = vec!["--package", "hearth-core", "--bin", "init"];
    let (profile, features) = match flavour {
        Flavour::Release => (Profile::Node, None),
        Flavour::Debug => (Profile::Node, Some("debug-service")),
        Flavour::Test => (Profile::Test, Some("debug-service,failpoints")),
    };
    if let Some(features) = features {
        arguments.extend(["--features", features]);
    }
    let product = Product {
        what: &format!("the node ({})", flavour.name()),
        profile,
        arguments: &arguments,
        built: "init",
    };
    compile(ui, &product, destination)
}

/// Compiles an example of hearth-sys, static like the node, and copies it to `destination`.
pub(super) fn build_example(ui: &Ui, example: Example, destination: &Path) -> Result<PathBuf> {
    let product = Product {
        what: example.what,
        profile: example.profile,
        arguments: &["--package", "hearth-sys", "--example", example.name],
        built: &format!("examples/{}", example.name),
    };
    compile(ui, &product, destination)
}

/// Compiles the program that runs the curator on this machine, like the node, and copies it to `destination`.
pub(crate) fn build_curator_host(ui: &Ui, destination: &Path) -> Result<PathBuf> {
    let product = Product {
        what: "the curator on the host",
        profile: Profile::Node,
        arguments: &["--package", "hearth-curator-bench"],
        built: "curator_host",
    };
    compile(ui, &product, destination)
}

/// Compiles the operator's tool, optimized like the node, and copies it to `destination`.
pub(crate) fn build_hearthctl(ui: &Ui, destination: &Path) -> Result<PathBuf> {
    let product = Product {
        what: "hearthctl (optimized)",
        profile: Profile::Node,
        arguments: &["--package", "hearth-ctl"],
        built: "hearthctl",
    };
    compile(ui, &product, destination)
}

/// Compiles the benchmark of what a node does with its TPM, like the node, and copies it to `destination`.
pub(crate) fn build_tpm_bench(ui: &Ui, destination: &Path) -> Result<PathBuf> {
    let product = Product {
        what: "the TPM benchmark",
        profile: Profile::Node,
        arguments: &[
            "--package",
            "hearth-tpm",
            "--example",
            "tpm_bench",
            "--features",
            "testing",
        ],
        built: "examples/tpm_bench",
    };
    compile(ui, &product, destination)
}

fn compile(ui: &Ui, product: &Product<'_>, destination: &Path) -> Result<PathBuf> {
    checkout()?.static_program(ui, product, |built| -> Result<()> {
        write_if_changed(destination, &files::read(built)?)?;
        // In the image every program is executable; this is for running the binary on the host.
        Ok(files::set_mode(destination, 0o755)?)
    })?;
    Ok(destination.to_owned())
}
