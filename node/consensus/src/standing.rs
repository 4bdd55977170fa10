//! As which member of etcd this node's disk is: what was noted before etcd was
//! started, and what is to be done when the node's role says otherwise.
//!
//! A node joins by a *record*: as which member the curators have added it, and
//! with whom. It is written after the peer files and before etcd is started;
//! data of etcd are those of the record's member, or of the founder if there
//! is no record. When etcd has taken part, the node notes that it has *joined*:
//! from then on etcd's log must be there, because others may rely on what this
//! member has acknowledged. Before that, a start that was cut off begins again.
//! No progress is reported before that note is durable, and who has not
//! reported any is not promoted.
//!
//! Nothing is wiped but at the word of the node's role, which comes from the
//! curators. Wiping removes the data first and the record last, so that one
//! that was cut off is found and done again.

use std::{fs, io, path::PathBuf};

use hearth_api::private::StoredMember;
use hearth_host::layout;
use hearth_host::record::{self, Record as _, RecordError};
use hearth_sys::files::{self, FileError};

use super::MemberId;

/// What the disk says makes no sense, or cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StandingError {
    /// The disk.
    #[error(transparent)]
    File(#[from] FileError),
    /// The disk.
    #[error("remove {path}")]
    Remove {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The record is none, or of another version.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// As which member a node joins, and with whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joining {
    /// See there.
    pub member: MemberId,
    /// All members, this one among them: `name=url`, separated by commas.
    pub initial_cluster: String,
}

/// What is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The record's member.
    pub record: Option<MemberId>,
    /// etcd's log is there.
    pub log: bool,
    /// There is anything at all of etcd.
    pub anything: bool,
}

/// What to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing: there is nothing, and nothing is wanted.
    Rest,
    /// Start etcd.
    Start,
    /// Get what a join needs, then start etcd.
    Join,
    /// Wipe everything, and judge again.
    Wipe,
    /// The role is that of a founder, and the data are not.
    Refuse,
}

/// Holds the role (the member ID in it; 0 is the founder's) against the disk.
///
/// | role | record M | no record, data | no record, no data |
/// |---|---|---|---|
/// | none | wipe | wipe | rest |
/// | founder | refuse | start | start, which says what is missing |
/// | M | start | wipe | join |
/// | other | wipe | wipe | join |
pub fn judge(role: Option<MemberId>, found: Found) -> Verdict {
    const FOUNDER: MemberId = MemberId(0);
    match (role, found.record) {
        (None, _) if found.anything => Verdict::Wipe,
        (None, _) => Verdict::Rest,
        (Some(FOUNDER), None) => Verdict::Start,
        // Roles of founders do not come back, but of a backup: nobody knows
        // then whose data these are.
        (Some(FOUNDER), Some(_)) => Verdict::Refuse,
        (Some(role), Some(record)) if role == record => Verdict::Start,
        (Some(_), Some(_)) => Verdict::Wipe,
        (Some(_), None) if found.log => Verdict::Wipe,
        (Some(_), None) => Verdict::Join,
    }
}

