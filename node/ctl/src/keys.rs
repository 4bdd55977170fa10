//! The keys and secrets of an owner, from files that the user names.
//!
//! A file that others can read is refused, with what to do about it. If the user cannot change that, as with a secret that is
//! mounted read-only, it is read with a warning. A file is read once, so it may be a pipe.

use std::path::Path;

use hearth_api::identity::{FirstContactSecret, OwnerKey};
use hearth_api::owner::{self, OwnerFileError, PublicHalf};
use hearth_api::recovery::RecoveryKey;

use crate::failure::{Failure, Kind};

pub(crate) fn owner_key(path: &Path) -> Result<OwnerKey, Failure> {
    read(path, owner::read_key, "read the owner key")
}

pub(crate) fn first_contact_secret(path: &Path) -> Result<FirstContactSecret, Failure> {
    let what = "read the first-contact secret";
    read(path, owner::read_first_contact_secret, what)
}

pub(crate) fn recovery_key(path: &Path) -> Result<RecoveryKey, Failure> {
    read(path, owner::read_recovery_key, "read the recovery key")
}

pub(crate) fn public_half(path: &Path) -> Result<PublicHalf, Failure> {
    read(path, owner::read_public_half, "read the key")
}

fn read<T>(
    path: &Path,
    read: fn(&Path) -> Result<T, OwnerFileError>,
    what: &str,
) -> Result<T, Failure> {
    let failed = |error| Failure::new(Kind::Local, what).because(error);
    let others = owner::readable_by_others(path).map_err(failed)?;
    let key = read(path).map_err(failed)?;
    if let Some(mode) = others {
        let path = path.display();
        eprintln!("hearthctl: warning: {path} is readable by others (mode {mode:03o})");
    }
    Ok(key)
}
