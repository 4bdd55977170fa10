//! The user's settings for Go: those by which modules are reached apply, the others do not.
//!
//! A proxy for modules, or a place that a company keeps its own in, belongs to the user's network, and a build must go
//! through it. Everything else that the go command reads from its environment and its configuration file (`go env -w`)
//! changes what it builds, so that two machines would differ.

use std::path::Path;

use hearth_build::command::Cmd;
use hearth_build::progress::Progress;

use crate::error::ProgramsError;

/// Where modules come from, who attests them, and how to log in there. `GOSUMDB` changes no result either: every
/// module is checked against the `go.sum` of this checkout; without the database only a toolchain is not fetched.
const OF_THE_NETWORK: [&str; 8] = [
    "GOAUTH",
    "GOINSECURE",
    "GONOPROXY",
    "GONOSUMDB",
    "GOPRIVATE",
    "GOPROXY",
    "GOSUMDB",
    "GOVCS",
];

/// The settings that apply, with the values that the user's go command has for them.
pub(crate) fn of_the_network(
    progress: &dyn Progress,
    go: &Path,
) -> Result<Vec<(String, String)>, ProgramsError> {
    let answer = Cmd::new(go)
        .args(["env", "-json"])
        .args(OF_THE_NETWORK)
        .env("GOTOOLCHAIN", "local")
        .output(progress)?;
    let values: std::collections::BTreeMap<String, String> = serde_json::from_str(&answer)
        .map_err(|_| ProgramsError::Output {
            command: "env -json",
            expected: "an object of texts",
            found: answer,
        })?;
    Ok(values
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .collect())
}

/// Whether the variable changes what Go builds: all of Go's own, and those by which C compilers are chosen.
pub(crate) fn is_gos(name: &str) -> bool {
    name.starts_with("GO")
        || name.starts_with("CGO_")
        || name.starts_with("PKG_CONFIG")
        || [
            "AR",
            "CC",
            "CXX",
            "CPATH",
            "C_INCLUDE_PATH",
            "LIBRARY_PATH",
            "GCCGO",
            "SOURCE_DATE_EPOCH",
        ]
        .contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_users_go_are_known() {
        for name in ["GOFLAGS", "GOTOOLCHAIN", "GOAMD64", "CGO_CFLAGS", "CC"] {
            assert!(is_gos(name), "{name}");
        }
        for name in ["PATH", "EGO", "HTTPS_PROXY", "SSL_CERT_FILE"] {
            assert!(!is_gos(name), "{name}");
        }
    }
}
