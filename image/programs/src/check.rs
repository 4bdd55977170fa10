//! Whether a second build gives the same programs.

use std::path::Path;

use hearth_build::cache::Cache;
use hearth_build::files::Log;
use hearth_build::progress::{Length, Progress};

use crate::KIND;
use crate::compile::{Built, Inputs, Work, differences};
use crate::error::ProgramsError;
use crate::go::Caches;
use crate::modules::Module;
use crate::toolchain::Toolchain;

/// Builds the programs of each module again, in another folder and with nothing that was compiled before, and compares
/// them with these, byte by byte.
pub fn check(
    progress: &dyn Progress,
    sources: &Path,
    programs: &[(&'static Module, &Built)],
) -> Result<(), ProgramsError> {
    let cache = Cache::of_user(KIND)?;
    let builder = cache.lock(progress)?;
    let toolchain = Toolchain::pinned(sources)?;
    let scratch = builder.scratch()?;
    let caches = Caches::of_user()?.compiled_in(scratch.path());
    let go = toolchain.go(progress, &caches)?;
    let mut log = Log::create(builder.log())?;
    let mut different = Vec::new();
    for (module, built) in programs {
        let inputs = Inputs::read(progress, sources, module, &toolchain)?;
        let task = progress.start(
            &format!("building {} again", module.name),
            Length::Steps(module.packages),
        );
        let folder = scratch.path().join(module.name);
        let again = Work {
            progress,
            go: &go,
            log: &mut log,
            task: &*task,
        }
        .compile(&inputs, &folder)?;
        let again = Built::read(&again, module)?;
        different.extend(differences(&built.programs(), &again.programs())?);
        task.done();
    }
    Caches::of_user()?.trim(progress)?;
    if different.is_empty() {
        Ok(())
    } else {
        Err(ProgramsError::NotTheSame(different))
    }
}
