//! The member record: which etcd member this node's data belong to, and what to do if the node's
//! role names another one.
//!
//! A node joins with a *record*: the member ID under which the curators have added it, and the
//! initial cluster. The record is written after the peer credentials and before etcd is started.
//! etcd's data belong to the member in the record, or to the founder if there is no record. Once
//! etcd has taken part, the node notes that it has *joined*: from then on etcd's write-ahead log
//! must exist, because other members may rely on what this member has acknowledged. Before that, an
//! interrupted start is repeated. No progress is reported before that note is durable, and a
//! learner that has not reported progress is not promoted.
//!
//! Data are only wiped because of the node's role, which comes from the curators. Wiping removes
//! the data first and the record last, so that an interrupted wipe is detected and repeated.

use std::path::PathBuf;
use std::{fs, io};

use hearth_api::private::StoredMember;
use hearth_host::layout;
use hearth_host::record::{self, Record as _, RecordError};
use hearth_sys::files::{self, FileError};

use super::MemberId;

/// The member record is invalid, or the disk failed.
#[derive(Debug, thiserror::Error)]
pub enum MemberRecordError {
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The data directory could not be removed.
    #[error("cannot remove {path}")]
    Remove {
        /// The directory.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The record is malformed, or of another version.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// The member that a node joins as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joining {
    /// Member ID that etcd assigned when the curators added the learner.
    pub member: MemberId,
    /// Value of `--initial-cluster`: all members including this one, `name=url`, separated by
    /// commas.
    pub initial_cluster: String,
}

/// What is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The member in the record.
    pub record: Option<MemberId>,
    /// Whether etcd's write-ahead log exists.
    pub log: bool,
    /// Whether there is any file of etcd at all.
    pub anything: bool,
}

/// What to do with what is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartMode {
    /// Nothing: there is nothing on the disk, and the node has no consensus role.
    Rest,
    /// Start etcd.
    Start,
    /// Get the credentials and the record for a join, then start etcd.
    Join,
    /// Wipe everything, and decide again.
    Wipe,
    /// Start nothing: the role is a founder's, and the data are another member's.
    Refuse,
}

/// Compares the role (the member ID in it; 0 is the founder's) with the disk.
///
/// | role | record M | no record, data | no record, no data |
/// |---|---|---|---|
/// | none | wipe | wipe | rest |
/// | founder | refuse | start | start, which reports what is missing |
/// | M | start | wipe | join |
/// | other | wipe | wipe | join |
pub fn judge(role: Option<MemberId>, found: Found) -> StartMode {
    const FOUNDER: MemberId = MemberId(0);
    match (role, found.record) {
        (None, _) if found.anything => StartMode::Wipe,
        (None, _) => StartMode::Rest,
        (Some(FOUNDER), None) => StartMode::Start,
        // A founder's role only comes back with a backup, and then it is unknown whose data these
        // are.
        (Some(FOUNDER), Some(_)) => StartMode::Refuse,
        (Some(role), Some(record)) if role == record => StartMode::Start,
        (Some(_), Some(_)) => StartMode::Wipe,
        (Some(_), None) if found.log => StartMode::Wipe,
        (Some(_), None) => StartMode::Join,
    }
}

/// Inspects the disk.
pub fn find(etcd: &layout::Etcd) -> Result<Found, MemberRecordError> {
    let record = load(etcd)?.map(|joining| joining.member);
    let traces = [
        etcd.data(),
        etcd.joined(),
        etcd.company(),
        etcd.peer().key(),
    ];
    Ok(Found {
        record,
        log: has_log(etcd),
        anything: record.is_some() || traces.iter().any(|path| path.exists()),
    })
}

/// Whether etcd's write-ahead log exists. etcd creates the directory first and the complete log in
/// it later.
pub fn has_log(etcd: &layout::Etcd) -> bool {
    etcd.log().exists()
}

/// Reads the record of a join, if there is one.
pub fn load(etcd: &layout::Etcd) -> Result<Option<Joining>, MemberRecordError> {
    let read = |stored: StoredMember| {
        if stored.member_id == 0 || stored.initial_cluster.is_empty() {
            return Err("member ID and initial cluster must not be empty");
        }
        Ok(Joining {
            member: MemberId(stored.member_id),
            initial_cluster: stored.initial_cluster,
        })
    };
    Ok(record::load(&etcd.member(), read)?)
}

