//! The owner's files: the owner key, the first-contact secret and the recovery key.
//!
//! The owner creates all three before bootstrap and puts the two public keys and the secret into the
//! first node's parameters. Owner key and secret are needed again to take ownership, owner key and
//! recovery key to [unlock](crate::recovery) the nodes of a cluster that is not running. The owner
//! key is PKCS #8 in PEM, which other tools can read and write; the secret and the recovery key are
//! one line of hexadecimal digits each. All are created once, never overwritten, and readable by
//! their owner only: a file that others can read is rejected.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;
use zeroize::Zeroizing;

use crate::identity::{FirstContactSecret, OwnerKey, PublicKey};
use crate::recovery::{RecoveryKey, RecoveryRecipient};

/// Ours have about a hundred bytes.
const MAX_KEY_FILE_SIZE: u64 = 4096;

/// The usual name of the owner key's file.
pub const KEY_FILE: &str = "owner-key.pem";
/// The usual name of the first-contact secret's file.
pub const SECRET_FILE: &str = "first-contact-secret";
/// The usual name of the recovery key's file.
pub const RECOVERY_KEY_FILE: &str = "recovery-key";

/// The first bytes of a key in PEM.
const PEM: &str = "-----BEGIN";

/// A file of the owner cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OwnerFileError {
    /// The file exists already.
    #[error("{path} already exists; not overwriting a key that may be in use")]
    Exists {
        /// The file's path.
        path: PathBuf,
    },
    /// The folder has some of the files.
    #[error(
        "{folder} has {}, but not {}; not overwriting keys that may be in use",
        exist.join(" and "), missing.join(" or ")
    )]
    Incomplete {
        /// The folder's path.
        folder: PathBuf,
        /// The names of the files that exist.
        exist: Vec<&'static str>,
        /// The names of those that do not.
        missing: Vec<&'static str>,
    },
    /// The file cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file's path.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file's path.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file is readable by others.
    #[error("{path} is readable by others (mode {mode:03o}); run chmod 600 {path}")]
    Open {
        /// The file's path.
        path: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// The content is not what is expected.
    #[error("{path}: expected {wanted}")]
    Content {
        /// The file's path.
        path: PathBuf,
        /// The expected content.
        wanted: &'static str,
    },
}

/// The keys and the secret of an owner.
#[derive(Clone, Debug)]
pub struct OwnerFiles {
    /// The owner key.
    pub key: OwnerKey,
    /// The first-contact secret.
    pub secret: FirstContactSecret,
    /// The recovery key.
    pub recovery: RecoveryKey,
}

impl OwnerFiles {
    /// Generates all of them, and writes them to new files with the usual names in this folder.
    ///
    /// # Errors
    /// If one of the files exists: then none is written. Or if one cannot be written.
    pub fn create(folder: &Path) -> Result<Self, OwnerFileError> {
        let all = [KEY_FILE, SECRET_FILE, RECOVERY_KEY_FILE];
        let (exist, missing): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|name| folder.join(name).symlink_metadata().is_ok());
        if !exist.is_empty() && !missing.is_empty() {
            return Err(OwnerFileError::Incomplete {
                folder: folder.to_owned(),
                exist,
                missing,
            });
        }
        Ok(Self {
            key: create_key(&folder.join(KEY_FILE))?,
            secret: create_first_contact_secret(&folder.join(SECRET_FILE))?,
            recovery: create_recovery_key(&folder.join(RECOVERY_KEY_FILE))?,
        })
    }
}

/// The keys that replace those of an owner. The first-contact secret stays that of the cluster.
#[derive(Clone, Debug)]
pub struct NewKeys {
    /// The owner key.
    pub key: OwnerKey,
    /// The recovery key.
    pub recovery: RecoveryKey,
}

impl NewKeys {
    /// Reads them from the files with the usual names in this folder; generates and writes those
    /// that do not exist. So an attempt that was interrupted is continued with the same keys.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn create_or_read(folder: &Path) -> Result<Self, OwnerFileError> {
        let recovery = folder.join(RECOVERY_KEY_FILE);
        Ok(Self {
            key: created_or_read(&folder.join(KEY_FILE), create_key, read_key)?,
            recovery: created_or_read(&recovery, create_recovery_key, read_recovery_key)?,
        })
    }
}

fn created_or_read<T>(
    path: &Path,
    create: fn(&Path) -> Result<T, OwnerFileError>,
    read: fn(&Path) -> Result<T, OwnerFileError>,
) -> Result<T, OwnerFileError> {
    match create(path) {
        Err(OwnerFileError::Exists { .. }) => read(path),
        created => created,
    }
}

/// The public half of one of the owner's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublicHalf {
    /// Of an owner key.
    Owner(PublicKey),
    /// Of a recovery key.
    Recovery(RecoveryRecipient),
}

impl fmt::Display for PublicHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owner(key) => key.fmt(f),
            Self::Recovery(recipient) => recipient.fmt(f),
        }
    }
}

