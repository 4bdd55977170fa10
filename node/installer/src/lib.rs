//! Installs a node on a disk of the machine, when the machine was booted from an installation medium.
//!
//! The medium (`hearth_image::installer`) has the node's own kernel and program, with one word more on the command line
//! ([`is_booted`]). The core then runs [`run`] in the place of everything that makes a node: no network, no enrolment.
//!
//! ```text
//! find the medium by its label ─► parameters, from the usual sources (the medium is one of them)
//!    ─► did this installation write a disk already? ── yes ─► say so, boot from it
//!    ─► choose a disk by `install` ([`choice`](hearth_host::disks::choice)), or ask ([`dialogue`])
//!    ─► write the image, read it back ([`write`](mod@write)) ─► parameters and identity onto its ESP
//!    ─► the partition table, last ─► the firmware's boot entry ─► reboot
//! ```
//!
//! What must hold:
//!
//! - A disk with something on it is never written unless it was named by itself: by its serial number or WWN in the
//!   parameters, or by its name typed twice.
//! - A power cut at any moment leaves the disk as it was, or one on which the installation begins again, or a node.
//! - An installation, that is one payload with the same parameters, is not repeated: its identity is on the ESP of the disk
//!   that it has completed. So a medium that stays in the machine does no harm, even if the firmware prefers it.
//! - Parameters that a node would refuse are refused before anything is written.
//!
//! Everything that decides is apart from what reads and writes: [`choice`](hearth_host::disks::choice),
//! [`content`](hearth_host::disks::content), [`dialogue`], [`payload`].

pub mod dialogue;
mod disks;
mod medium;
pub mod payload;
mod target;
mod terminals;
pub mod write;

use std::cell::Cell;
use std::sync::Arc;
use std::{fs, io};

use hearth_api::chain;
use hearth_api::console::Report;
use hearth_api::disk_conditions::DiskConditions;
use hearth_api::names::installer::KERNEL_WORD;
use hearth_base::supervisor::{Context, Failure, Outcome, spawn_blocking};
use hearth_host::disks::Known;
use hearth_host::disks::choice::{Candidate, Needs, choose};
use hearth_host::layout::{COMMAND_LINE, Root};
use hearth_host::parameters::{Source, Sources};
use hearth_host::power::{Power, PowerRequest};
use hearth_sys::block::Blocks;
use hearth_sys::gpt::Partition;
use ring::digest::{self, SHA256};

use dialogue::{Answer, Dialogue, question};
use target::{Additions, InstallError, Payload};
use terminals::{Keyboards, Mirror};
use write::Progress;

/// What an installer needs of the core.
pub struct Installer {
    /// The file system of the node that it would be.
    pub root: Root,
    /// To reboot.
    pub power: Power,
}

/// Whether this machine was booted from an installation medium.
///
/// # Errors
/// If the kernel's command line cannot be read.
pub fn is_booted() -> io::Result<bool> {
    let line = fs::read_to_string(COMMAND_LINE)?;
    Ok(line
        .split_ascii_whitespace()
        .any(|word| word == KERNEL_WORD))
}

/// What the machine is told.
struct Instructions {
    /// The disk; `None`: ask.
    install: Option<DiskConditions>,
    /// The bytes, if they go onto the ESP of the disk. Secret.
    parameters: Option<Vec<u8>>,
    /// Of this payload with these parameters: 64 hexadecimal digits.
    identity: String,
}

/// What an installation begins with.
struct Begun {
    /// The name of the medium's disk.
    medium: String,
    needs: Needs,
    instructions: Instructions,
}

/// Installs the node. A failure leaves the disk unfinished, and is tried again after a question.
pub async fn run(ctx: Context, installer: Arc<Installer>) -> Outcome {
    ctx.healthy();
    ctx.until_cancelled(installer.install()).await
}