/// Writes the record durably.
pub fn save(etcd: &layout::Etcd, joining: &Joining) -> Result<(), MemberRecordError> {
    let stored = StoredMember {
        version: StoredMember::VERSION,
        member_id: joining.member.0,
        initial_cluster: joining.initial_cluster.clone(),
    };
    Ok(record::save(&etcd.member(), &stored)?)
}

/// Whether the member in the record has taken part.
pub fn has_joined(etcd: &layout::Etcd) -> bool {
    etcd.joined().exists()
}

/// Notes durably that the member in the record has taken part.
pub fn note_joined(etcd: &layout::Etcd) -> Result<(), MemberRecordError> {
    Ok(files::write_atomic(
        &etcd.joined(),
        b"",
        files::PRIVATE_FILE,
    )?)
}

/// Whether there are, or will be, other members.
pub fn expects_peers(etcd: &layout::Etcd) -> Result<bool, MemberRecordError> {
    Ok(etcd.company().exists() || load(etcd)?.is_some())
}

/// Notes durably that there will be other members.
pub fn note_peers_expected(etcd: &layout::Etcd) -> Result<(), MemberRecordError> {
    Ok(files::write_atomic(
        &etcd.company(),
        b"",
        files::PRIVATE_FILE,
    )?)
}

/// Removes everything that makes this node a member, durably. etcd must have exited. Blocks on disk
/// I/O.
pub fn wipe(etcd: &layout::Etcd) -> Result<(), MemberRecordError> {
    discard_data(etcd)?;
    for path in traces(etcd) {
        files::remove_durably(&path)?;
    }
    Ok(())
}

/// The files of a member apart from its data, in the order of removal.
fn traces(etcd: &layout::Etcd) -> [PathBuf; 9] {
    let peer = etcd.peer();
    [
        peer.certificate(),
        peer.ca(),
        etcd.joined(),
        etcd.company(),
        etcd.damaged(),
        etcd.starts(),
        etcd.store_version(),
        peer.key(),
        etcd.member(),
    ]
}

