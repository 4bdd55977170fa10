//! How often etcd was started on a member's data: by that, a disk that went back in time is told from the right one.
//!
//! A member whose disk was restored from a snapshot, or that runs on a copy of its disk in another machine, has forgotten
//! what it has acknowledged and how it has voted. With it, a quorum may lose what was acknowledged, and nobody would notice.
//! So each start of the control plane is counted on the disk before etcd is started, and the counter is then remembered
//! elsewhere: by the curators, with the node's status, and where the node uses its TPM, by a counter of the TPM. If the
//! counter that is remembered is higher than that on the disk, etcd is not started.
//!
//! The disk is written first, so it is never behind by a power cut. The counter belongs to one member of etcd, so a node that
//! joins anew starts at one. What has no counter on its disk has not been started by this release, and is only known to be
//! behind if a curator remembers a counter of that member.
//!
//! The counter says nothing of what was written between two starts: a snapshot that was taken since the last start is not
//! noticed.

use hearth_api::private::StoredStarts;
use hearth_host::layout;
use hearth_host::record::{self, Record as _};

use super::{MemberId, MemberRecordError};

/// How often etcd was started for a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Starts {
    /// The member, as in the node's role: 0 for the node that bootstrapped the cluster.
    pub member: MemberId,
    /// The counter.
    pub count: u64,
    /// The value of the TPM's counter after that start; 0 if it was not counted there.
    pub tpm: u64,
}

/// What is remembered elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// What curators remember of this member, if one could be asked.
    pub curators: Option<u64>,
    /// The value of the TPM's counter, where the node uses its TPM.
    pub tpm: Option<TpmCounter>,
}

/// The counter of a TPM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TpmCounter {
    /// Its value.
    pub value: u64,
    /// It was made a moment ago, and remembers nothing.
    pub is_new: bool,
}

/// Who remembers a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// The curators.
    Curators,
    /// The TPM of this machine.
    Tpm,
}

/// The disk is not the one on which etcd was last started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the disk went back in time, or is a copy: it has counted {disk} starts of etcd, and {} {known}; not starting etcd. \
     Remove the role consensus-member from this node and add it again",
    match .witness {
        Witness::Curators => "the curators remember",
        Witness::Tpm => "the TPM's counter is at",
    }
)]
pub struct Behind {
    /// The counter on the disk; 0 if there is none.
    pub disk: u64,
    /// The highest counter that is remembered.
    pub known: u64,
    /// By whom.
    pub witness: Witness,
}

/// The counters of the next start of a member, given what is on the disk and what is remembered elsewhere.
pub fn next(member: MemberId, disk: Option<Starts>, known: Known) -> Result<Starts, Behind> {
    let disk = disk.filter(|starts| starts.member == member);
    let (count, tpm) = disk.map_or((0, 0), |starts| (starts.count, starts.tpm));
    let behind = |disk, known, witness| Behind {
        disk,
        known,
        witness,
    };
    if let Some(counter) = known.tpm
        && tpm != 0
        && !counter.is_new
        && counter.value > tpm
    {
        return Err(behind(tpm, counter.value, Witness::Tpm));
    }
    match known.curators {
        Some(known) if known > count => Err(behind(count, known, Witness::Curators)),
        _ => Ok(Starts {
            member,
            count: count.saturating_add(1),
            tpm: known
                .tpm
                .map_or(tpm, |counter| counter.value.saturating_add(1)),
        }),
    }
}

/// Reads the counter on the disk, if there is one.
pub fn load(etcd: &layout::Etcd) -> Result<Option<Starts>, MemberRecordError> {
    let read = |stored: StoredStarts| match stored.count {
        0 => Err("count: expected at least 1"),
        count => Ok(Starts {
            member: MemberId(stored.member_id),
            count,
            tpm: stored.tpm_count,
        }),
    };
    Ok(record::load(&etcd.starts(), read)?)
}