/// Looks at the disk.
pub fn find(etcd: &layout::Etcd) -> Result<Found, StandingError> {
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

/// Whether etcd's log is there. etcd makes its directory first and the log in
/// it later, whole.
pub fn has_log(etcd: &layout::Etcd) -> bool {
    etcd.log().exists()
}

/// The record of a join, if there is one.
pub fn load(etcd: &layout::Etcd) -> Result<Option<Joining>, StandingError> {
    let read = |stored: StoredMember| {
        if stored.member_id == 0 || stored.initial_cluster.is_empty() {
            return Err("names no member");
        }
        Ok(Joining {
            member: MemberId(stored.member_id),
            initial_cluster: stored.initial_cluster,
        })
    };
    Ok(record::load(&etcd.member(), read)?)
}

/// Writes the record, durably.
pub fn save(etcd: &layout::Etcd, joining: &Joining) -> Result<(), StandingError> {
    let stored = StoredMember {
        version: StoredMember::VERSION,
        member_id: joining.member.0,
        initial_cluster: joining.initial_cluster.clone(),
    };
    Ok(record::save(&etcd.member(), &stored)?)
}

/// Whether the member of the record has taken part.
pub fn has_joined(etcd: &layout::Etcd) -> bool {
    etcd.joined().exists()
}

/// Notes, durably, that it has.
pub fn note_joined(etcd: &layout::Etcd) -> Result<(), StandingError> {
    Ok(files::write_atomic(
        &etcd.joined(),
        b"",
        files::PRIVATE_FILE,
    )?)
}

/// Whether there are, or will be, other members.
pub fn expects_peers(etcd: &layout::Etcd) -> Result<bool, StandingError> {
    Ok(etcd.company().exists() || load(etcd)?.is_some())
}

/// Notes, durably, that there will be.
pub fn note_peers_expected(etcd: &layout::Etcd) -> Result<(), StandingError> {
    Ok(files::write_atomic(
        &etcd.company(),
        b"",
        files::PRIVATE_FILE,
    )?)
}

/// Removes everything that makes this node a member, durably. etcd must have
/// ended. Blocks on the disk.
pub fn wipe(etcd: &layout::Etcd) -> Result<(), StandingError> {
    discard_data(etcd)?;
    for path in traces(etcd) {
        files::remove_durably(&path)?;
    }
    Ok(())
}

/// Of a member, beside its data, in the order in which they go.
fn traces(etcd: &layout::Etcd) -> [PathBuf; 6] {
    let peer = etcd.peer();
    [
        peer.certificate(),
        peer.ca(),
        etcd.joined(),
        etcd.company(),
        peer.key(),
        etcd.member(),
    ]
}

/// Removes etcd's data, durably.
pub fn discard_data(etcd: &layout::Etcd) -> Result<(), StandingError> {
    let path = etcd.data();
    match fs::remove_dir_all(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(StandingError::Remove { path, source }),
    }
    Ok(files::sync_dir(etcd.path())?)
}

#[cfg(test)]
mod tests {
    use hearth_api::stored_form;

    use super::*;
    use hearth_host::layout::Root;

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

    /// The writes of a join, one after the other.
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
            // The same role: whatever is there is used, or written again.
            let expected = if cut < 4 {
                Verdict::Join
            } else {
                Verdict::Start
            };
            assert_eq!(judge(Some(M), found), expected, "{cut}: {found:?}");
            // None, or another: nothing stays, and the next one finds nothing.
            let changed = judge(None, found);
            let traces = cut > 2;
            assert_eq!(changed == Verdict::Wipe, traces, "{cut}: {found:?}");
            let other = judge(Some(MemberId(8)), found);
            assert!(matches!(other, Verdict::Wipe | Verdict::Join), "{cut}");
            assert_eq!(other == Verdict::Wipe, found.record.is_some(), "{cut}");
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
            // The data go in pieces.
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
                assert_eq!(verdict == Verdict::Wipe, !is_done, "{cut}: {found:?}");
            }
            wipe(&etcd).unwrap();
            let found = find(&etcd).unwrap();
            assert!(!found.anything, "{found:?}");
            assert_eq!(judge(None, found), Verdict::Rest);
            assert_eq!(judge(Some(MemberId(8)), found), Verdict::Join);
        }
    }

    #[test]
    fn a_founder_is_wiped_by_another_role_only() {
        let founder = Found {
            record: None,
            log: true,
            anything: true,
        };
        assert_eq!(judge(Some(MemberId(0)), founder), Verdict::Start);
        assert_eq!(judge(None, founder), Verdict::Wipe);
        assert_eq!(judge(Some(M), founder), Verdict::Wipe);
        // What is missing is missed where etcd is started.
        let lost = Found {
            log: false,
            ..founder
        };
        assert_eq!(judge(Some(MemberId(0)), lost), Verdict::Start);
        let joined = Found {
            record: Some(M),
            ..founder
        };
        assert_eq!(judge(Some(MemberId(0)), joined), Verdict::Refuse);
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

        // These say what they say by being there.
        note_joined(&etcd).unwrap();
        note_peers_expected(&etcd).unwrap();
        for path in [etcd.joined(), etcd.company()] {
            assert_eq!(fs::read(path).unwrap(), b"");
        }
    }
}
