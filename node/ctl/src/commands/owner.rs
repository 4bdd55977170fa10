//! `hearthctl owner`: creates and replaces the keys of an owner, and uses them without a cluster.

mod certificate;
mod replace;

use std::fs::{self, DirBuilder};
use std::io::{self, BufRead, IsTerminal};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use hearth_api::owner::{self, OwnerFileError, OwnerFiles, RECOVERY_KEY_FILE};
use hearth_api::recovery::console::{BEGIN, ConsoleChallenge, END};

use super::print;
use crate::args::{Global, Owner};
use crate::failure::{Failure, Kind};
use crate::keys;

pub(super) async fn run(global: &Global, command: Owner) -> Result<(), Failure> {
    match command {
        Owner::Init {
            folder,
            recovery_key_only: false,
        } => {
            make_folder(&folder)?;
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
        Owner::Replace {
            folder,
            owner_key,
            first_contact_secret,
            wait,
            output,
        } => {
            make_folder(&folder)?;
            let request = replace::Request {
                folder: &folder,
                owner_key: &owner_key,
                first_contact_secret: &first_contact_secret,
                wait,
                form: output.form,
            };
            replace::run(global, request).await
        }
        Owner::Certificate { directory } => certificate::run(global, &directory).await,
        Owner::Answer {
            recovery_key,
            challenge,
        } => answer(&recovery_key, challenge.as_deref()),
        Owner::PublicKey { file } => public_key(&file),
    }
}

/// Makes a folder for secrets, which may exist. A parent that does not exist is rather a typing error.
fn make_folder(folder: &Path) -> Result<(), Failure> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let what = format!("create the directory {}", folder.display());
            Err(Failure::new(Kind::Local, what).because(error))
        }
        _ => Ok(()),
    }
}

fn answer(recovery_key: &Path, challenge: Option<&Path>) -> Result<(), Failure> {
    let key = keys::recovery_key(recovery_key)?;
    let unread = |error| Failure::new(Kind::Local, "read the challenge").because(error);
    let text = match challenge {
        Some(path) => fs::read_to_string(path).map_err(unread)?,
        None => typed().map_err(unread)?,
    };
    // A log has one for each time that somebody has asked; the last one counts.
    let last = text.rfind(BEGIN).map_or(&text[..], |at| &text[at..]);
    let challenge = ConsoleChallenge::parse(last)
        .map_err(|error| Failure::new(Kind::Local, "read the challenge").because(error))?;
    let answer = challenge
        .answered(&key)
        .map_err(|error| Failure::new(Kind::Refused, "answer the challenge").because(error))?;
    let opens = match &challenge {
        ConsoleChallenge::UnlockKey(challenge) => {
            let node = challenge.node();
            format!(
                "unlocks the data partition of node {}, cluster {}",
                node.node_id, node.cluster_id
            )
        }
        ConsoleChallenge::Record(_) => {
            "opens the sealed configuration of a node; the challenge cannot prove of which one"
                .into()
        }
    };
    eprintln!("hearthctl: the answer {opens}");
    print(&format!("{answer}\n"))
}

/// A challenge that is pasted into a terminal, or comes through a pipe.
fn typed() -> io::Result<String> {
    let mut text = String::new();
    if io::stdin().is_terminal() {
        eprintln!("hearthctl: paste the challenge");
    }
    for line in io::stdin().lock().lines() {
        text.push_str(&line?);
        text.push('\n');
        let begun = text.split_once(BEGIN);
        if begun.is_some_and(|(_, challenge)| challenge.contains(END)) && io::stdin().is_terminal()
        {
            break;
        }
    }
    Ok(text)
}

fn public_key(file: &Path) -> Result<(), Failure> {
    let half = keys::public_half(file)?;
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