/// Removes etcd's data durably.
pub fn discard_data(etcd: &layout::Etcd) -> Result<(), MemberRecordError> {
    let path = etcd.data();
    match fs::remove_dir_all(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(MemberRecordError::Remove { path, source }),
    }
    Ok(files::sync_dir(etcd.path())?)
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;
    use hearth_host::layout::Root;

    use super::*;
    use crate::store_version;

    const M: MemberId = MemberId(7);

    fn disk() -> (tempfile::TempDir, layout::Etcd) {
        let directory = tempfile::tempdir().unwrap();
        let data = Root::under(directory.path()).data;
        data.make_directories().unwrap();
        (directory, data.etcd())
    }

    fn joining(member: MemberId) -> Joining {
        Joining {
            member,
            initial_cluster: "a=https://a:1".into(),
        }
    }

    /// The writes of a join, in order.
    fn join_steps(etcd: &layout::Etcd) -> Vec<Box<dyn Fn() + '_>> {
        let peer = etcd.peer();
        let file =
            |path: PathBuf| -> Box<dyn Fn()> { Box::new(move || fs::write(&path, "x").unwrap()) };
        vec![
            file(peer.ca()),
            file(peer.certificate()),
            file(peer.key()),
            Box::new(|| save(etcd, &joining(M)).unwrap()),
            Box::new(|| fs::create_dir_all(etcd.data()).unwrap()),
            Box::new(|| fs::create_dir_all(etcd.log()).unwrap()),
            Box::new(|| note_joined(etcd).unwrap()),
        ]
    }

    #[test]
    fn a_join_that_is_cut_off_anywhere_goes_on() {
        let steps = {
            let (_directory, etcd) = disk();
            join_steps(&etcd).len()
        };
        for cut in 0..=steps {
            let (_directory, etcd) = disk();
            for step in &join_steps(&etcd)[..cut] {
                step();
            }
            let found = find(&etcd).unwrap();
            // The same role: what exists is used, or written again.
            let expected = if cut < 4 {
                StartMode::Join
            } else {
                StartMode::Start
            };
            assert_eq!(judge(Some(M), found), expected, "{cut}: {found:?}");
            // No role, or another one: everything is wiped, and the next join starts from nothing.
            let changed = judge(None, found);
            let traces = cut > 2;
            assert_eq!(changed == StartMode::Wipe, traces, "{cut}: {found:?}");
            let other = judge(Some(MemberId(8)), found);
            assert!(matches!(other, StartMode::Wipe | StartMode::Join), "{cut}");
            assert_eq!(other == StartMode::Wipe, found.record.is_some(), "{cut}");
        }
    }

    #[test]
    fn a_wipe_that_is_cut_off_anywhere_is_done_again() {
        for cut in 0..=traces(&disk().1).len() + 2 {
            let (_directory, etcd) = disk();
            for step in join_steps(&etcd) {
                step();
            }
            note_peers_expected(&etcd).unwrap();
            fs::write(etcd.damaged(), "").unwrap();
            fs::write(etcd.starts(), "").unwrap();
            store_version::note(&etcd).unwrap();
            // The data are removed in several steps.
            if cut > 0 {
                fs::remove_dir_all(etcd.log()).unwrap();
            }
            if cut > 1 {
                discard_data(&etcd).unwrap();
            }
            for path in traces(&etcd).iter().take(cut.saturating_sub(2)) {
                fs::remove_file(path).unwrap();
            }
            let found = find(&etcd).unwrap();
            let is_done = cut == traces(&etcd).len() + 2;
            for role in [None, Some(MemberId(8))] {
                let verdict = judge(role, found);
                assert_eq!(verdict == StartMode::Wipe, !is_done, "{cut}: {found:?}");
            }
            wipe(&etcd).unwrap();
            let found = find(&etcd).unwrap();
            assert!(!found.anything, "{found:?}");
            assert_eq!(judge(None, found), StartMode::Rest);
            assert_eq!(judge(Some(MemberId(8)), found), StartMode::Join);
        }
    }

    #[test]
    fn a_founder_is_wiped_by_another_role_only() {
        let founder = Found {
            record: None,
            log: true,
            anything: true,
        };
        assert_eq!(judge(Some(MemberId(0)), founder), StartMode::Start);
        assert_eq!(judge(None, founder), StartMode::Wipe);
        assert_eq!(judge(Some(M), founder), StartMode::Wipe);
        // What is missing is reported when etcd is started.
        let lost = Found {
            log: false,
            ..founder
        };
        assert_eq!(judge(Some(MemberId(0)), lost), StartMode::Start);
        let joined = Found {
            record: Some(M),
            ..founder
        };
        assert_eq!(judge(Some(MemberId(0)), joined), StartMode::Refuse);
    }

    #[test]
    fn a_spoilt_record_is_not_an_absent_one() {
        let (_directory, etcd) = disk();
        save(&etcd, &joining(M)).unwrap();
        assert_eq!(load(&etcd).unwrap(), Some(joining(M)));
        for content in [&b""[..], b"\xff\xff", b"\x08\x02"] {
            fs::write(etcd.member(), content).unwrap();
            assert!(find(&etcd).is_err(), "{content:?}");
        }
    }

    #[test]
    fn the_stored_form_stays() {
        let (_directory, etcd) = disk();
        let joining = Joining {
            member: MemberId(0x0102_0304_0506_0708),
            initial_cluster: "a=https://a:2380,b=https://b:2380".into(),
        };
        save(&etcd, &joining).unwrap();
        let stored = stored_form!("etcd-member.pb", fs::read(etcd.member()).unwrap());
        fs::write(etcd.member(), stored).unwrap();
        assert_eq!(load(&etcd).unwrap(), Some(joining));

        // These files are markers and have no content.
        note_joined(&etcd).unwrap();
        note_peers_expected(&etcd).unwrap();
        for path in [etcd.joined(), etcd.company()] {
            assert_eq!(fs::read(path).unwrap(), b"");
        }
    }
}
