//! Which disk is meant: a pure decision about what is known of all disks.
//!
//! Nothing is guessed. Either one disk is left by the conditions, or none is chosen and the reason says
//! of each disk what speaks against it. A disk with something on it is chosen only by its own name: by the condition `overwrite`, or by somebody who types it.

use std::fmt;

use hearth_api::disk_conditions::DiskConditions;
use hearth_sys::identity::{Identity, plain_wwn};

use super::content::Content;

/// A disk that may be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The kernel's name, such as `nvme0n1`.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// Of its sectors, in bytes.
    pub sector_size: u32,
    /// Whether the kernel refuses writes.
    pub is_read_only: bool,
    /// What it says of itself.
    pub identity: Identity,
    /// What is on it.
    pub content: Content,
}

/// What the disk is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// In bytes.
    pub size: u64,
    /// In bytes; none: any.
    pub sector_size: Option<u32>,
}

/// Why no disk was chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub enum NoChoice {
    #[error("expected a disk, got none")]
    NoDisk,
    #[error("expected one disk that meets {wanted}, got none of {}", list(disks))]
    NoMatch { wanted: String, disks: Vec<String> },
    #[error("expected one disk that meets {wanted}, got {}", list(disks))]
    Several { wanted: String, disks: Vec<String> },
    #[error("expected one empty disk that meets {wanted}, got {}", list(disks))]
    SeveralEmpty { wanted: String, disks: Vec<String> },
    #[error("{disk}: {obstacle}")]
    Unfit { disk: String, obstacle: Obstacle },
}

/// What speaks against a disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says it")]
pub enum Obstacle {
    #[error("expected a disk that can be written, but it is read-only")]
    ReadOnly,
    #[error("expected at least {wanted} bytes, got {found}")]
    TooSmall { wanted: u64, found: u64 },
    #[error(
        "expected sectors of {wanted} bytes, got {found}: build the medium with --sector-size {found}"
    )]
    SectorSize { wanted: u32, found: u32 },
    #[error(
        "expected an empty disk, got {0}; to overwrite it, set `overwrite` to its serial number or WWN"
    )]
    NotEmpty(String),
}

fn list(disks: &[String]) -> String {
    match disks {
        [] => "none".to_owned(),
        some => some.join("; "),
    }
}

impl Candidate {
    /// Whether this text is its serial number or its World Wide Name.
    fn is_named(&self, text: &str) -> bool {
        self.identity.serial.as_deref() == Some(text) || self.has_wwn(text)
    }

    fn has_wwn(&self, text: &str) -> bool {
        self.identity.wwn.is_some() && self.identity.wwn == plain_wwn(text)
    }

    /// Whether the conditions hold for it, whatever is on it.
    pub fn is_meant_by(&self, wanted: &DiskConditions) -> bool {
        let DiskConditions {
            serial,
            wwn,
            device,
            sizes,
            overwrite,
        } = wanted;
        (serial.is_none() || serial == &self.identity.serial)
            && wwn.as_ref().is_none_or(|wwn| self.has_wwn(wwn))
            && device.as_ref().is_none_or(|name| *name == self.name)
            && sizes.contains(&self.size)
            && overwrite.as_ref().is_none_or(|name| self.is_named(name))
    }

    /// What makes it useless, whatever is on it.
    pub fn obstacle(&self, needs: Needs) -> Option<Obstacle> {
        if self.is_read_only {
            return Some(Obstacle::ReadOnly);
        }
        if self.size < needs.size {
            return Some(Obstacle::TooSmall {
                wanted: needs.size,
                found: self.size,
            });
        }
        let wanted = needs.sector_size?;
        (self.sector_size != wanted).then_some(Obstacle::SectorSize {
            wanted,
            found: self.sector_size,
        })
    }
}

/// On one line: name, model, serial number, WWN, size and content.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity { model, serial, wwn } = &self.identity;
        write!(f, "{} (", self.name)?;
        if let Some(model) = model {
            write!(f, "{model}, ")?;
        }
        if let Some(serial) = serial {
            write!(f, "serial {serial}, ")?;
        }
        if let Some(wwn) = wwn {
            write!(f, "WWN {wwn}, ")?;
        }
        let megabytes = self.size / 1_000_000;
        write!(
            f,
            "{}.{} GB): {}",
            megabytes / 1000,
            megabytes % 1000 / 100,
            self.content
        )
    }
}