impl Installer {
    async fn install(&self) -> Outcome {
        let mirror = Arc::new(Mirror::open());
        let begun = self.begin(mirror.clone()).await?;
        let begun = match begun {
            Ok(begun) => Arc::new(begun),
            Err(refusal) => {
                // Nothing was written, and nothing will be.
                tracing::error!("{refusal}");
                mirror.tell(&Report::Refused(refusal));
                return std::future::pending().await;
            }
        };
        let mut is_first = true;
        loop {
            let (disks, done) = self.look(begun.clone()).await?;
            if let Some((name, esp)) = done {
                mirror.tell(&Report::Installed(format!(
                    "{name} already, from this medium and with these parameters"
                )));
                return self.boot(&mirror, &esp).await;
            }
            let chosen = match begun.instructions.install.as_ref().filter(|_| is_first) {
                Some(install) => self.by_parameters(&mirror, install, &disks, begun.needs),
                None => None,
            };
            is_first = false;
            let chosen = match chosen {
                Some(chosen) => chosen,
                None => ask(&mirror, &disks, begun.needs).await,
            };
            match self.write(&mirror, begun.clone(), chosen.clone()).await? {
                Ok(esp) => {
                    mirror.tell(&Report::Installed(chosen.disk.name));
                    return self.boot(&mirror, &esp).await;
                }
                Err(error) => {
                    let why = format!(
                        "the installation on {}: {}",
                        chosen.disk.name,
                        chain(&error)
                    );
                    tracing::error!("{why}");
                    mirror.tell(&Report::Refused(why));
                }
            }
        }
    }

