//! `hearthctl image write` and `set-parameters`: disks from which machines boot.
//!
//! Everything that can be wrong is found before the question, and nothing is changed before the
//! answer. [`disk`](crate::disk) does the work, in a thread of its own, so that an interruption is
//! heard while it waits for a device.

use std::fs::File;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearth_parameters::MAX_SIZE;

use super::super::parameters::refused;
use super::super::{print, print_json, tell};
use crate::args::{Format, SetParameters, Sure, Write};
use crate::disk::{
    CopyError, Device, Host, Image, Target, TargetError, Work, WorkError, size_text,
};
use crate::failure::{Failure, Kind};
use crate::files;
use crate::output::WrittenDisk;

pub(super) async fn image(wanted: Write) -> Result<(), Failure> {
    let parameters = wanted.parameters.as_deref().map(accepted).transpose()?;
    let image = open(&wanted.image)?;
    if let (None, Some(own)) = (&parameters, &image.parameters) {
        hearth_parameters::parse(own).map_err(|problem| {
            let what = format!("use the parameters in {}", wanted.image.display());
            Failure::invalid(what, problem).advise("to replace them: --parameters FILE")
        })?;
    }
    let what = format!("write the image to {}", wanted.target.display());
    let target = Target::of(&Host::this(), &wanted.target).map_err(refusal(&what))?;
    let metadata = image.file.metadata().map_err(TargetError::Look);
    metadata
        .and_then(|metadata| target.check_is_not(&metadata))
        .map_err(refusal(&what))?;
    let loss = match &target {
        Target::Device(device) => {
            device.check(&image.layout).map_err(refusal(&what))?;
            Some(described(device, "Everything on it will be lost."))
        }
        Target::File { path, size } => size.map(|size| {
            let size = size_text(size);
            format!("{} exists ({size}), and will be replaced.", path.display())
        }),
    };
    confirm(&what, loss, wanted.sure)?;
    let work = Work {
        image: Some(image),
        parameters,
        target,
    };
    run(what, work, wanted.output.form).await
}

pub(super) async fn parameters(wanted: SetParameters) -> Result<(), Failure> {
    let parameters = accepted(&wanted.parameters)?;
    let what = format!("write the parameters to {}", wanted.target.display());
    let target = Target::of(&Host::this(), &wanted.target).map_err(refusal(&what))?;
    let loss = match &target {
        Target::Device(device) => {
            device.check_use().map_err(refusal(&what))?;
            Some(described(device, "The parameters on it will be replaced."))
        }
        Target::File { size: Some(_), .. } => None,
        Target::File { size: None, .. } => {
            return Err(Failure::new(Kind::Local, what)
                .because("there is no such file")
                .advise("to make one of an image: hearthctl image write"));
        }
    };
    confirm(&what, loss, wanted.sure)?;
    let work = Work {
        image: None,
        parameters: Some(parameters),
        target,
    };
    run(what, work, wanted.output.form).await
}

/// The content of a file with parameters, which a machine would accept.
fn accepted(file: &Path) -> Result<Vec<u8>, Failure> {
    let bytes = files::read(file, MAX_SIZE)?;
    hearth_parameters::parse(&bytes).map_err(refused(file))?;
    Ok(bytes)
}

fn open(path: &Path) -> Result<Image, Failure> {
    let failed = || Failure::new(Kind::Local, format!("use the image {}", path.display()));
    let file = File::open(path).map_err(|error| failed().because(error))?;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    if !is_file {
        return Err(failed().because("expected a regular file"));
    }
    Image::read(file).map_err(|error| failed().because(error))
}

fn refusal<E>(what: &str) -> impl Fn(E) -> Failure
where
    E: std::error::Error + Send + Sync + 'static,
{
    move |error| Failure::new(Kind::Local, what).because(error)
}

fn described(device: &Device, loss: &str) -> String {
    format!("{}{loss}", device.text())
}

/// Says what will be lost, if anything is, and asks.
fn confirm(what: &str, loss: Option<String>, sure: Sure) -> Result<(), Failure> {
    let Some(loss) = loss else {
        return Ok(());
    };
    eprintln!("{loss}");
    if sure.yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::new(Kind::Local, what)
            .because("standard input is not a terminal, so nobody can be asked")
            .advise("to confirm, repeat the command with --yes"));
    }
    eprint!("Type \"yes\" to go on: ");
    io::stderr().flush().map_err(refusal(what))?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(refusal(what))?;
    match answer.trim() {
        "yes" => Ok(()),
        _ => Err(Failure::new(Kind::Local, what).because("not confirmed; nothing was changed")),
    }
}

/// Does the work and prints the result. If it is interrupted, it says what has become of the target.
async fn run(what: String, work: Work, form: Format) -> Result<(), Failure> {
    let work = Arc::new(work);
    let stop = Arc::new(AtomicBool::new(false));
    let (worker, stopped) = (work.clone(), stop.clone());
    #[allow(clippy::disallowed_methods, reason = "this is no runnable of a node")]
    let mut thread = tokio::task::spawn_blocking(move || {
        let size = worker.image.as_ref().map_or(0, |image| image.layout.size);
        let told = std::cell::RefCell::new(String::new());
        let is_terminal = io::stderr().is_terminal();
        let progress = |done: u64| {
            if is_terminal && size > 0 {
                let percent = done * 10 / size * 10;
                tell(&mut told.borrow_mut(), format!("written: {percent} %"));
            }
        };
        worker.run(&stopped, &progress)
    });
    let done = tokio::select! {
        done = &mut thread => done,
        _ = tokio::signal::ctrl_c() => {
            stop.store(true, Ordering::Relaxed);
            thread.await
        }
    };
    let done = done.map_err(refusal(&what))?;
    let done = done.map_err(|error| {
        let kind = match error {
            WorkError::Copy(CopyError::Interrupted) => Kind::Interrupted,
            _ => Kind::Local,
        };
        let left = left_behind(&work, &error);
        let failure = Failure::new(kind, &what).because(error);
        match left {
            Some(left) => failure.advise(left),
            None => failure,
        }
    })?;
    if done.is_stale {
        eprintln!(
            "hearthctl: warning: this system goes on with the former partitions of {} until it is \
             attached again",
            work.target.path().display()
        );
    }
    let parsed = done.parameters.as_deref().map(hearth_parameters::parse);
    let parsed = parsed.transpose().map_err(refusal(&what))?;
    let written = WrittenDisk::new(&work.target, &done, parsed.as_ref());
    match form {
        Format::Table => print(&written.text()),
        Format::Json => print_json(&written),
    }
}

/// The state of a target to which not everything was done; nothing if nothing was.
fn left_behind(work: &Work, error: &WorkError) -> Option<String> {
    if let WorkError::Target(_) | WorkError::Layout(_) = error {
        return None;
    }
    let path = work.target.path().display();
    Some(match (&work.image, &work.target) {
        (None, _) => format!("the parameters on {path} may be incomplete: write them again"),
        (Some(_), Target::Device(_)) => {
            format!("{path} is incomplete, and what was on it may be lost: write the image again")
        }
        (Some(_), Target::File { size: None, .. }) => format!("{path} was not made"),
        (Some(_), Target::File { size: Some(_), .. }) => format!("{path} is as it was"),
    })
}
