//! `hearthctl owner`: creates the keys and the secret of an owner.

use std::path::Path;

use hearth_api::owner::{self, OwnerFileError, OwnerFiles, RECOVERY_KEY_FILE};

use super::print;
use crate::args::Owner;
use crate::failure::{Failure, Kind};

pub(super) fn run(command: Owner) -> Result<(), Failure> {
    match command {
        Owner::Init {
            folder,
            recovery_key_only: false,
        } => {
            let files = OwnerFiles::create(&folder).map_err(not_created)?;
            print(&format!(
                "{}\nrecovery recipient: {}\n",
                files.key.public(),
                files.recovery.recipient()
            ))
        }
        Owner::Init { folder, .. } => {
            let key = owner::create_recovery_key(&folder.join(RECOVERY_KEY_FILE));
            let key = key.map_err(failed("create a recovery key"))?;
            print(&format!("recovery recipient: {}\n", key.recipient()))
        }
        Owner::PublicKey { file } => public_key(&file),
    }
}

fn public_key(file: &Path) -> Result<(), Failure> {
    let half = owner::read_public_half(file).map_err(failed("read the key"))?;
    print(&format!("{half}\n"))
}

/// With what to do about a folder that an earlier version has filled.
fn not_created(error: OwnerFileError) -> Failure {
    let lacks_recovery_key = matches!(
        &error,
        OwnerFileError::Incomplete { missing, .. } if missing[..] == [RECOVERY_KEY_FILE]
    );
    let failure = failed("create the files of an owner")(error);
    match lacks_recovery_key {
        true => failure.advise("add a recovery key with --recovery-key-only"),
        false => failure,
    }
}

fn failed(what: &str) -> impl FnOnce(OwnerFileError) -> Failure {
    let failure = Failure::new(Kind::Local, what);
    move |error| failure.because(error)
}