    /// Mounts the medium and reads what is on it, and the parameters; the inner error is a refusal.
    async fn begin(&self, mirror: Arc<Mirror>) -> Result<Result<Begun, String>, Failure> {
        let root = self.root.clone();
        let begin = move || -> Result<Result<Begun, String>, Failure> {
            let tell = |what: &Report| mirror.tell(what);
            let medium = medium::mount(&Blocks::default(), &root.esp, &tell)?;
            tracing::info!(medium, "found the installation medium");
            let header = match Payload::open(&root.esp.payload()) {
                Ok(payload) => payload.header,
                Err(error) => return Ok(Err(chain(&error))),
            };
            let instructions = match instructions(&root, &medium, &header.identity) {
                Ok(instructions) => instructions,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let needs = Needs {
                size: header.size,
                sector_size: Some(header.sector_size),
            };
            Ok(Ok(Begun {
                medium,
                needs,
                instructions,
            }))
        };
        spawn_blocking(begin).await?
    }

    /// All disks, and the one that this installation has written, with its ESP.
    async fn look(
        &self,
        begun: Arc<Begun>,
    ) -> Result<(Vec<Known>, Option<(String, Partition)>), Failure> {
        let esp = self.root.ephemeral.target_esp();
        let look = move || -> Result<_, Failure> {
            let blocks = Blocks::default();
            let disks = hearth_host::disks::all_but(&blocks, &begun.medium)?;
            let done = disks::installed(&blocks, &disks, &begun.instructions.identity, &esp);
            let done = match done {
                Some(known) => {
                    let partition =
                        blocks.only_partition(&known.disk, hearth_api::names::disk::ESP_TYPE)?;
                    Some((known.disk.name.clone(), partition.entry))
                }
                None => None,
            };
            Ok((disks, done))
        };
        spawn_blocking(look).await?
    }

    /// The disk that the parameters mean; says why, if it is none.
    fn by_parameters(
        &self,
        mirror: &Mirror,
        install: &DiskConditions,
        disks: &[Known],
        needs: Needs,
    ) -> Option<Known> {
        let candidates = candidates(disks);
        match choose(install, &candidates, needs) {
            Ok(chosen) => find(disks, chosen),
            Err(error) => {
                let error = format!("install: {error}");
                tracing::warn!("{error}");
                mirror.tell(&Report::Refused(error));
                None
            }
        }
    }

    async fn write(
        &self,
        mirror: &Arc<Mirror>,
        begun: Arc<Begun>,
        chosen: Known,
    ) -> Result<Result<Partition, InstallError>, Failure> {
        let (mirror, root) = (mirror.clone(), self.root.clone());
        let write = move || {
            let name = &chosen.disk.name;
            tracing::info!(disk = name, "installing");
            let additions = Additions {
                identity: &begun.instructions.identity,
                parameters: begun.instructions.parameters.as_deref(),
            };
            let told = Cell::new(None);
            let progress = |step| tell_progress(&mirror, &told, name, step);
            let esp = root.ephemeral.target_esp();
            target::install(
                Payload::open(&root.esp.payload())?,
                (&Blocks::default(), &chosen.disk),
                (&esp, additions),
                &progress,
            )
        };
        Ok(spawn_blocking(write).await?)
    }

    /// Makes the firmware boot from the disk, and reboots.
    async fn boot(&self, mirror: &Mirror, esp: &Partition) -> Outcome {
        let esp = esp.clone();
        match spawn_blocking(move || target::boot_first(&esp)).await? {
            Ok(Some(number)) => tracing::info!("the firmware boots Boot{number:04X} next"),
            Ok(None) => tracing::info!("the firmware has no boot entries"),
            Err(error) => mirror.say(&format!(
                "The firmware does not take a boot entry ({}): remove the medium.",
                chain(&error)
            )),
        }
        self.power.ask(PowerRequest::Reboot, "the installer");
        Ok(())
    }
}

/// Reads the parameters of this machine. The error is what the console says.
fn instructions(root: &Root, medium: &str, payload: &[u8; 32]) -> Result<Instructions, String> {
    let sources = Sources::of_machine(root, medium);
    let found = sources.load_when_detected();
    let found = found.map_err(|error| error.to_string())?;
    let Some(found) = found else {
        return Ok(Instructions {
            install: None,
            parameters: None,
            identity: identity(payload, b""),
        });
    };
    let bytes = sources.read(found.source);
    let bytes = bytes.map_err(|problem| format!("parameters from {}: {problem}", found.source))?;
    let bytes = bytes.unwrap_or_default();
    tracing::info!("parameters from {}", found.source);
    let identity = identity(payload, &bytes);
    // The node finds the others itself, also when they have changed.
    let goes_along = matches!(found.source, Source::Esp | Source::ConfigDrive);
    Ok(Instructions {
        install: found.parameters.install,
        parameters: goes_along.then_some(bytes),
        identity,
    })
}

fn identity(payload: &[u8; 32], parameters: &[u8]) -> String {
    let mut context = digest::Context::new(&SHA256);
    context.update(payload);
    context.update(parameters);
    hex::encode(context.finish())
}

fn candidates(disks: &[Known]) -> Vec<Candidate> {
    disks.iter().map(|known| known.candidate.clone()).collect()
}

fn find(disks: &[Known], chosen: &Candidate) -> Option<Known> {
    let mut disks = disks.iter();
    disks.find(|known| known.candidate == *chosen).cloned()
}

/// Asks people until one of them has named a disk.
async fn ask(mirror: &Mirror, disks: &[Known], needs: Needs) -> Known {
    let candidates = candidates(disks);
    let mut keyboards = Keyboards::open();
    let mut dialogue = Dialogue::default();
    let ask = || {
        question(&candidates, needs)
            .iter()
            .for_each(|line| mirror.say(line));
        mirror.tell(&Report::Waiting(
            "the name of a disk on the console".to_owned(),
        ));
    };
    ask();
    loop {
        let line = keyboards.line().await;
        match dialogue.answer(&line, &candidates, needs) {
            Ok(Answer::Chosen(chosen)) => {
                if let Some(known) = find(disks, chosen) {
                    return known;
                }
            }
            Ok(Answer::Confirm(text)) => mirror.say(&text),
            Err(error) => {
                mirror.say(&error.to_string());
                ask();
            }
        }
    }
}

/// Tells every tenth of a step once.
fn tell_progress(mirror: &Mirror, told: &Cell<Option<Progress>>, disk: &str, step: Progress) {
    let (percent, what) = match step {
        Progress::Cleared(percent) => (percent, "cleared on"),
        Progress::Written(percent) => (percent, "written to"),
        Progress::Verified(percent) => (percent, "verified on"),
    };
    let tenth = percent / 10 * 10;
    let rounded = match step {
        Progress::Cleared(_) => Progress::Cleared(tenth),
        Progress::Written(_) => Progress::Written(tenth),
        Progress::Verified(_) => Progress::Verified(tenth),
    };
    if told.replace(Some(rounded)) != Some(rounded) {
        mirror.tell(&Report::Installing(format!("{tenth} % {what} {disk}")));
    }
}
