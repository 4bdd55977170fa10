//! The results of a sweep, in the folder of its recording.
//!
//! `results.jsonl` has a line for each cut that was tried, with the image that booted; the last one counts. A sweep that was
//! interrupted skips what has passed with its image. `summary.txt` has the counts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use hearth_write_log::{Cut, Pick};
use serde::{Deserialize, Serialize};

use crate::Outcome;

/// What a machine does after a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum After {
    /// It continues without parameters, as the same node, and is HOME.
    Continues,
    /// It knows nothing yet, refuses to boot without parameters, and founds a cluster with them.
    Begins,
    /// Anything else.
    Fails,
}

/// The result of one cut.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Tried {
    /// The digest of the image.
    pub image: String,
    /// Its name.
    pub cut: String,
    pub after: After,
    pub seconds: f64,
    /// Why it failed; else empty.
    pub why: String,
}

/// All results that there are with one image.
pub(super) struct Results {
    folder: PathBuf,
    image: String,
    file: File,
    all: BTreeMap<Cut, Tried>,
}

impl Results {
    pub(super) fn open(folder: &Path, image: &str) -> anyhow::Result<Self> {
        let path = folder.join("results.jsonl");
        let known = match fs::read_to_string(&path) {
            Ok(known) => known,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let mut all = BTreeMap::new();
        for (line, number) in known.lines().zip(1..) {
            let context = || format!("{}, line {number}: not the result of a cut", path.display());
            let tried: Tried = serde_json::from_str(line).with_context(context)?;
            if tried.image == image {
                all.insert(tried.cut.parse().with_context(context)?, tried);
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&path);
        Ok(Self {
            folder: folder.to_owned(),
            image: image.to_owned(),
            file: file.with_context(|| format!("cannot write {}", path.display()))?,
            all,
        })
    }

    pub(super) fn has_passed(&self, cut: Cut) -> bool {
        self.all
            .get(&cut)
            .is_some_and(|tried| tried.after != After::Fails)
    }

    pub(super) fn add(&mut self, cut: Cut, seconds: f64, result: Result<After, String>) -> Outcome {
        let (after, why) = match result {
            Ok(after) => (after, String::new()),
            Err(why) => (After::Fails, why),
        };
        let tried = Tried {
            image: self.image.clone(),
            cut: cut.to_string(),
            after,
            seconds,
            why,
        };
        let line = serde_json::to_string(&tried)? + "\n";
        self.file.write_all(line.as_bytes())?;
        self.file.sync_data()?;
        self.all.insert(cut, tried);
        Ok(())
    }

    /// Writes and returns the summary about these cuts.
    pub(super) fn summary(&self, cuts: &[Cut]) -> anyhow::Result<String> {
        let tried: Vec<&Tried> = cuts.iter().filter_map(|cut| self.all.get(cut)).collect();
        let count = |after| tried.iter().filter(|tried| tried.after == after).count();
        let seconds: f64 = tried.iter().map(|tried| tried.seconds).sum();
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{} of {} cuts: {} continue, {} start a new enrolment, {} fail; {:.0} minutes of machines",
            tried.len(),
            cuts.len(),
            count(After::Continues),
            count(After::Begins),
            count(After::Fails),
            seconds / 60.0
        );
        for failed in tried.iter().filter(|tried| tried.after == After::Fails) {
            let _ = writeln!(
                text,
                "failed: {}: {}",
                failed.cut,
                failed.why.lines().next().unwrap_or_default()
            );
        }
        let path = self.folder.join("summary.txt");
        fs::write(&path, &text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(text)
    }

    /// Checks that all of these have passed, and that no node starts a new enrolment after it could have continued: once its
    /// keys are durable, they stay.
    pub(super) fn verify(&self, cuts: &[Cut]) -> Outcome {
        let failed = cuts.iter().filter(|cut| !self.has_passed(**cut));
        let failed: Vec<String> = failed.map(Cut::to_string).collect();
        ensure!(
            failed.is_empty(),
            "{} of {} cuts failed: {failed:?}",
            failed.len(),
            cuts.len()
        );
        let continues = self
            .all
            .iter()
            .find(|(cut, tried)| cut.pick == Pick::None && tried.after == After::Continues);
        let begins = self
            .all
            .iter()
            .rfind(|(_, tried)| tried.after == After::Begins);
        if let (Some((continues, _)), Some((begins, _))) = (continues, begins) {
            ensure!(
                begins.after < continues.after,
                "the node starts a new enrolment after cut {begins}, and continues after the earlier {continues}"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(name: &str) -> Cut {
        name.parse().unwrap()
    }

    fn results(folder: &Path) -> Results {
        Results::open(folder, "image").unwrap()
    }

    #[test]
    fn what_has_passed_with_an_image_is_remembered() {
        let folder = std::env::temp_dir().join(format!("hearth-cuts-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let cuts = ["0", "0+seed3", "1", "2"].map(cut);
        let mut first = results(&folder);
        first.add(cuts[0], 60.0, Ok(After::Begins)).unwrap();
        first
            .add(cuts[1], 60.0, Err("lost\nits console".into()))
            .unwrap();
        first.add(cuts[2], 60.0, Ok(After::Continues)).unwrap();
        drop(first);
        assert!(
            !Results::open(&folder, "another")
                .unwrap()
                .has_passed(cuts[0])
        );
        let mut second = results(&folder);
        let left: Vec<_> = cuts
            .iter()
            .filter(|cut| !second.has_passed(**cut))
            .collect();
        assert_eq!(left, [&cuts[1], &cuts[3]]);
        assert_eq!(
            second.summary(&cuts).unwrap(),
            "3 of 4 cuts: 1 continue, 1 start a new enrolment, 1 fail; 3 minutes of machines\nfailed: 0+seed3: lost\n"
        );
        assert!(second.verify(&cuts).is_err());
        second.add(cuts[1], 1.0, Ok(After::Continues)).unwrap();
        second.add(cuts[3], 1.0, Ok(After::Continues)).unwrap();
        second.verify(&cuts).unwrap();
        // It had its keys after the first promise.
        second.add(cut("1+seed1"), 1.0, Ok(After::Begins)).unwrap();
        let error = second.verify(&cuts).unwrap_err().to_string();
        assert!(
            error.contains("starts a new enrolment after cut 1+seed1"),
            "{error}"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
}