/// The disk that the conditions mean.
///
/// # Errors
/// If it is not exactly one, or not one that can be used.
pub fn choose<'a>(
    wanted: &DiskConditions,
    disks: &'a [Candidate],
    needs: Needs,
) -> Result<&'a Candidate, NoChoice> {
    if disks.is_empty() {
        return Err(NoChoice::NoDisk);
    }
    let lines = |disks: &[&Candidate]| disks.iter().map(ToString::to_string).collect();
    let meeting: Vec<&Candidate> = disks
        .iter()
        .filter(|disk| disk.is_meant_by(wanted))
        .collect();
    let is_named = [
        &wanted.serial,
        &wanted.wwn,
        &wanted.device,
        &wanted.overwrite,
    ];
    let is_named = is_named.iter().any(|name| name.is_some());
    let disk = match meeting[..] {
        [] => {
            return Err(NoChoice::NoMatch {
                wanted: wanted.to_string(),
                disks: lines(&disks.iter().collect::<Vec<_>>()),
            });
        }
        [one] => one,
        [..] if is_named => {
            return Err(NoChoice::Several {
                wanted: wanted.to_string(),
                disks: lines(&meeting),
            });
        }
        [..] => {
            let is_fit =
                |disk: &&&Candidate| disk.content.is_vacant() && disk.obstacle(needs).is_none();
            let fit: Vec<&Candidate> = meeting.iter().filter(is_fit).copied().collect();
            match fit[..] {
                [one] => one,
                [] => {
                    return Err(NoChoice::SeveralEmpty {
                        wanted: wanted.to_string(),
                        disks: lines(&meeting),
                    });
                }
                [..] => {
                    return Err(NoChoice::SeveralEmpty {
                        wanted: wanted.to_string(),
                        disks: lines(&fit),
                    });
                }
            }
        }
    };
    let obstacle = disk.obstacle(needs).or_else(|| {
        let may_overwrite = disk.content.is_vacant() || wanted.overwrite.is_some();
        (!may_overwrite).then(|| Obstacle::NotEmpty(disk.content.to_string()))
    });
    match obstacle {
        None => Ok(disk),
        Some(obstacle) => Err(NoChoice::Unfit {
            disk: disk.to_string(),
            obstacle,
        }),
    }
}

#[cfg(any(test, feature = "testing"))]
pub mod testing {
    //! Disks for tests.

    use super::*;

    /// What the disks below have room for.
    pub const NEEDS: Needs = Needs {
        size: 4 << 30,
        sector_size: Some(512),
    };

    /// An empty disk of 8 GiB with this name, whose serial number is its name in capitals.
    pub fn disk(name: &str) -> Candidate {
        Candidate {
            name: name.to_owned(),
            size: 8 << 30,
            sector_size: 512,
            is_read_only: false,
            identity: Identity {
                model: Some("Disk".to_owned()),
                serial: Some(name.to_uppercase()),
                wwn: None,
            },
            content: Content::Empty,
        }
    }