/// Reads an owner key or a recovery key, and returns its public half.
pub fn read_public_half(path: &Path) -> Result<PublicHalf, OwnerFileError> {
    // Once: it may be a pipe.
    let text = read(path)?;
    if text.trim_start().starts_with(PEM) {
        return Ok(PublicHalf::Owner(parse_key(path, &text)?.public()));
    }
    let key = RecoveryKey::from_bytes(*parse_line(path, &text)?);
    Ok(PublicHalf::Recovery(key.recipient()))
}

/// Generates an owner key and writes it to a new file.
pub fn create_key(path: &Path) -> Result<OwnerKey, OwnerFileError> {
    let key = OwnerKey::generate();
    write_new(path, key.expose_pkcs8_pem().as_bytes())?;
    Ok(key)
}

/// Reads an owner key.
pub fn read_key(path: &Path) -> Result<OwnerKey, OwnerFileError> {
    parse_key(path, &read(path)?)
}

fn parse_key(path: &Path, text: &str) -> Result<OwnerKey, OwnerFileError> {
    OwnerKey::from_pkcs8_pem(text).map_err(|_| OwnerFileError::Content {
        path: path.to_owned(),
        wanted: "an Ed25519 private key, PKCS #8 in PEM",
    })
}

/// Generates a first-contact secret and writes it to a new file.
pub fn create_first_contact_secret(path: &Path) -> Result<FirstContactSecret, OwnerFileError> {
    let secret = FirstContactSecret::generate();
    write_line(path, secret.expose())?;
    Ok(secret)
}

/// Reads a first-contact secret.
pub fn read_first_contact_secret(path: &Path) -> Result<FirstContactSecret, OwnerFileError> {
    Ok(FirstContactSecret::from_bytes(*read_line(path)?))
}

/// Generates a recovery key and writes it to a new file.
pub fn create_recovery_key(path: &Path) -> Result<RecoveryKey, OwnerFileError> {
    let key = RecoveryKey::generate();
    write_line(path, key.expose())?;
    Ok(key)
}

/// Reads a recovery key.
pub fn read_recovery_key(path: &Path) -> Result<RecoveryKey, OwnerFileError> {
    Ok(RecoveryKey::from_bytes(*read_line(path)?))
}

/// Writes 32 secret bytes to a new file, as a line of hexadecimal digits.
fn write_line(path: &Path, secret: &[u8; 32]) -> Result<(), OwnerFileError> {
    let digits = Zeroizing::new(hex::encode(secret));
    let line = Zeroizing::new(format!("{}\n", &*digits));
    write_new(path, line.as_bytes())
}

/// Reads what [`write_line`] has written.
fn read_line(path: &Path) -> Result<Zeroizing<[u8; 32]>, OwnerFileError> {
    parse_line(path, &read(path)?)
}

fn parse_line(path: &Path, text: &str) -> Result<Zeroizing<[u8; 32]>, OwnerFileError> {
    let mut bytes = Zeroizing::new([0; 32]);
    hex::decode_to_slice(text.trim(), &mut bytes[..]).map_err(|_| OwnerFileError::Content {
        path: path.to_owned(),
        wanted: "64 hexadecimal digits",
    })?;
    Ok(bytes)
}

/// Writes a file that must not exist yet, completely or not at all.
fn write_new(path: &Path, content: &[u8]) -> Result<(), OwnerFileError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists => OwnerFileError::Exists {
            path: path.to_owned(),
        },
        _ => OwnerFileError::Write {
            path: path.to_owned(),
            source,
        },
    };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    written.map_err(|error| {
        // Half a key is worse than none; the first error is the one to report.
        let _ = fs::remove_file(path);
        failed(error)
    })
}

fn read(path: &Path) -> Result<Zeroizing<String>, OwnerFileError> {
    let failed = |source| OwnerFileError::Read {
        path: path.to_owned(),
        source,
    };
    let file = fs::File::open(path).map_err(failed)?;
    let readers = Readers::of(&file).map_err(failed)?;
    if let Readers::Others { mode, fixed: false } = readers {
        return Err(OwnerFileError::Open {
            path: path.to_owned(),
            mode,
        });
    }
    let mut text = Zeroizing::new(String::new());
    file.take(MAX_KEY_FILE_SIZE)
        .read_to_string(&mut text)
        .map_err(failed)?;
    Ok(text)
}

/// Who can read a file.
enum Readers {
    Owner,
    /// Group or others. `fixed`: this user cannot change that.
    Others {
        mode: u32,
        fixed: bool,
    },
}

impl Readers {
    fn of(file: &fs::File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let mode = metadata.mode() & 0o777;
        // The mode of a pipe says nothing about who can read it.
        if !metadata.is_file() || mode & 0o077 == 0 {
            return Ok(Self::Owner);
        }
        let user = rustix::process::geteuid();
        let is_own = user.is_root() || metadata.uid() == user.as_raw();
        let mounted = rustix::fs::fstatvfs(file)?.f_flag;
        let fixed = !is_own || mounted.contains(StatVfsMountFlags::RDONLY);
        Ok(Self::Others { mode, fixed })
    }
}

