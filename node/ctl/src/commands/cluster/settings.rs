//! `hearthctl cluster get` and `set`, and the calls of all commands about settings.

use hearth_api::client::within;
use hearth_api::settings::{self, Setting, SettingError};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{ClusterConfiguration, ConfigureClusterRequest};
use tonic::Code;

use super::super::{cluster_info, print, print_json};
use crate::args::{Assignment, Configure, Format, FormerSetting, Global};
use crate::failure::{Failure, Kind};
use crate::{connection, output};

const READ: &str = "get the cluster settings";
const CHANGE: &str = "change the cluster settings";
/// The setting that each node records with its keys.
const RECORDED: &str = "cold_start_policy";

/// The configuration of the cluster at a version.
pub(super) struct Versioned {
    pub version: u64,
    pub configuration: ClusterConfiguration,
}

/// New values of settings.
#[derive(Debug, Default)]
pub(super) struct Change {
    values: ClusterConfiguration,
    settings: Vec<&'static Setting>,
}

impl Change {
    /// Adds a setting, which must not be in the change already.
    pub(super) fn add(
        &mut self,
        setting: &'static Setting,
        text: &str,
    ) -> Result<(), SettingError> {
        if self.settings.iter().any(|other| other.path == setting.path) {
            return Err(SettingError {
                field: setting.path.to_owned(),
                expected: "one value".to_owned(),
                found: "several".to_owned(),
            });
        }
        setting.assign(&mut self.values, text)?;
        self.settings.push(setting);
        Ok(())
    }

    /// Whether it changes nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.settings.is_empty()
    }

    fn concerns(&self, path: &str) -> bool {
        self.settings.iter().any(|setting| setting.path == path)
    }

    #[cfg(test)]
    pub(super) fn contents(&self) -> Vec<(&'static str, String)> {
        let text = |setting: &Setting| setting.value(&self.values).to_string();
        let settings = self.settings.iter();
        settings.map(|one| (one.path, text(one))).collect()
    }
}

pub(super) async fn get(
    global: &Global,
    which: &[&'static Setting],
    form: Format,
) -> Result<(), Failure> {
    show(&read(global).await?, which, form)
}

pub(super) async fn set(
    global: &Global,
    assignments: &[Assignment],
    at_version: Option<u64>,
    form: Format,
) -> Result<(), Failure> {
    let mut change = Change::default();
    for Assignment { setting, text } in assignments {
        change.add(setting, text).map_err(invalid)?;
    }
    let version = match at_version {
        Some(version) => version,
        None => read(global).await?.version,
    };
    let is_recorded = change.concerns(RECORDED);
    show(&write(global, version, change).await?, &[], form)?;
    if is_recorded {
        eprintln!(
            "hearthctl: each node records {RECORDED} within seconds, or when it is back; \
             `hearthctl node describe` shows what it has recorded"
        );
    }
    Ok(())
}

/// The former names of both.
pub(super) async fn configure(global: &Global, command: Configure) -> Result<(), Failure> {
    match command {
        Configure::Get { output } => get(global, &[], output.form).await,
        Configure::Set {
            setting: FormerSetting::SynchronizedLabels,
            values,
            output,
        } => {
            let path = "kubernetes.synchronized_labels";
            let assignment = Assignment {
                setting: settings::find("setting", path).map_err(invalid)?,
                text: values.join(","),
            };
            set(global, &[assignment], None, output.form).await
        }
    }
}

/// An invalid change.
pub(super) fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
    Failure::invalid(CHANGE, error)
}

pub(super) async fn read(global: &Global) -> Result<Versioned, Failure> {
    let mut management = ManagementClient::new(connection::open(global).await?);
    let info = cluster_info(global, &mut management, READ).await?;
    versioned(READ, info.configuration, info.configuration_version)
}

/// Makes the change, if the configuration is still at this version.
pub(super) async fn write(
    global: &Global,
    version: u64,
    change: Change,
) -> Result<Versioned, Failure> {
    let mut management = ManagementClient::new(connection::open(global).await?);
    let paths = change.settings.iter().map(|setting| setting.path);
    let request = ConfigureClusterRequest {
        version,
        field_mask: paths.map(str::to_owned).collect(),
        configuration: Some(change.values),
    };
    let answer = within(global.timeout, management.configure_cluster(request)).await;
    let answer = answer.map_err(|status| match status.code() {
        Code::Aborted => Failure::new(Kind::Conflict, CHANGE).because(status),
        _ => Failure::call(CHANGE, status),
    })?;
    let answer = answer.into_inner();
    versioned(CHANGE, answer.configuration, answer.version)
}

/// A curator that does not know versions ignores changes at one.
fn versioned(
    what: &str,
    configuration: Option<ClusterConfiguration>,
    version: u64,
) -> Result<Versioned, Failure> {
    match configuration {
        Some(configuration) if version != 0 => Ok(Versioned {
            version,
            configuration,
        }),
        _ => Err(Failure::new(Kind::Cluster, what)
            .because("the curator that answered does not support settings")
            .advise(
                "update the consensus members to a newer image, or try another one with --endpoint",
            )),
    }
}

pub(super) fn show(
    read: &Versioned,
    which: &[&'static Setting],
    form: Format,
) -> Result<(), Failure> {
    let settings = output::Settings::new(read.version, &read.configuration, which);
    match form {
        Format::Table => print(&settings.text()),
        Format::Json => print_json(&settings),
    }
}
