//! The file that `hearthctl cluster edit` opens in an editor: one line for each setting, with its
//! description above it.
//!
//! It has the form of the arguments of `cluster set` and not that of the JSON output, so that a
//! line can be deleted without breaking the file, and comments can be anywhere. Settings that are
//! fixed are comments.

use hearth_api::labels::quoted;
use hearth_api::settings::{self, SETTINGS, Setting};
use hearth_api::v1::ClusterConfiguration;

use super::settings::{Change, Versioned};
use crate::table::printable;

/// What an error above the file begins with.
const ERROR: &str = "# error: ";

const INTRODUCTION: &str = "\
# Change values, then save the file and close the editor. Lines that begin with \"#\" are ignored.
# Values of a list are separated by commas. A setting without a value is reset to its default; a
# setting whose line is deleted is not changed.
";

/// The file with these settings.
pub(super) fn render(read: &Versioned) -> String {
    let mut text = format!(
        "# Cluster settings, version {}.\n{INTRODUCTION}",
        read.version
    );
    let (fixed, changeable): (Vec<_>, Vec<_>) =
        SETTINGS.iter().partition(|setting| setting.fixed.is_some());
    for setting in changeable {
        let default = match setting.default_value().map(|value| value.to_string()) {
            None => "No default".to_owned(),
            Some(none) if none.is_empty() => "Default: none".to_owned(),
            Some(default) => format!("Default: {default}"),
        };
        let line = line(setting, &read.configuration);
        text.push_str(&format!("\n# {}\n# {default}\n{line}\n", setting.help));
    }
    text.push_str("\n# Fixed when the cluster was created:\n");
    for setting in fixed {
        text.push_str(&format!("# {}\n", line(setting, &read.configuration)));
    }
    text
}

fn line(setting: &Setting, configuration: &ClusterConfiguration) -> String {
    let line = format!("{} = {}", setting.path, shown(setting, configuration));
    line.trim_end().to_owned()
}

/// The value as it is in the file.
fn shown(setting: &Setting, configuration: &ClusterConfiguration) -> String {
    let value = setting.value(configuration).to_string();
    printable(&value).trim().to_owned()
}

/// The file with an error above it, in place of an earlier one.
pub(super) fn with_error(text: &str, error: &str) -> String {
    let kept = text.split_inclusive('\n');
    let kept: String = kept.skip_while(|line| line.starts_with(ERROR)).collect();
    let error: String = error
        .lines()
        .map(|line| format!("{ERROR}{}\n", line.trim()))
        .collect();
    error + &kept
}

/// The settings that have another value in the edited file, or all errors in it.
pub(super) fn changes(read: &ClusterConfiguration, text: &str) -> Result<Change, Vec<String>> {
    let mut change = Change::default();
    let mut errors = Vec::new();
    let lines = text.lines().map(str::trim);
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Err(error) = add(read, line, &mut change) {
            errors.push(error);
        }
    }
    match errors.is_empty() {
        true => Ok(change),
        false => Err(errors),
    }
}

