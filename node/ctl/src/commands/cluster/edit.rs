//! `hearthctl cluster edit`: changes settings in the user's editor.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use tempfile::TempPath;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

use super::document;
use super::settings::{self, Versioned};
use crate::args::{Format, Global};
use crate::failure::{Failure, Kind};
use crate::files;

const EDIT: &str = "edit the cluster settings";

pub(super) async fn edit(global: &Global, form: Format) -> Result<(), Failure> {
    let read = settings::read(global).await?;
    let file = EditedFile::create(document::render(&read))?;
    loop {
        let before = file.read()?;
        if let Err(failure) = file.open_editor().await {
            return Err(file.keep(failure));
        }
        let text = file.read()?;
        let failure = match attempt(global, &read, &text).await {
            Ok(Some(changed)) => return settings::show(&changed, &[], form),
            Ok(None) => {
                eprintln!("hearthctl: no settings have been changed");
                return Ok(());
            }
            Err(failure) => failure,
        };
        // Closing the editor without a correction ends the command.
        if failure.kind() != Kind::Cluster || text == before {
            return Err(file.keep(failure));
        }
        file.write(&document::with_error(&text, &failure.to_string()))?;
    }
}

/// Changes the settings that differ in the file; `None` if none does.
async fn attempt(
    global: &Global,
    read: &Versioned,
    text: &str,
) -> Result<Option<Versioned>, Failure> {
    let change = document::changes(&read.configuration, text)
        .map_err(|errors| settings::invalid(errors.join("; ")))?;
    if change.is_empty() {
        return Ok(None);
    }
    settings::write(global, read.version, change)
        .await
        .map(Some)
}

/// A temporary file, which is deleted unless it is kept.
struct EditedFile {
    path: TempPath,
    original: String,
}

impl EditedFile {
    fn create(text: String) -> Result<Self, Failure> {
        let created = tempfile::Builder::new()
            .prefix("hearthctl-settings-")
            .suffix(".conf")
            .tempfile();
        let path = created
            .map_err(|error| Failure::new(Kind::Local, "create a temporary file").because(error))?
            .into_temp_path();
        let file = Self {
            path,
            original: text,
        };
        file.write(&file.original)?;
        Ok(file)
    }

    /// Editors may replace the file by another one, so it is opened by its path each time.
    fn read(&self) -> Result<String, Failure> {
        std::fs::read_to_string(&self.path).map_err(|error| failed("read", &self.path, error))
    }

    fn write(&self, text: &str) -> Result<(), Failure> {
        files::write_private(&self.path, text.as_bytes())
            .map_err(|error| failed("write", &self.path, error))
    }

    async fn open_editor(&self) -> Result<(), Failure> {
        let editor = editor();
        let failed = |why: String| {
            Failure::new(Kind::Local, EDIT)
                .because(format!("editor {}: {why}", editor.display()))
                .advise("set $VISUAL or $EDITOR to another editor")
        };
        // The terminal sends interrupts to this process as well, but they are for the editor.
        let _interrupts =
            signal(SignalKind::interrupt()).map_err(|error| failed(error.to_string()))?;
        // By a shell, because the variables may contain arguments.
        let mut script = editor.clone();
        script.push(" \"$1\"");
        let status = Command::new("sh")
            .arg("-c")
            .arg(script)
            .arg("sh")
            .arg(&self.path)
            .status()
            .await
            .map_err(|error| failed(error.to_string()))?;
        match status.success() {
            true => Ok(()),
            false => Err(failed(status.to_string())),
        }
    }

    /// Keeps the file if it has been edited, and adds its path to the failure.
    fn keep(self, failure: Failure) -> Failure {
        if self.read().is_ok_and(|text| text == self.original) {
            return failure;
        }
        match self.path.keep() {
            Ok(path) => failure.also_advise(format!("the edited file is kept: {}", path.display())),
            Err(error) => failure.also_advise(format!("the edited file is lost: {error}")),
        }
    }
}

fn failed(what: &str, path: &Path, error: io::Error) -> Failure {
    Failure::new(Kind::Local, format!("{what} {}", path.display())).because(error)
}

/// The user's editor.
fn editor() -> OsString {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    set("VISUAL")
        .or_else(|| set("EDITOR"))
        .unwrap_or_else(|| "vi".into())
}