/// Writes the counter durably.
pub fn save(etcd: &layout::Etcd, starts: Starts) -> Result<(), MemberRecordError> {
    let stored = StoredStarts {
        version: StoredStarts::VERSION,
        member_id: starts.member.0,
        count: starts.count,
        tpm_count: starts.tpm,
    };
    Ok(record::save(&etcd.starts(), &stored)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_api::stored_form;
    use hearth_host::layout::Root;
    use proptest::prelude::*;

    use super::*;

    const M: MemberId = MemberId(7);

    fn starts(count: u64, tpm: u64) -> Option<Starts> {
        Some(Starts {
            member: M,
            count,
            tpm,
        })
    }

    fn curators(count: u64) -> Known {
        Known {
            curators: Some(count),
            tpm: None,
        }
    }

    fn tpm(value: u64) -> Known {
        Known {
            curators: None,
            tpm: Some(TpmCounter {
                value,
                is_new: false,
            }),
        }
    }

    #[test]
    fn a_disk_is_behind_what_is_remembered_of_its_member_only() {
        let behind = |disk, known| {
            Err(Behind {
                disk,
                known,
                witness: Witness::Curators,
            })
        };
        let nothing = Known::default();
        let other = Some(Starts {
            member: MemberId(8),
            count: 9,
            tpm: 9,
        });
        for (disk, known, expected) in [
            (None, nothing, Ok(1)),
            (None, curators(1), behind(0, 1)),
            (starts(4, 0), nothing, Ok(5)),
            (starts(4, 0), curators(3), Ok(5)),
            (starts(4, 0), curators(4), Ok(5)),
            (starts(4, 0), curators(5), behind(4, 5)),
            // Of an earlier member of the node.
            (other, nothing, Ok(1)),
            (other, tpm(20), Ok(1)),
            (other, curators(1), behind(0, 1)),
        ] {
            let found = next(M, disk, known).map(|starts| starts.count);
            assert_eq!(found, expected, "{disk:?} {known:?}");
        }
    }

    #[test]
    fn a_disk_is_behind_the_counter_of_its_tpm() {
        let after = |disk, known| next(M, disk, known).map(|starts| starts.tpm);
        assert_eq!(after(starts(4, 30), tpm(30)), Ok(31));
        // The power was cut before the TPM had counted.
        assert_eq!(after(starts(5, 31), tpm(30)), Ok(31));
        // The TPM was not used before, is not used any more, or was cleared.
        assert_eq!(after(starts(4, 0), tpm(30)), Ok(31));
        assert_eq!(after(starts(4, 30), Known::default()), Ok(30));
        let new = TpmCounter {
            value: 40,
            is_new: true,
        };
        let cleared = Known {
            curators: None,
            tpm: Some(new),
        };
        assert_eq!(after(starts(4, 30), cleared), Ok(41));
        let behind = after(starts(3, 29), tpm(30)).unwrap_err();
        assert_eq!((behind.disk, behind.known), (29, 30));
        assert!(
            behind.to_string().contains("the TPM's counter is at 30"),
            "{behind}"
        );
    }

    proptest! {
        /// Each start is remembered elsewhere or not, and the node can ask or not; power may be cut before the TPM counts.
        #[test]
        fn the_right_disk_is_never_refused_and_an_older_one_is(
            starts in prop::collection::vec(any::<(bool, bool, bool)>(), 1..20),
            snapshot in any::<prop::sample::Index>(),
        ) {
            let (mut disk, mut remembered, mut counter) = (None, None, 100);
            let mut disks = vec![(disk, counter)];
            for (asks, arrives, counts) in starts {
                let known = Known {
                    curators: remembered.filter(|_| asks),
                    ..tpm(counter)
                };
                let started = next(M, disk, known).expect("the right disk");
                disk = Some(started);
                if counts {
                    counter += 1;
                }
                disks.push((disk, started.tpm));
                if arrives {
                    remembered = Some(started.count);
                }
            }
            let index = snapshot.index(disks.len());
            let (old, tpm_then) = disks[index];
            let known = Known { curators: remembered, tpm: None };
            let is_older = remembered.is_some_and(|count| usize::try_from(count).unwrap() > index);
            prop_assert_eq!(next(M, old, known).is_err(), is_older);
            let is_older = old.is_some() && counter > tpm_then;
            prop_assert_eq!(next(M, old, tpm(counter)).is_err(), is_older);
        }
    }

    #[test]
    fn the_stored_form_stays() {
        let directory = tempfile::tempdir().unwrap();
        let data = Root::under(directory.path()).data;
        data.make_directories().unwrap();
        let etcd = data.etcd();
        assert_eq!(load(&etcd).unwrap(), None);
        let starts = Starts {
            member: MemberId(0x0102_0304_0506_0708),
            count: 9,
            tpm: 30,
        };
        save(&etcd, starts).unwrap();
        let stored = stored_form!("etcd-starts.pb", fs::read(etcd.starts()).unwrap());
        fs::write(etcd.starts(), stored).unwrap();
        assert_eq!(load(&etcd).unwrap(), Some(starts));
        fs::write(etcd.starts(), b"").unwrap();
        assert!(load(&etcd).is_err(), "corrupt is not absent");
    }
}
