//! `hearthctl owner`: creates owner keys and first-contact secrets.

use hearth_api::owner::{self, OwnerFileError};

use super::print;
use crate::args::Owner;
use crate::failure::{Failure, Kind};

pub(super) fn run(command: Owner) -> Result<(), Failure> {
    let failed = |what: &str| {
        let failure = Failure::new(Kind::Local, what);
        move |error: OwnerFileError| failure.because(error)
    };
    match command {
        Owner::Init { folder } => {
            let key = owner::create_key(&folder.join("owner-key.pem"))
                .map_err(failed("create an owner key"))?;
            owner::create_first_contact_secret(&folder.join("first-contact-secret"))
                .map_err(failed("create a first-contact secret"))?;
            print(&format!("{}\n", key.public()))
        }
        Owner::PublicKey { file } => {
            let key = owner::read_key(&file).map_err(failed("read the owner key"))?;
            print(&format!("{}\n", key.public()))
        }
    }
}