fn add(read: &ClusterConfiguration, line: &str, change: &mut Change) -> Result<(), String> {
    let Some((path, text)) = line.split_once('=') else {
        return Err(format!("expected SETTING = VALUE, got {}", quoted(line)));
    };
    let setting = settings::find("setting", path.trim()).map_err(|error| error.to_string())?;
    // A value of a newer release cannot be parsed, but it can stay.
    if text.trim() == shown(setting, read) {
        return Ok(());
    }
    let mut changed = read.clone();
    let assigned = setting.assign(&mut changed, text);
    assigned.map_err(|error| error.to_string())?;
    if setting.value(&changed) == setting.value(read) {
        return Ok(());
    }
    if let Some(reason) = setting.fixed {
        return Err(format!(
            "{}: expected {}, got {}: it is fixed when the cluster is created, because {reason}",
            setting.path,
            shown(setting, read),
            shown(setting, &changed),
        ));
    }
    let added = change.add(setting, text);
    added.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::{ColdStartPolicy, KubernetesConfiguration, TpmMode};
    use proptest::prelude::*;

    use super::*;

    const LABELS: &str = "kubernetes.synchronized_labels";

    fn read(labels: &[&str]) -> Versioned {
        Versioned {
            version: 42,
            configuration: settings::with_defaults(ClusterConfiguration {
                tpm_mode: TpmMode::Disabled.into(),
                cold_start_policy: ColdStartPolicy::Tpm.into(),
                kubernetes: Some(KubernetesConfiguration {
                    synchronized_labels: labels.iter().map(|&label| label.to_owned()).collect(),
                    ..KubernetesConfiguration::default()
                }),
                ..ClusterConfiguration::default()
            }),
        }
    }

    #[test]
    fn the_file_describes_what_it_contains() {
        let text = render(&read(&["rack", "zone.*"]));
        for part in [
            "version 42",
            "# No default\ncold_start_policy = TPM\n",
            "# Default: none\nkubernetes.synchronized_labels = rack,zone.*\n",
            "# tpm_mode = DISABLED\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(render(&read(&[])).contains("\nkubernetes.synchronized_labels =\n"));
    }

    #[test]
    fn what_differs_is_changed() {
        let read = read(&["rack"]);
        let changed = |text: &str| changes(&read.configuration, text).map(|c| c.contents());
        for unchanged in [
            "",
            "# comment\n",
            "kubernetes.synchronized_labels=rack",
            "  kubernetes.synchronized_labels = rack  \n",
            "tpm_mode = disabled",
            &render(&read),
        ] {
            assert_eq!(changed(unchanged), Ok(Vec::new()), "{unchanged}");
        }
        let edited = render(&read).replace("= rack", "= rack, zone.*");
        assert_eq!(changed(&edited), Ok(vec![(LABELS, "rack,zone.*".into())]));
        let emptied = render(&read).replace("= rack", "=");
        assert_eq!(changed(&emptied), Ok(vec![(LABELS, String::new())]));
    }

    #[test]
    fn all_errors_are_reported_and_the_last_ones_are_shown() {
        let read = read(&["rack"]);
        let text = "nothing\n\
                    kubernetes.labels = a\n\
                    kubernetes.synchronized_labels = a*b\n\
                    tpm_mode = ALWAYS\n\
                    cold_start_policy =\n\
                    cluster_domain = other.internal\n\
                    kubernetes.synchronized_labels = a\n\
                    kubernetes.synchronized_labels = b\n";
        let errors = changes(&read.configuration, text).unwrap_err();
        let expected = [
            "expected SETTING = VALUE, got \"nothing\"",
            "setting: expected one of cluster_domain, ",
            "kubernetes.synchronized_labels[0]: expected ",
            "tpm_mode: expected REQUIRED, BEST_EFFORT or DISABLED, ",
            "cold_start_policy: expected TPM, OWNER or NONE, got no value, ",
            "cluster_domain: expected cluster.internal, got other.internal: it is fixed",
            "kubernetes.synchronized_labels: expected one value, got several",
        ];
        assert_eq!(errors.len(), expected.len(), "{errors:#?}");
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.starts_with(expected), "{error}");
        }
        let once = with_error(text, "one\ntwo");
        assert_eq!(once, format!("# error: one\n# error: two\n{text}"));
        assert_eq!(
            with_error(&once, "three"),
            format!("# error: three\n{text}")
        );
    }

    #[test]
    fn a_value_of_a_newer_release_stays() {
        let mut read = read(&[]);
        read.configuration.tpm_mode = 77;
        let text = render(&read).replace("# tpm_mode", "tpm_mode");
        let changed = changes(&read.configuration, &text).map(|c| c.contents());
        assert_eq!(changed, Ok(Vec::new()));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn arbitrary_files_are_read_without_harm(text: String) {
            let _ = changes(&ClusterConfiguration::default(), &text);
        }

        /// Whatever a server says, the file that was not edited changes nothing.
        #[test]
        fn a_file_that_is_not_edited_changes_nothing(
            cluster_domain: String, tpm_mode: i32, synchronized_labels: Vec<String>,
        ) {
            let configuration = ClusterConfiguration {
                cluster_domain,
                tpm_mode,
                kubernetes: Some(KubernetesConfiguration { synchronized_labels, ..Default::default() }),
                ..ClusterConfiguration::default()
            };
            let read = Versioned { version: 1, configuration };
            let changed = changes(&read.configuration, &render(&read));
            prop_assert!(changed.is_ok_and(|change| change.is_empty()));
        }
    }
}