/// The permission bits of a key or secret that others can read as well, where this user cannot change that: the file
/// belongs to somebody else, or its file system is read-only, as that of a mounted secret. Such files are read all the same;
/// whoever does so warns of it.
///
/// # Errors
/// If the file cannot be opened.
pub fn readable_by_others(path: &Path) -> Result<Option<u32>, OwnerFileError> {
    let failed = |source| OwnerFileError::Read {
        path: path.to_owned(),
        source,
    };
    // A pipe is opened once, by whoever reads the key.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Ok(None);
    }
    let file = fs::File::open(path).map_err(failed)?;
    Ok(match Readers::of(&file).map_err(failed)? {
        Readers::Others { mode, fixed: true } => Some(mode),
        Readers::Others { fixed: false, .. } | Readers::Owner => None,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn keys_and_secrets_read_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("owner-key.pem");
        let key = create_key(&path).expect("made");
        assert_eq!(read_key(&path).expect("read").public(), key.public());
        let text = fs::read_to_string(&path).expect("text");
        assert!(text.starts_with("-----BEGIN PRIVATE KEY-----\n"), "{text}");

        let path = folder.path().join("first-contact-secret");
        let secret = create_first_contact_secret(&path).expect("made");
        assert_eq!(read_first_contact_secret(&path).expect("read"), secret);
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        let path = folder.path().join("recovery-key");
        let key = create_recovery_key(&path).expect("made");
        let read = read_recovery_key(&path).expect("read");
        assert_eq!(read.recipient(), key.recipient());
        let text = fs::read_to_string(&path).expect("text");
        assert_eq!(text, format!("{}\n", hex::encode(key.expose())));
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn both_kinds_of_keys_have_a_public_half() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = OwnerFiles::create(folder.path()).expect("made");
        let half = |name| read_public_half(&folder.path().join(name)).expect("read");
        assert_eq!(half(KEY_FILE), PublicHalf::Owner(files.key.public()));
        assert_eq!(
            half(RECOVERY_KEY_FILE),
            PublicHalf::Recovery(files.recovery.recipient())
        );
    }

    #[test]
    fn a_part_of_the_files_is_not_completed_by_others() {
        let folder = tempfile::tempdir().expect("a folder");
        OwnerFiles::create(folder.path()).expect("made");
        let error = OwnerFiles::create(folder.path()).expect_err("all exist");
        assert!(matches!(error, OwnerFileError::Exists { .. }), "{error}");

        fs::remove_file(folder.path().join(RECOVERY_KEY_FILE)).expect("removed");
        let error = OwnerFiles::create(folder.path()).expect_err("two exist");
        let text = error.to_string();
        assert!(
            text.contains("has owner-key.pem and first-contact-secret, but not recovery-key"),
            "{text}"
        );
        fs::remove_file(folder.path().join(KEY_FILE)).expect("removed");
        let error = OwnerFiles::create(folder.path()).expect_err("one exists");
        let text = error.to_string();
        assert!(
            text.contains("has first-contact-secret, but not owner-key.pem or recovery-key"),
            "{text}"
        );
        let names = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(names, 1, "nothing was written");
    }

    #[test]
    fn new_keys_are_the_same_the_next_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = NewKeys::create_or_read(folder.path()).expect("made");
        let again = NewKeys::create_or_read(folder.path()).expect("read");
        assert_eq!(again.key.public(), first.key.public());
        assert_eq!(again.recovery.recipient(), first.recovery.recipient());
        // An interrupted attempt has made only one of them.
        fs::remove_file(folder.path().join(RECOVERY_KEY_FILE)).expect("removed");
        let completed = NewKeys::create_or_read(folder.path()).expect("completed");
        assert_eq!(completed.key.public(), first.key.public());
        assert_ne!(completed.recovery.recipient(), first.recovery.recipient());
    }

    #[test]
    fn nothing_is_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let key = create_key(&path).expect("made");
        assert!(matches!(
            create_key(&path),
            Err(OwnerFileError::Exists { .. })
        ));
        assert_eq!(read_key(&path).expect("still there").public(), key.public());
    }

    #[test]
    fn what_others_can_read_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        create_key(&path).expect("made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("chmod");
        let error = read_key(&path).expect_err("refused");
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn other_content_is_told_but_not_shown() {
        let folder = tempfile::tempdir().expect("a folder");
        for content in [
            "",
            "a5a5",
            "-----BEGIN PRIVATE KEY-----\na5a5\n-----END PRIVATE KEY-----\n",
        ] {
            let path = folder.path().join(format!("{}", content.len()));
            write_new(&path, content.as_bytes()).expect("written");
            let error = read_key(&path).expect_err("no key");
            assert!(matches!(error, OwnerFileError::Content { .. }), "{error}");
            assert!(!error.to_string().contains("a5a5"), "{error}");
            let error = read_first_contact_secret(&path).expect_err("no secret");
            assert!(matches!(error, OwnerFileError::Content { .. }), "{error}");
            let error = read_recovery_key(&path).expect_err("no key");
            assert!(matches!(error, OwnerFileError::Content { .. }), "{error}");
            let error = read_public_half(&path).expect_err("neither");
            assert!(!error.to_string().contains("a5a5"), "{error}");
        }
    }
}