    /// The same with something on it.
    pub fn full(name: &str) -> Candidate {
        Candidate {
            content: Content::Other("a file system (xfs)".to_owned()),
            ..disk(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::{NEEDS, disk, full};
    use super::*;

    fn any() -> DiskConditions {
        DiskConditions::default()
    }

    fn chosen(wanted: &DiskConditions, disks: &[Candidate]) -> Result<String, String> {
        let chosen = choose(wanted, disks, NEEDS);
        chosen
            .map(|disk| disk.name.clone())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn without_conditions_it_is_the_only_empty_disk() {
        let found = chosen(&any(), &[full("sda"), disk("sdb"), full("sdc")]);
        assert_eq!(found.as_deref(), Ok("sdb"));
        let two = chosen(&any(), &[disk("sda"), disk("sdb")]).unwrap_err();
        let expected = "expected one empty disk that meets no further condition, got \
                        sda (Disk, serial SDA, 8.5 GB): empty; sdb (Disk, serial SDB, 8.5 GB): empty";
        assert_eq!(two, expected);
        let none = chosen(&any(), &[full("sda"), full("sdb")]).unwrap_err();
        assert!(none.contains("sda (Disk, serial SDA, 8.5 GB): a file system (xfs)"));
        let only = chosen(&any(), &[full("sda")]).unwrap_err();
        assert!(only.contains("expected an empty disk, got a file system (xfs)"));
        assert_eq!(choose(&any(), &[], NEEDS), Err(NoChoice::NoDisk));
        // One that was begun is as good as an empty one.
        let begun = Candidate {
            content: Content::Unfinished,
            ..disk("sdb")
        };
        assert_eq!(chosen(&any(), &[full("sda"), begun]).as_deref(), Ok("sdb"));
    }

    #[test]
    fn all_conditions_have_to_hold() {
        let disks = [disk("sda"), disk("sdb")];
        let wanted = DiskConditions {
            serial: Some("SDB".into()),
            ..any()
        };
        assert_eq!(chosen(&wanted, &disks).as_deref(), Ok("sdb"));
        let both = DiskConditions {
            device: Some("sda".into()),
            ..wanted
        };
        let error = chosen(&both, &disks).unwrap_err();
        let expected =
            "expected one disk that meets serial \"SDB\" and device \"sda\", got none of sda";
        assert!(error.starts_with(expected), "{error}");
        let large = Candidate {
            size: 1 << 40,
            ..disk("sdb")
        };
        let wanted = DiskConditions {
            sizes: 1 << 35..=u64::MAX,
            ..any()
        };
        let disks = [disk("sda"), large];
        assert_eq!(chosen(&wanted, &disks).as_deref(), Ok("sdb"));
        let named = Candidate {
            identity: Identity {
                wwn: Some("5000c500a1b2c3d4".into()),
                ..Identity::default()
            },
            ..disk("sdb")
        };
        let wanted = DiskConditions {
            wwn: Some("naa.5000C500A1B2C3D4".into()),
            ..any()
        };
        assert_eq!(chosen(&wanted, &[disk("sda"), named]).as_deref(), Ok("sdb"));
    }

    #[test]
    fn only_its_own_name_makes_a_disk_lose_what_is_on_it() {
        let disks = [disk("sda"), full("sdb")];
        let by = |overwrite: &str| DiskConditions {
            overwrite: Some(overwrite.to_owned()),
            ..any()
        };
        assert_eq!(chosen(&by("SDB"), &disks).as_deref(), Ok("sdb"));
        // The kernel's name is none of its own.
        let error = chosen(&by("sdb"), &disks).unwrap_err();
        assert!(error.contains("overwrite \"sdb\", got none of"), "{error}");
        let twins = [full("sdb"), full("sdb")];
        let error = chosen(&by("SDB"), &twins).unwrap_err();
        assert!(error.contains("expected one disk that meets overwrite"));
        let wanted = DiskConditions {
            device: Some("sdb".into()),
            ..any()
        };
        let error = chosen(&wanted, &disks).unwrap_err();
        assert!(error.contains("set `overwrite`"), "{error}");
    }

    #[test]
    fn a_disk_that_the_image_is_not_for_is_refused() {
        let wanted = DiskConditions {
            overwrite: Some("SDA".into()),
            ..any()
        };
        for (unfit, what) in [
            (
                Candidate {
                    size: 1 << 30,
                    ..full("sda")
                },
                "expected at least 4294967296 bytes, got 1073741824",
            ),
            (
                Candidate {
                    sector_size: 4096,
                    ..full("sda")
                },
                "--sector-size 4096",
            ),
            (
                Candidate {
                    is_read_only: true,
                    ..full("sda")
                },
                "read-only",
            ),
        ] {
            let error = chosen(&wanted, &[unfit]).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }

    proptest! {
        /// Whatever is asked for, a disk with something on it is chosen only by its serial number.
        #[test]
        fn what_is_on_a_disk_is_never_lost_unasked(
            vacant: [bool; 4],
            serial in proptest::option::of("SD[A-D]"),
            device in proptest::option::of("sd[a-d]"),
            overwrite in proptest::option::of("SD[A-D]"),
        ) {
            let names = ["sda", "sdb", "sdc", "sdd"];
            let disks = names.iter().zip(vacant);
            let disks: Vec<Candidate> = disks.map(|(name, vacant)| if vacant { disk(name) } else { full(name) }).collect();
            let wanted = DiskConditions { serial: serial.clone(), device: device.clone(), overwrite: overwrite.clone(), ..any() };
            if let Ok(chosen) = choose(&wanted, &disks, NEEDS) {
                let own = chosen.identity.serial.clone();
                prop_assert!(chosen.content.is_vacant() || overwrite == own);
                prop_assert!(serial.is_none() || serial == own);
                prop_assert!(device.is_none() || device.as_ref() == Some(&chosen.name));
            }
        }
    }
}
